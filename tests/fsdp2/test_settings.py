"""Policies and settings of FSDP2, and of our `fully_shard`, in compiled steps: the bits of uncompiled ones."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

import fsdp_compile
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.comm_hook import register_comm_hook
from fsdp_compile.fsdp2.take_over import model_of
from tests import long
from tests.fsdp2.mlp import WIDTH, Mlp, batch, only_hooks, pair_of, shard, sharded
from tests.models.round_sizes import Stack, explained
from tests.pairwise import Row, covering
from tests.ranks import on_ranks
from tests.two_sides import (
    BITS,
    MIXED,
    Averaging,
    WithFsdp2,
    Within,
    compare_gradients,
    compile_eagerly,
    mesh_of,
    sgd,
    taken_over,
)


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
    """What is set."""

    before: Callable[[Any, int], None]  # called with the model before each microbatch, with its number
    mesh: tuple[int, ...] = ()  # shape of (replicate, shard); one of shards alone if empty
    micro_batches: int = 1  # in each step
    is_kept: bool = False  # whether FSDP2's hooks gather units in some forwards
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # of `fully_shard`


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


def _adds_unused_last(model: Any, number: int) -> None:
    model.set_reduce_scatter_unused_params(True)
    model.set_requires_all_reduce(number == 1)
    assert all(parameter.grad is None for parameter in model.parameters())


CASES = {
    "sums alone": _Case(lambda model, _: _each(model, "set_force_sum_reduction_for_comms", True)),  # noqa: FBT003  torch's
    "divided": _Case(_divides),
    "kept between microbatches": _Case(_keeps, micro_batches=2, is_kept=True),
    "kept, bf16": _Case(_keeps, micro_batches=2, is_kept=True, arguments={"mp_policy": MIXED}),
    "kept after forward, too": _Case(_keeps, micro_batches=2, is_kept=True, arguments={"reshard_after_forward": False}),
    "not gathered in backward": _Case(lambda model, _: model.set_reshard_after_forward(False)),
    "offloaded": _Case(lambda *_: None, arguments={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "replicas last": _Case(lambda model, i: model.set_requires_all_reduce(i == 1), (2, 2), 2),
}
if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # since torch 2.12
    CASES |= {
        "reduced apart": _Case(lambda model, _: model.set_separate_reduce_scatter_group()),
        "unused": _Case(lambda model, _: model.set_reduce_scatter_unused_params(True)),
        "replicas last, unused": _Case(_adds_unused_last, (2, 2), 2),
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


def _gathers_before_backward(call: Any, x: torch.Tensor) -> torch.Tensor:
    loss = call(x).square().sum()
    call.layers[0].unshard()
    call.layers[1].unshard(async_op=True)
    return loss


@long.parametrize("name", ["replicas last", "offloaded"], always=[])
@on_ranks(world_size=4)
def test_a_backward_frees_what_was_gathered_before_it_on_replicas(name: str) -> None:
    case = CASES[name]
    pair = pair_of(mesh=(2, 2), **case.arguments)
    pair.train(*[pair.call] * 2, steps=3, before=case.before, loss=_gathers_before_backward)


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


LOW = Within((0.05, 0.02), (0.05, 0.02), (0.05, 0.02))


@long.parametrize(("is_own", "micro_batches"), [(True, 1), (True, 2), (False, 1), (False, 2)], always=[(True, 2)])
@on_ranks()
def test_compiled(*, is_own: bool, micro_batches: int) -> None:
    """A hook that averages, and torch's for bfloat16, which is as FSDP2's `reduce_dtype`."""
    policy = MixedPrecisionPolicy() if is_own else MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    pair, average = pair_of(fullgraph=True, ours=shard, mp_policy=policy), Averaging()
    if is_own:
        register_comm_hook(pair.model, average)
    else:
        register_comm_hook(pair.call, default_hooks.bf16_compress_hook)
    # FSDP2 adds microbatches up in bfloat16, a hook compresses their sum.
    pair.train(*[pair.call] * micro_batches, within=LOW if micro_batches > 1 and not is_own else BITS)
    assert len(average.calls) == (6 if is_own else 0)  # units times steps


@pytest.mark.long
@on_ranks()
def test_after_a_step() -> None:
    """One that is registered after compiled steps counts from the next one on."""
    pair, average = pair_of(fullgraph=True), Averaging()
    pair.train(steps=1)
    register_comm_hook(pair.model, average)
    pair.train(steps=1)
    with pytest.raises(ConfigError, match="has a communication hook already"):
        register_comm_hook(pair.model, average)
    assert len(average.calls) == 3


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


BF16 = torch.bfloat16
POLICIES = {
    "none": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=BF16),
    "bf16, reduced in it": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16),
    "bf16, reduced in fp32": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
    "reduced in bf16": MixedPrecisionPolicy(reduce_dtype=BF16),
}
HAS_OVERRIDES = "param_dtype_override_fn" in {field.name for field in dataclasses.fields(MixedPrecisionPolicy)}
"""Since torch 2.15, whose FSDP2 also heeds `Tensor.grad_dtype`."""


def _keeps_vectors(parameter: nn.Parameter) -> torch.dtype | None:
    return parameter.dtype if parameter.dim() == 1 else None


if HAS_OVERRIDES:
    overrides: dict[str, Any] = {"param_dtype_override_fn": _keeps_vectors}
    POLICIES |= {f"{name}, vectors kept": dataclasses.replace(POLICIES[name], **overrides) for name in list(POLICIES)}


class _Layer(nn.Module):
    """Its first product is one of two dtypes where parameters are in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.unused = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x.float() * self.scale).to(self.linear.weight.dtype)
        return torch.tanh(self.linear(x))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _frozen_in_bf16() -> _Model:
    """Parameters of two dtypes in a unit: FSDP2 wants one for those that are trained."""
    model = _Model()
    layer: Any
    for layer in model.layers:
        layer.scale = nn.Parameter(layer.scale.detach().to(BF16), requires_grad=False)
    return model


