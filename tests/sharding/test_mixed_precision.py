"""Dtypes of what is stored, sent and saved, and of what modules are given."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision as FSDP1MixedPrecision
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import pack_sequence

from fsdp_compile import ConfigError, MixedPrecision, backend, fully_shard, materialize
from fsdp_compile._torch.distributed import cast
from fsdp_compile.config.policy import as_mixed_precision, as_offload
from fsdp_compile.ir.graph import Role, StepGraph
from tests import long
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH
from tests.ranks import on_ranks
from tests.two_sides import compile_eagerly

BF16 = torch.bfloat16


class Normed(nn.Module):
    """Linear layers, a batch norm between them, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.down = nn.Linear(WIDTH, 5)
        self.register_buffer("scale", torch.linspace(0.9, 1.1, 5))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.norm(self.up(x)))) * self.get_buffer("scale")


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(4):
        yield


def _sent(model: nn.Module, policy: Any, *, training: bool = True) -> list[dict[str, torch.dtype]]:
    """By graph: parameter to the dtype in which it is gathered, then to that in which its gradient is reduced."""
    steps: list[StepGraph] = []
    transform = backend.transform

    def noted(step: StepGraph, *args: Any, **kwargs: Any) -> Any:
        made = transform(step, *args, **kwargs)
        steps.append(step)
        return made

    with fake_world(4), mock.patch.object(backend, "transform", noted), torch.set_grad_enabled(training):
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


def test_none_casts_and_offloads_nothing() -> None:
    assert as_mixed_precision(None) == as_mixed_precision(MixedPrecisionPolicy())
    assert as_offload(None) == OffloadPolicy()


def test_fields_and_defaults() -> None:
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
    fully_shard(
        model,
        mp_policy=MixedPrecision(BF16),
        mesh=init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard")),
    )
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
    """A linear layer that notes what it was given."""

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
    """A named tuple of inputs."""

    x: torch.Tensor
    y: int


@dataclasses.dataclass
class Both:
    """A dataclass of inputs."""

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
