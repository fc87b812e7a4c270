"""Dtypes of what is stored, sent and saved, and of what modules are given."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import MixedPrecision as FSDP1MixedPrecision
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import pack_sequence

from fsdp_compile import ConfigError, MixedPrecision, fully_shard, materialize
from fsdp_compile._torch import fully_shard_calls as private
from fsdp_compile._torch.distributed import cast
from fsdp_compile.config.policy import as_mixed_precision
from fsdp_compile.ir.graph import Phase, Role
from fsdp_compile.sharding.arguments import ShardingSettings
from tests import long
from tests.fake_world import fake_world
from tests.fsdp2.decoder import compiled_graphs
from tests.models.kinds import WIDTH
from tests.ranks import on_ranks
from tests.sharding.models import Block, Model, Normed, made
from tests.two_sides import compile_eagerly, mesh_of

BF16 = torch.bfloat16


def _sent(model: nn.Module, policy: Any, *, training: bool = True) -> list[dict[str, torch.dtype]]:
    """By graph: parameter to the dtype in which it is gathered, then to that in which its gradient is reduced."""
    with fake_world(4), compiled_graphs(*Phase) as steps, torch.set_grad_enabled(training):
        output = compile_eagerly(fully_shard(model, mp_policy=policy))(torch.ones(4, WIDTH))
        if training:
            output.sum().backward()
    torch._dynamo.reset()
    found: list[dict[str, torch.dtype]] = []
    for step in steps:
        for role in (Role.GATHER, Role.REDUCE):
            dtypes: dict[str, torch.dtype] = {}
            for node in step.nodes(role):
                messages: Any = node.args[0]
                for message in messages:
                    dtypes |= dict.fromkeys(message.meta["fsdp"].parameters, message.meta["val"].dtype)
            found.append(dtypes)
    return found


@pytest.mark.core
def test_the_wire_is_narrow() -> None:
    gathered, _, gathered_again, reduced = _sent(Normed(), MixedPrecision(BF16, torch.float16))
    names = {name for name, _ in Normed().named_parameters()}
    norm = {"norm.weight": torch.float32, "norm.bias": torch.float32}
    assert gathered == {**dict.fromkeys(names, BF16), **norm}
    assert reduced == {**dict.fromkeys(names, torch.float16), **norm}
    assert set(gathered_again.items()) <= set(gathered.items())


def test_eval_in_full_precision_gathers_in_full_precision() -> None:
    policy = MixedPrecision(BF16, full_precision_in_eval=True)
    gathered, _ = _sent(Normed().eval(), policy, training=False)
    assert set(gathered.values()) == {torch.float32}


def test_fields_and_defaults() -> None:
    assert as_mixed_precision(None) == as_mixed_precision(MixedPrecisionPolicy())
    ours = MixedPrecision()
    assert (ours.param_dtype, ours.reduce_dtype, ours.output_dtype, ours.buffer_dtype) == (None,) * 4
    assert ours.cast_forward_inputs
    assert ours.full_precision_classes == (_BatchNorm,)
    assert not ours.full_precision_in_eval
    assert not ours.keep_low_precision_grads
    assert as_mixed_precision(MixedPrecisionPolicy()) == MixedPrecision(full_precision_classes=())
    theirs = FSDP1MixedPrecision(BF16, torch.float32, torch.float16, True, False, True, (nn.LayerNorm,))  # noqa: FBT003
    assert as_mixed_precision(theirs) == MixedPrecision(
        BF16,
        torch.float32,
        cast_forward_inputs=False,
        buffer_dtype=torch.float16,
        full_precision_classes=(nn.LayerNorm,),
        keep_low_precision_grads=True,
        cast_root_forward_inputs=True,
    )


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="param_dtype is"):
        MixedPrecision(param_dtype=torch.int8)
    with pytest.raises(ConfigError, match="full_precision_classes is"):
        MixedPrecision(full_precision_classes=[nn.LayerNorm])  # type: ignore[arg-type]


@pytest.mark.usefixtures("world")
def test_parameters_are_saved_and_loaded_in_their_own_dtype() -> None:
    model = Normed()
    before = copy.deepcopy(model.state_dict())
    fully_shard(model, mp_policy=MixedPrecision(BF16), mesh=mesh_of((4, 1)))
    names = [name for name, _ in model.named_parameters()]
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    for name in names:
        assert saved[name].dtype is torch.float32
        assert torch.equal(saved[name].to_local(), before[name]), name
    third = {name: value / 3 if name in names else value for name, value in saved.items()}  # no bfloat16 numbers
    model.load_state_dict(third)
    for name in names:
        assert torch.equal(model.state_dict()[name].to_local(), before[name] / 3), "what is loaded is not rounded"


@pytest.mark.usefixtures("world")
def test_buffers_follow_the_innermost_call() -> None:
    model = nn.Sequential(Normed(), Normed())
    fully_shard(model[0], mp_policy=MixedPrecision(BF16, buffer_dtype=torch.float16))
    fully_shard(model, mp_policy=MixedPrecision(BF16, buffer_dtype=BF16))
    assert [m.scale.dtype for m in model] == [torch.float16, BF16]


class _Table(nn.Module):
    """A parameter, and a buffer that no bfloat16 holds, which initialization replaces."""

    def __init__(self, value: float = 1 / 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.full((4,), value))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.table = torch.full((4,), 1 / 3, device=self.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table


@long.parametrize(
    "source",
    ["first", "first, others on meta", "first, after a call", "initialized", "loaded"],
    always=["first, others on meta"],
)
@on_ranks()
def test_what_buffers_are_given_is_not_rounded(source: str) -> None:
    policy = MixedPrecision(BF16, torch.float32, buffer_dtype=BF16, full_precision_in_eval=True)
    rank = dist.get_rank()
    with torch.device("meta" if source == "initialized" or (source == "first, others on meta" and rank) else "cpu"):
        model: Any = nn.Sequential(_Table((1 + rank) / 3))
    if source == "first, after a call":
        fully_shard(model[0], mp_policy=policy)
    fully_shard(model, mp_policy=policy, sync_module_states=source.startswith("first"))
    if source == "initialized":
        materialize(model)
    exact = torch.full((4,), 1 / 3)
    if source == "loaded":
        model.load_state_dict({**model.state_dict(), "0.table": exact})
    compiled: Any = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    assert model[0].table.dtype is BF16
    assert torch.equal(model.state_dict()["0.table"], exact)
    assert torch.equal(compiled.eval()(torch.ones(4)), exact)
    assert torch.equal(compiled.train()(torch.ones(4)), exact.to(BF16))
    model[0].table.fill_(2 / 3)
    assert torch.equal(compiled.eval()(torch.ones(4)), torch.full((4,), 2 / 3).to(BF16).float())


class Sees(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.given = x.dtype
        return super().forward(x.to(BF16))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("outer", "inner", "seen"),
    [
        (MixedPrecisionPolicy(BF16), MixedPrecisionPolicy(BF16), BF16),
        (MixedPrecisionPolicy(BF16), MixedPrecisionPolicy(BF16, cast_forward_inputs=False), torch.float32),
        (FSDP1MixedPrecision(BF16), FSDP1MixedPrecision(BF16), torch.float32),
        (FSDP1MixedPrecision(BF16), FSDP1MixedPrecision(BF16, cast_forward_inputs=True), BF16),
    ],
)
def test_inner_units_cast_their_inputs_by_their_own_policy(outer: Any, inner: Any, seen: torch.dtype) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Sees(4, 4)
            self.bias = nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.given = x.dtype
            return self.inner(x.float()) + self.bias

    model = Outer()
    fully_shard(model.inner, mp_policy=inner)
    fully_shard(model, mp_policy=outer)
    model(torch.ones(2, 4))
    assert (model.given, model.inner.given) == (BF16, seen)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("root", "others", "seen"), [(False, True, torch.float32), (True, False, BF16)])
def test_fsdp1s_flag_for_the_root_overrides(*, root: bool, others: bool, seen: torch.dtype) -> None:
    model = Sees(4, 4)
    policy = FSDP1MixedPrecision(BF16, cast_root_forward_inputs=root, cast_forward_inputs=others)
    fully_shard(model, mp_policy=policy)
    model(torch.ones(2, 4))
    assert model.given is seen


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


@dataclasses.dataclass
class Both:
    x: torch.Tensor
    pair: Pair


def test_casts_reach_into_containers_and_keep_what_is_not_floating() -> None:
    x, index = torch.ones(2, requires_grad=True), torch.arange(2)
    value = {"a": [x, index, None], "b": (Pair(x, 3), Both(x, Pair(x, 4))), "c": pack_sequence([x.detach()])}
    got: dict[str, Any] = cast(value, BF16)
    assert got["a"][0].dtype is BF16
    assert got["a"][0].requires_grad
    assert got["a"][1] is index
    assert isinstance(got["b"][0], Pair)
    assert got["b"][0].x.dtype is BF16
    assert isinstance(got["b"][1], Both)
    assert (got["b"][1].pair.x.dtype, got["b"][1].pair.y) == (BF16, 4)
    assert got["c"] is value["c"], "FSDP2 does not cast it either"


class _Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.bn(x)
        self.seen += [x.dtype, self.bn.weight.dtype, self.bn.running_mean.dtype, y.dtype]  # type: ignore[union-attr]
        return self.last(y)


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(MixedPrecision(BF16), marks=pytest.mark.long),
        FSDP1MixedPrecision(BF16),
    ],
    ids=["ours", "fsdp1"],
)
@on_ranks()
def test_excluded_modules_compute_in_their_own_dtype(policy: Any) -> None:
    model: Any = made(_Seeing)
    fully_shard(model, mp_policy=policy)
    assert [name for name, module in model.named_modules() if isinstance(module, FSDPModule)] == ["", "bn"]
    inputs: list[torch.dtype] = []
    # After FSDP2's own hook, which casts.
    model.bn.register_forward_pre_hook(lambda _, args: inputs.append(args[0].dtype))
    torch.manual_seed(1)
    model(torch.randn(3, 4)).float().sum().backward()
    high = torch.float32
    # Inside of its forward alone the unit is gathered.
    assert model.seen == [BF16, high, high, BF16]
    assert inputs == [high]
    assert model.bn.weight.grad.dtype is high


def test_fsdp2s_policy_excludes_nothing() -> None:
    with fake_world(2):
        model = fully_shard(_Seeing(), mp_policy=MixedPrecisionPolicy(BF16))
        assert not isinstance(model.bn, FSDPModule)
        excluded = fully_shard(nn.BatchNorm1d(4), mp_policy=MixedPrecision(BF16))
        assert fsdp2.state(excluded)._mp_policy.param_dtype is torch.float32  # type: ignore[attr-defined]
        assert not isinstance(fully_shard(_Seeing(), mp_policy=MixedPrecision()).bn, FSDPModule)


def test_where_inputs_are_cast() -> None:
    def casts(model: Any, name: str) -> bool:
        found = fsdp2.state(model.get_submodule(name))  # type: ignore[attr-defined]
        return bool(found._mp_policy.cast_forward_inputs)

    with fake_world(2):
        split = fully_shard(Model(), mp_policy=MixedPrecisionPolicy(BF16, output_dtype=torch.float32))
        assert [casts(split, name) for name in ("", "blocks.0")] == [True, False]
        outputs = [fsdp2.state(m)._mp_policy.output_dtype for m in (split, split.blocks[0])]  # type: ignore[attr-defined]
        assert outputs == [torch.float32, None]
        fsdp1 = FSDP1MixedPrecision(BF16)  # casts inputs of the root alone
        wrapped = fully_shard(Model(), mp_policy=fsdp1, auto_wrap_policy=ModuleWrapPolicy({Block}))
        assert [casts(wrapped, name) for name in ("", "blocks.0")] == [True, False]
        both = MixedPrecision(BF16, cast_forward_inputs=True, cast_root_forward_inputs=False)
        wrapped = fully_shard(Model(), mp_policy=both, auto_wrap_policy=ModuleWrapPolicy({Block}))
        assert [casts(wrapped, name) for name in ("", "blocks.0")] == [False, True]
        series = Model()
        fully_shard(series.blocks[0], mp_policy=fsdp1)
        assert casts(series, "blocks.0")  # it is the root so far
        fully_shard(series, mp_policy=fsdp1)
        assert [casts(series, name) for name in ("", "blocks.0")] == [True, False]


class _Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("third", torch.tensor([1 / 3, 2 / 3]))
        self.register_buffer("count", torch.tensor([5]))
        self.linear.register_buffer("same", self.get_buffer("third"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.linear(x)) * self.get_buffer("third")[0]


def test_buffers_are_cast_once_and_saved_as_they_were() -> None:
    with fake_world(2):
        model: Any = _Buffered()
        exact = model.third.clone()
        fully_shard(model, mp_policy=MixedPrecision(BF16, buffer_dtype=BF16))
        assert model.third.dtype is BF16
        assert model.linear.same is model.third
        assert model.count.dtype is torch.int64
        assert model.bn.running_mean.dtype is torch.float32
        saved = model.state_dict()
        assert saved["third"].dtype is torch.float32
        assert torch.equal(saved["third"], exact)
        model.third.mul_(2)
        assert torch.equal(model.state_dict()["third"], (exact.bfloat16() * 2).float())
        assert torch.equal(model.state_dict()["linear.same"], (exact.bfloat16() * 2).float())
        model.load_state_dict({"third": exact * 4}, strict=False)
        assert torch.equal(model.third, (exact * 4).bfloat16())


def test_what_fsdp2_has_no_place_for_is_kept_with_each_unit() -> None:
    policy = MixedPrecision(BF16, gather_dtype=torch.int8, keep_low_precision_grads=True, full_precision_in_eval=True)
    with fake_world(2):
        model: Any = fully_shard(_Seeing(), mp_policy=policy, separate_reduce_group=True)
        assert private.kept_with(model, "settings") == ShardingSettings(
            gather_dtype=torch.int8,
            keep_low_precision_grads=True,
            full_precision_in_eval=True,
            separate_reduce_group=True,
        )
        assert private.kept_with(model.bn, "settings") == ShardingSettings(
            full_precision_in_eval=True, casts_output_in_eval=False, separate_reduce_group=True
        )
        assert private.kept_with(model.first, "settings") is None