def _parts(model: Any) -> list[nn.Module]:
    return [*model.layers, model]


UNITS: dict[str, tuple[Any, Any]] = {
    "each layer": (_Model, _parts),
    "one unit": (_Model, lambda model: [model]),
    "two dtypes": (_frozen_in_bf16, _parts),
}


def _pair(
    policy: str,
    mesh: tuple[int, ...] = (2,),
    ours: Any = fully_shard,
    make: Any = _Model,
    units: Any = _parts,
) -> WithFsdp2:
    settings = {"mesh": mesh_of(mesh), "mp_policy": POLICIES[policy]}

    def shard(model: Any, fully_shard: Any = fully_shard) -> None:
        for module in units(model):
            fully_shard(module, **settings)

    return pair_of(make, sharded=shard, ours=lambda model: shard(model, ours))


MESHES = {"shards": (2,), "replicas": (2, 2)}
ALWAYS = {"policy": "bf16, reduced in it", "mesh": "shards", "units": "each layer"}
COVERING = covering({"policy": POLICIES, "mesh": MESHES, "units": UNITS})
ROWS = [ALWAYS, *(row for row in COVERING if row != ALWAYS)]


@pytest.mark.core
@long.parametrize("row", ROWS, always=[ALWAYS], ids=lambda row: ", ".join(row.values()))
@on_ranks(world_size=lambda row: 2 * len(MESHES[row["mesh"]]))
def test_numbers_of_each_policy(row: Row) -> None:
    for ours in (fully_shard, fsdp_compile.fully_shard):
        torch._dynamo.reset()
        pair = _pair(row["policy"], MESHES[row["mesh"]], ours, *UNITS[row["units"]])
        call, model = pair.call, pair.model
        pair.train()
        # Of compiled and uncompiled microbatches the gradients of one wait for the reduction of the other.
        for calls in ((call, call), (model, model), (call, model), (model, call), (call, call, call)):
            pair.train(*calls, steps=1)
        units_that_read = [unit for unit in taken_over(model).units if unit.groups]
        assert all(unit.compiled_regions and not unit.only_hooks for unit in units_that_read)


@pytest.mark.core
@on_ranks()
def test_what_is_sent() -> None:
    reduced = vectors = torch.float32 if HAS_OVERRIDES else BF16
    pair = _pair("bf16, vectors kept" if HAS_OVERRIDES else "bf16")
    pair.train(steps=1)
    specs = {param.name: param.spec for group in taken_over(pair.model).groups for param in group.params}
    assert {
        name.removeprefix("layers.0."): (spec.param_dtype, spec.reduce_dtype)
        for name, spec in specs.items()
        if name.startswith("layers.0.")
    } == {"scale": (vectors, reduced), "unused": (vectors, reduced), "linear.weight": (BF16, reduced)}


@pytest.mark.core
def test_plans_count_the_bytes_that_this_torch_sends() -> None:
    plan = explained(Stack, 4, hardware(link=50.0), mp_policy=POLICIES["bf16"])
    forward, backward = plan.graphs
    (gather,) = forward.sent
    (reduce,) = (each for each in backward.sent if each.kind is Kind.REDUCE)
    assert gather.dtype == "bfloat16"
    assert reduce.dtype == ("float32" if HAS_OVERRIDES else "bfloat16")
    assert reduce.size_bytes == (2 if HAS_OVERRIDES else 1) * gather.size_bytes


def _of_another_dtype() -> _Model:
    model: Any = _Model()
    model.layers[0].linear.weight.grad_dtype = BF16
    return model


@pytest.mark.core
@pytest.mark.skipif(not HAS_OVERRIDES, reason="since torch 2.15")
@long.parametrize("mesh", [(2,), (2, 2)], always=[(2,)])
@pytest.mark.parametrize("policy", ["none", "bf16, vectors kept"])
@on_ranks(world_size=lambda mesh, **_: 2 * len(mesh))
def test_gradients_of_a_dtype_of_their_own(policy: str, mesh: tuple[int, ...]) -> None:
    """FSDP2's hooks gather a unit with such a parameter, and graphs the others."""
    pair = _pair(policy, mesh, make=_of_another_dtype)
    pair.optimize(sgd)  # AdamW takes no gradients of another dtype
    pair.train(steps=1)
    pair.accumulate(pair.call, pair.call)
    assert {pair.model.layers[i].linear.weight.grad.dtype for i in range(2)} == {BF16, torch.float32}
    assert [bool(why) for why in only_hooks(pair.model)] == [False, True, False]


@pytest.mark.core
@pytest.mark.skipif(not hasattr(FSDPModule, "finalize_backward"), reason="since torch 2.15")
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("gathered_before", [False, True])
@on_ranks()
def test_backwards_that_the_caller_ends(*, async_op: bool, gathered_before: bool) -> None:
    """After both microbatches of a step."""

    def end(model: Any) -> None:
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=async_op)
        if async_op:
            handle.wait()
        model.set_requires_gradient_sync(False)

    pair = _pair("bf16")
    pair.change(lambda model: model.set_manual_backward_finalization(True))
    pair.change(lambda model: model.set_requires_gradient_sync(False))
    if gathered_before:
        with torch.no_grad():
            pair.change(lambda model: model(torch.ones(1, WIDTH)))
    for _ in range(2):
        pair.backward()
        pair.backward()
        pair.change(end)
        assert any(p.grad is not None for p in pair.reference.parameters())
        pair.compare_gradients()
        pair.zero_grad()
