"""Programs under torch's FSDP2, compiled and in eager code, on two ranks."""

from __future__ import annotations

import pytest

from tests.fsdp2 import cases, edge_cases, llama_cases
from tests.fsdp2.pair import run_cases
from tests.ranks import run_ranks

GROUPS = cases.GROUPS | edge_cases.GROUPS | llama_cases.GROUPS


def _run(group: str, names: list[str]) -> dict[str, str]:
    return run_cases(GROUPS[group], names)


@pytest.mark.parametrize("group", GROUPS)
def test_like_fsdp2(group: str) -> None:
    for failed in run_ranks(_run, group, list(GROUPS[group])):
        assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())
