"""The list of PyTorch's tests that may fail."""

from __future__ import annotations

import re

from tests.torch_fsdp2.__main__ import expected_failures


def test_each_test_is_listed_once_for_a_way_to_run_it_with_a_reason() -> None:
    failures = expected_failures()
    assert len({failure[:2] for failure in failures}) == len(failures)
    for kind, name, reason in failures:
        assert kind in ("compiled", "uncompiled"), name
        assert re.fullmatch(r"test_\w+::Test\w+::test_\w+", name)
        assert len(reason.split()) > 5, f"{name} has no reason"
