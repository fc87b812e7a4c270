"""Programs under torch's FSDP2, compiled and in eager code, on two ranks.

Where a unit is read by two graphs, or by a graph and by hooks, its gradients are reduced once for each: they are equal
within `REDUCED_TWICE` there, and to the bit elsewhere.
"""

from __future__ import annotations

import traceback

import torch

from tests.fsdp2.cases import breaks, compiled, structures, values  # noqa: F401
from tests.fsdp2.decoder import GROUPS
from tests.long import parametrize
from tests.ranks import on_ranks

ALWAYS = ["breaks", "compiled", "gradients", "uneven_ranks"]


@parametrize("group", GROUPS, always=ALWAYS)
@on_ranks()
def test_like_fsdp2(group: str) -> None:
    failed = {}
    for name, case in GROUPS[group].items():
        torch.compiler.reset()
        torch.manual_seed(0)
        try:
            case()
        except Exception:
            failed[name] = traceback.format_exc(limit=-6)
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())
