"""Settings of FSDP2 and of this package's `fully_shard`, hooks and communication classes, in compiled steps."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.comm_hook import register_comm_hook
from fsdp_compile.fsdp2.take_over import model_of
from tests import long
from tests.fsdp2.mlp import Mlp, batch, only_hooks, pair_of, shard, sharded
from tests.ranks import on_ranks
from tests.two_sides import BITS, MIXED, Within, compare_gradients, compile_eagerly


@on_ranks()
def test_full_precision_in_eval() -> None:
    model, full, low = sharded(mp_policy=MIXED), sharded(), sharded(mp_policy=MIXED)
    for module in (*model.layers, model):
        module._get_fsdp_state()._fsdp_compile_settings = types.SimpleNamespace(full_precision_in_eval=True)
    call, x = compile_eagerly(model, fullgraph=True, reduce_layout="fsdp2"), torch.randn(3, 16)
    for other in (low, full, low):
        model.train(other is low)
        with torch.no_grad():
            assert torch.equal(call(x), other(x))
    model.eval()
    for each in (call, full):
        each(x).sum().backward()
    compare_gradients(model, full)


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


CASES = {
    "unused": _Case(lambda model, _: model.set_reduce_scatter_unused_params(True)),
    "sums alone": _Case(lambda model, _: _each(model, "set_force_sum_reduction_for_comms", True)),  # noqa: FBT003  torch's
    "divided": _Case(_divides),
    "kept between microbatches": _Case(_keeps, micro_batches=2, is_kept=True),
    "kept, bf16": _Case(_keeps, micro_batches=2, is_kept=True, arguments={"mp_policy": MIXED}),
    "kept after forward, too": _Case(_keeps, micro_batches=2, is_kept=True, arguments={"reshard_after_forward": False}),
    "not gathered in backward": _Case(lambda model, _: model.set_reshard_after_forward(False)),
    "reduced apart": _Case(lambda model, _: model.set_separate_reduce_scatter_group()),
    "offloaded": _Case(lambda *_: None, arguments={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "replicas last": _Case(lambda model, i: model.set_requires_all_reduce(i == 1), (2, 2), 2),
    "replicas, unused": _Case(lambda model, _: model.set_reduce_scatter_unused_params(True), (2, 2)),
}


@long.parametrize("name", CASES, always=["kept between microbatches"])
@on_ranks(world_size=lambda name: 4 if CASES[name].mesh else 2)
def test_numbers_are_those_of_fsdp2(name: str) -> None:
    case = CASES[name]
    pair = pair_of(mesh=case.mesh, **case.arguments)
    by_hooks = set()

    def before(model: Any, number: int) -> None:
        if model is pair.model and model_of(model) is not None:
            by_hooks.update(only_hooks(model))
        case.before(model, number)

    pair.train(*[pair.call] * case.micro_batches, before=before)
    assert any(by_hooks) == case.is_kept


@on_ranks()
def test_no_gather_in_backward() -> None:
    pair = pair_of(fullgraph=True)
    pair.change(lambda model: model.layers[0].set_unshard_in_backward(False))  # its input needs no gradient
    pair.train()


@on_ranks()
def test_gathers_wait_for_the_optimizers_event() -> None:
    pair = pair_of(fullgraph=True)
    pair.train()
    calls: list[str] = []
    event: Any = types.SimpleNamespace(wait=lambda: calls.append("wait"))
    pair.model.set_post_optim_event(event)
    pair.train()
    assert calls == ["wait"]


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="since torch 2.12")
@on_ranks()
def test_a_reset_drops_what_waits() -> None:
    pair = pair_of()
    pair.model.set_requires_gradient_sync(False)
    pair.call(batch(7)).sum().backward()
    pair.model.reset_iter_state()
    pair.model.set_requires_gradient_sync(True)
    pair.train()


def _average(calls: list[str], gradient: torch.Tensor, output: torch.Tensor) -> None:
    calls.append("average")
    dist.reduce_scatter_tensor(output, gradient)
    output /= dist.get_world_size()


LOW = Within((0.05, 0.02), (0.05, 0.02), (0.05, 0.02))


@long.parametrize(("is_own", "micro_batches"), [(True, 1), (True, 2), (False, 1), (False, 2)], always=[(True, 2)])
@on_ranks()
def test_compiled(*, is_own: bool, micro_batches: int) -> None:
    """A hook that averages, and torch's for bfloat16, which is as FSDP2's `reduce_dtype`."""
    policy = MixedPrecisionPolicy() if is_own else MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    pair, calls = pair_of(fullgraph=True, ours=shard, mp_policy=policy), list[str]()
    if is_own:
        register_comm_hook(pair.model, _average, calls)
    else:
        register_comm_hook(pair.call, default_hooks.bf16_compress_hook)
    # FSDP2 adds microbatches up in bfloat16, a hook compresses their sum.
    pair.train(*[pair.call] * micro_batches, within=LOW if micro_batches > 1 and not is_own else BITS)
    assert len(calls) == (6 if is_own else 0)  # units times steps


@pytest.mark.long
@on_ranks()
def test_after_a_step() -> None:
    """One that is registered after compiled steps counts from the next one on."""
    pair, calls = pair_of(fullgraph=True), list[str]()
    pair.train(steps=1)
    register_comm_hook(pair.model, _average, calls)
    pair.train(steps=1)
    with pytest.raises(ConfigError, match="has a communication hook already"):
        register_comm_hook(pair.model, _average, calls)
    assert len(calls) == 3


class _Gather(DefaultAllGather):
    calls: list[str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("gather")
        return super().__call__(*args, **kwargs)


class _Scatter(DefaultReduceScatter):
    calls: list[str]

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("scatter")
        work = super().__call__(output_tensor, *args, **kwargs)
        output_tensor.mul_(2)
        return work


def _noting(communication: Any, calls: list[str]) -> Any:
    communication.calls = calls
    return communication


def _hook(reduced: torch.Tensor, calls: list[str]) -> None:
    calls.append("hook")
    reduced.mul_(3)


SETTINGS: dict[str, Callable[[Any, list[str]], None]] = {
    "gather": lambda layer, calls: layer.set_custom_all_gather(_noting(_Gather(), calls)),
    "scatter": lambda layer, calls: layer.set_custom_reduce_scatter(_noting(_Scatter(), calls)),
    "hook": lambda layer, calls: layer.set_all_reduce_hook(functools.partial(_hook, calls=calls)),
    "allocate": lambda layer, _: layer.set_allocate_memory_from_process_group_for_comm(True),
}
NEW: dict[str, Callable[[Any, list[str]], None]] = {
    "set_keep_unsharded_storage": lambda layer, _: layer.set_keep_unsharded_storage(True),  # since torch 2.15
    "set_reduce_scatter_max_input_buffers": lambda layer, _: layer.set_reduce_scatter_max_input_buffers(2),  # 2.13
}
SETTINGS |= {name: change for name, change in NEW.items() if hasattr(FSDPModule, name)}


@long.parametrize("name", SETTINGS, always=["gather", "scatter"])
@on_ranks()
def test_such_a_unit_goes_by_hooks(name: str) -> None:
    pair = pair_of()
    calls: list[str] = []
    for model, noted in zip(pair, (calls, []), strict=True):
        SETTINGS[name](model.layers[0], noted)
    pair.train()
    assert list(map(bool, only_hooks(pair.model))) == [False, True, False]
    assert (calls.count(name) >= 2) == (name in ("gather", "scatter", "hook"))


@pytest.mark.long
@on_ranks()
def test_a_hook_is_set_after_compiled_steps() -> None:
    pair = pair_of()
    pair.train()
    pair.change(lambda model: model.layers[1].set_all_reduce_hook(functools.partial(_hook, calls=[])))
    pair.train()


class _Leaves(Mlp):
    """A model that leaves its first layer out if it is told to."""

    leaves_out = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers  # a graph break in a loop would leave all units to hooks
        if not self.leaves_out:
            x = torch.tanh(first(x))
        return self.head(torch.tanh(second(x)))


@long.parametrize("name", ["scatter", "hook"], always=["hook"])
@on_ranks()
def test_gradients_of_a_microbatch_go_by_them_where_the_last_one_leaves_the_unit_out(name: str) -> None:
    pair = pair_of(_Leaves)
    calls: dict[Any, list[str]] = {model: [] for model in pair}

    def before(model: Any, number: int) -> None:
        model.leaves_out = number == 1
        model.set_requires_gradient_sync(number == 1)

    for model in pair:
        SETTINGS[name](model.layers[0], calls[model])
    pair.train(pair.call, pair.call, before=before)
    mine, theirs = calls.values()
    assert mine == theirs == [name] * 2


@on_ranks()
def test_one_graph_is_refused_by_name() -> None:
    pair = pair_of(fullgraph=True)
    pair.model.layers[0].set_all_reduce_hook(functools.partial(_hook, calls=[]))
    with pytest.raises(Exception, match=r"FSDP2's hooks gather unit 'layers.0': set_all_reduce_hook") as caught:
        pair.call(torch.randn(3, 16))
    dist.barrier()
    assert type(caught.value).__name__ == "Unsupported"
