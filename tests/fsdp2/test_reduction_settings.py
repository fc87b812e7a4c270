"""Settings of FSDP2 about reductions and what is kept, in compiled steps: the numbers of uncompiled ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

from fsdp_compile.fsdp2.take_over import model_of
from tests import long
from tests.fsdp2.mlp import batch, compiled, only_hooks, sharded, train, unequal
from tests.ranks import run_ranks


@dataclasses.dataclass(frozen=True)
class _Case:
    """What is set.

    Attributes:
        before: Called with the model before each microbatch, with its number.
        mesh: Shape of (replicate, shard); one of shards alone if empty.
        micro_batches: In each step.
        is_kept: Whether FSDP2's hooks gather units in some forwards.
        arguments: Of `fully_shard`.
    """

    before: Callable[[Any, int], None]
    mesh: tuple[int, ...] = ()
    micro_batches: int = 1
    is_kept: bool = False
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


def _each(model: Any, name: str, value: Any) -> None:
    for module in (*model.layers, model):
        getattr(module, name)(value)


def _keeps(model: Any, number: int) -> None:
    is_last = number == 1
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)


def _divides(model: Any, _: int) -> None:
    _each(model, "set_gradient_divide_factor", 3.0)
    _each(model, "set_force_sum_reduction_for_comms", True)  # noqa: FBT003  torch's


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = {
    "unused": _Case(lambda model, _: model.set_reduce_scatter_unused_params(True)),
    "sums alone": _Case(lambda model, _: _each(model, "set_force_sum_reduction_for_comms", True)),  # noqa: FBT003  torch's
    "divided": _Case(_divides),
    "kept between microbatches": _Case(_keeps, micro_batches=2, is_kept=True),
    "kept, bf16": _Case(_keeps, micro_batches=2, is_kept=True, arguments={"mp_policy": BF16}),
    "not gathered in backward": _Case(lambda model, _: model.set_reshard_after_forward(False)),
    "reduced apart": _Case(lambda model, _: model.set_separate_reduce_scatter_group()),
    "offloaded": _Case(lambda *_: None, arguments={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "replicas last": _Case(lambda model, i: model.set_requires_all_reduce(i == 1), (2, 2), 2),
    "replicas, unused": _Case(lambda model, _: model.set_reduce_scatter_unused_params(True), (2, 2)),
}


def _differences(name: str) -> tuple[list[int], bool]:
    case = CASES[name]
    plain, model = (sharded(case.mesh, **case.arguments) for _ in range(2))
    by_hooks = set()

    def before(model: Any, number: int) -> None:
        if model is not plain and model_of(model) is not None:
            by_hooks.update(only_hooks(model))
        case.before(model, number)

    expected = train(plain, plain, micro_batches=case.micro_batches, before=case.before)
    found = train(model, compiled(model), micro_batches=case.micro_batches, before=before)
    return unequal(expected, found), any(by_hooks)


@long.parametrize("name", CASES, always=["unused", "sums alone", "kept between microbatches", "replicas last"])
def test_numbers_are_those_of_fsdp2(name: str) -> None:
    case = CASES[name]
    ranks = 4 if case.mesh else 2
    assert run_ranks(_differences, name, world_size=ranks) == [([], case.is_kept)] * ranks


def _unsharded_in_backward() -> list[int]:
    found = []
    for is_compiled in (False, True):
        model = sharded()
        model.layers[0].set_unshard_in_backward(False)  # its input needs no gradient
        found.append(train(model, compiled(model, fullgraph=True) if is_compiled else model))
    return unequal(*found)


def test_no_gather_in_backward() -> None:
    assert run_ranks(_unsharded_in_backward) == [[], []]


if hasattr(FSDPModule, "reset_iter_state"):  # since torch 2.12

    def _reset() -> list[int]:
        plain, model = sharded(), sharded()
        call = compiled(model)
        model.set_requires_gradient_sync(False)
        call(batch(7)).sum().backward()
        model.reset_iter_state()
        model.set_requires_gradient_sync(True)
        return unequal(train(plain, plain), train(model, call))

    def test_a_reset_drops_what_waits() -> None:
        assert run_ranks(_reset) == [[], []]
