"""Models that torch's `fully_shard` has sharded train on here with the same units, parameters and optimizer, bit by bit."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as TorchParamGroup
from torch.distributed.tensor import DTensor, Shard

import fsdp_compile
from fsdp_compile import ConfigError, FSDPCompileError, ShardedModule, UnsupportedModelError, fully_shard, units
from tests.beside import compile_eagerly
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Slim, Stack
from tests.ranks import run_ranks

Call = Callable[[torch.Tensor], torch.Tensor]


class _Tied(Stack):
    """Two places of one weight, in one unit, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, 5)
        self.embedding.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.embedding(x)


def _wrap(model: Any, **settings: Any) -> nn.Module:
    for block in model.blocks:
        fsdp2(block, **settings)
    return fsdp2(model, **settings)


def _mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _head_first(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 2 == 0 else None


def _each_differently(model: Any) -> nn.Module:
    fsdp2(model.blocks[0], reshard_after_forward=False)
    fsdp2(model.blocks[1], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    return fsdp2(model)


def _with_ignored(model: Any) -> nn.Module:
    model.blocks[0].requires_grad_(requires_grad=False)
    ignored = set(model.blocks[1].parameters())
    torch.manual_seed(1)
    fsdp2(model.blocks[0])
    return fsdp2(model, ignored_params=ignored)


def _with_settings(model: Any) -> nn.Module:
    _wrap(model)
    first, last = model.blocks
    model.set_modules_to_forward_prefetch([first, last])
    last.set_modules_to_backward_prefetch([first])
    first.set_gradient_divide_factor(3.0)
    last.set_reshard_after_backward(False)
    last.set_reshard_after_forward(False)
    model.set_force_sum_reduction_for_comms(True)
    return model


def _as_one_unit(model: Any) -> nn.Module:
    fsdp2([model.blocks[1], model.head])
    return fsdp2(model)


@dataclasses.dataclass(frozen=True)
class _Case:
    wrap: Callable[[Any], nn.Module] = _wrap
    make: Callable[[], nn.Module] = Stack
    units: tuple[str, ...] = ("", "blocks.0", "blocks.1")


CASES = {
    "units": _Case(),
    "tied": _Case(make=_Tied),
    "one-unit": _Case(lambda model: fsdp2(model), units=("",)),
    "a-list": _Case(_as_one_unit, units=("", "blocks.1, head")),
    "bf16": _Case(
        functools.partial(_wrap, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    ),
    "kept": _Case(functools.partial(_wrap, reshard_after_forward=False)),
    "each-differently": _Case(_each_differently),
    "another-dimension": _Case(functools.partial(_wrap, shard_placement_fn=_head_first), make=Slim),
    "offload": _Case(functools.partial(_wrap, offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "ignored": _Case(_with_ignored, units=("", "blocks.0")),
    "settings": _Case(_with_settings),
}


def _batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def _backward(call: Call, step: int) -> None:
    call(_batch(step)).float().square().mean().backward()


class _Side:
    """A model under FSDP2 with its optimizer."""

    def __init__(self, case: _Case) -> None:
        torch.manual_seed(0)
        self.model = case.wrap(case.make())
        self.call: Call = self.model
        # A large eps: it must not hide differences of gradients near zero.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-3)

    def step(self, number: int) -> None:
        _backward(self.call, number)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        found: dict[str, Any] = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name} {key}"] = value
        return {name: v.full_tensor() if isinstance(v, DTensor) else v.detach() for name, v in found.items()}


def _differences(mine: _Side, theirs: _Side) -> list[str]:
    values, expected = mine.values(), theirs.values()
    assert list(values) == list(expected)
    return [name for name, value in values.items() if not torch.equal(value, expected[name])]


def _sharded(model: nn.Module) -> Call:
    assert fully_shard(model) is model
    return model


def _sharded_and_compiled(model: nn.Module) -> Call:
    return compile_eagerly(fully_shard(model))


def _in_place(model: nn.Module) -> Call:
    model.compile(backend="fsdp", options={"lower": "eager"})
    return model


def _in_a_function(model: nn.Module) -> Call:
    return compile_eagerly(lambda x: model(x))  # noqa: PLW0108  a compiled function


FORMS: dict[str, Callable[[Any], Call]] = {
    "compiled": compile_eagerly,
    "sharded": _sharded,
    "sharded-and-compiled": _sharded_and_compiled,
    "in-place": _in_place,
    "in-a-function": _in_a_function,
}


def _four_steps(name: str, form: str) -> tuple[list[str], tuple[str, ...]]:
    case = CASES[name]
    theirs, mine = _Side(case), _Side(case)
    for step in range(2):
        theirs.step(step)
        mine.step(step)
    before = list(mine.model.parameters())
    wrapped = [module for module in mine.model.modules() if isinstance(module, FSDPModule)]
    mine.call = FORMS[form](mine.model)
    for step in range(2, 4):
        theirs.step(step)
        mine.step(step)
    assert all(one is other for one, other in zip(before, mine.model.parameters(), strict=True))
    assert [module for module in mine.model.modules() if isinstance(module, FSDPModule)] == wrapped
    assert all(isinstance(module, ShardedModule) for module in wrapped)
    return _differences(mine, theirs), tuple(unit.name for unit in units(mine.model))


@pytest.mark.core
@pytest.mark.parametrize("form", FORMS)
def test_two_steps_of_fsdp2_and_two_here_are_four_of_fsdp2(form: str) -> None:
    for different, names in run_ranks(_four_steps, "units", form):
        assert different == []
        assert names == CASES["units"].units


@pytest.mark.parametrize("name", [name for name in CASES if name != "units"])
def test_what_a_model_was_wrapped_with_is_kept(name: str) -> None:
    for different, names in run_ranks(_four_steps, name, "compiled"):
        assert different == []
        assert names == CASES[name].units
