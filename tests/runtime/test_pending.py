"""What is left to do for parameter groups is known to all threads, and forgotten when it is done."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fsdp_compile.runtime.units import FSDPParamGroup
from torch import nn

import fsdp_compile
from tests.fake_world import fake_world


@pytest.fixture
def _quick_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _model(count: int) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))
    for layer in model:
        fsdp_compile.fully_shard(layer)
    return fsdp_compile.fully_shard(model)


def _groups(model: nn.Module) -> list[FSDPParamGroup]:
    return [group for unit in fsdp_compile.units(model) for group in unit.param_groups]


def test_what_is_done_is_forgotten() -> None:
    with fake_world(2):
        model = _model(3)
        flats = _groups(model)
        units = [flat.unit for flat in flats]
        state = units[0].model
        assert not state.is_any_pending()
        flats[2].flat_param.grad = torch.zeros_like(flats[2].flat_param)
        flats[1].update_state.has_new_grads = True
        for flat in reversed(flats):
            flat.unit.model.mark_pending(flat)
        assert state.pending_in(units) == flats[1:], "in the units' order, without what is settled"
        assert state.pending_in(units[:1]) == []
        assert state.is_any_pending()
        flats[1].update_state.has_new_grads, flats[2].flat_param.grad = False, None
        assert not state.is_any_pending()


@pytest.mark.usefixtures("_quick_turns")
def test_threads_do_not_disturb_one_another() -> None:
    with fake_world(2):
        models = [_model(20) for _ in range(3)]
        failed: list[BaseException] = []

        def work(flats: list[FSDPParamGroup]) -> None:
            try:
                for _ in range(40):
                    _note_and_settle(flats)
            except BaseException as error:  # what a thread raises is seen by nobody else
                failed.append(error)

        threads: list[Any] = [threading.Thread(target=work, args=(_groups(model),)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []


def _note_and_settle(flats: list[FSDPParamGroup]) -> None:
    units = [flat.unit for flat in flats]
    for flat in flats:
        flat.update_state.has_new_grads = True
        flat.unit.model.mark_pending(flat)
    assert units[0].model.pending_in(units) == flats
    for flat in flats:
        flat.update_state.has_new_grads = False
    assert not units[0].model.pending_in(units)
