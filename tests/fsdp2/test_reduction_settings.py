"""Settings of FSDP2 about reductions and what is kept, in compiled steps: the numbers of uncompiled ones."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

from fsdp_compile.fsdp2.take_over import model_of
from tests import long
from tests.fsdp2.mlp import batch, only_hooks, pair_of
from tests.ranks import on_ranks, run_ranks


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


def _trained(name: str) -> bool:
    """Whether some forwards go by hooks."""
    case = CASES[name]
    pair = pair_of(mesh=case.mesh, **case.arguments)
    by_hooks = set()

    def before(model: Any, number: int) -> None:
        if model is pair.model and model_of(model) is not None:
            by_hooks.update(only_hooks(model))
        case.before(model, number)

    pair.train(*[pair.call] * case.micro_batches, before=before)
    return any(by_hooks)


@long.parametrize("name", CASES, always=["unused", "sums alone", "kept between microbatches", "replicas last"])
def test_numbers_are_those_of_fsdp2(name: str) -> None:
    case = CASES[name]
    ranks = 4 if case.mesh else 2
    assert run_ranks(_trained, name, world_size=ranks) == [case.is_kept] * ranks


@on_ranks()
def test_no_gather_in_backward() -> None:
    pair = pair_of(fullgraph=True)
    pair.change(lambda model: model.layers[0].set_unshard_in_backward(False))  # its input needs no gradient
    pair.train()


def _after_an_event() -> list[str]:
    pair = pair_of(fullgraph=True)
    pair.train()
    calls: list[str] = []
    event: Any = types.SimpleNamespace(wait=lambda: calls.append("wait"))
    pair.model.set_post_optim_event(event)
    pair.train()
    return calls


def test_gathers_wait_for_the_optimizers_event() -> None:
    assert run_ranks(_after_an_event) == [["wait"]] * 2


if hasattr(FSDPModule, "reset_iter_state"):  # since torch 2.12

    def _reset() -> None:
        pair = pair_of()
        pair.model.set_requires_gradient_sync(False)
        pair.call(batch(7)).sum().backward()
        pair.model.reset_iter_state()
        pair.model.set_requires_gradient_sync(True)
        pair.train()

    def test_a_reset_drops_what_waits() -> None:
        run_ranks(_reset)
