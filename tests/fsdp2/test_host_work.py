"""What a step runs of our Python code, counted in calls; nothing of it searches the heap."""

from __future__ import annotations

import collections
import gc
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_compile
from fsdp_compile import fully_shard
from tests.fake_world import fake_world

_PACKAGE = str(Path(fsdp_compile.__file__).parent)


class _Block(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


class _Model(nn.Sequential):
    """A forward of the user's: calls of torch's own are traced with their hooks, and ask once more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = block(x)
        return x


@contextmanager
def _counted(prefix: str = _PACKAGE) -> Iterator[collections.Counter[str]]:
    """Counts calls of functions whose file's path begins in one way, by file."""
    calls: collections.Counter[str] = collections.Counter()

    def see(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(prefix):
            calls[Path(frame.f_code.co_filename).name] += 1

    sys.setprofile(see)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def _calls_of_a_step(blocks: int, parameters: int) -> tuple[int, int]:
    """Calls in the forward and in the backward of the third step."""
    torch._dynamo.reset()
    model = _Model(*(_Block(parameters) for _ in range(blocks)))
    fsdp_compile.fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})

    def step(around: Callable[[], Any]) -> None:
        with around():
            loss = compiled(torch.ones(2, 4)).sum()
        with around():
            loss.backward()
        model.zero_grad()

    counts: list[collections.Counter[str]] = []

    @contextmanager
    def count() -> Iterator[None]:
        with _counted() as calls:
            yield
        counts.append(calls)

    for _ in range(3):
        step(count)
    assert counts[0].total() > counts[-2].total() > 0  # the first step compiles
    return counts[-2].total(), counts[-1].total()


@pytest.mark.core
def test_a_forward_calls_nothing_per_parameter_and_a_backward_few_functions() -> None:
    with fake_world(2):
        few, more_parameters, more_units = _calls_of_a_step(2, 2), _calls_of_a_step(2, 7), _calls_of_a_step(4, 2)
    units, parameters = 4 - 2, 2 * (7 - 2)
    assert more_parameters[0] == few[0], "a forward does as much for many parameters as for few"
    assert more_parameters[1] - few[1] <= 2 * parameters, "each parameter gets a DTensor as its gradient"
    assert more_units[0] - few[0] <= 40 * units, "it asks FSDP2's objects of each unit what users have changed"
    assert more_units[1] - few[1] <= 24 * units, "autograd calls the edge of each parameter group, and its 2 parameters"


@pytest.mark.core
def test_collectives_inside_of_graphs_do_not_look_for_derivatives() -> None:
    derivatives = Path(torch.__file__).parent / "_library" / "autograd.py"
    assert derivatives.exists()
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        model = fsdp_compile.fully_shard(nn.Sequential(_Block(2), _Block(2)), mesh=mesh)
        compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
        compiled(torch.ones(2, 4)).sum().backward()
        with _counted(str(derivatives)) as calls:
            compiled(torch.ones(2, 4)).sum().backward()
    assert calls.total() == 0


def _guards(make: Callable[[], nn.Module], layers: int) -> collections.Counter[str]:
    """What Dynamo looks at before each call of a compiled model, by kind of look."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, mesh = nn.Sequential(*(make() for _ in range(layers))), init_device_mesh("cpu", (2,))
    for layer in model:
        fsdp_compile.fully_shard(layer, mesh=mesh)
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    made: list[Any] = []
    build = torch._dynamo.guards.CheckFunctionManager.__init__

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.guards.CheckFunctionManager, "__init__", note)
        compiled(torch.ones(2, 4))
    texts = [str(getattr(each, "guard_manager", None) or each.check_fn) for each in made]
    return collections.Counter(re.findall(r"\+- (\w+)", "\n".join(texts)))


class _Scaled(nn.Module):
    """Reads each parameter by its name."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.count = parameters
        for i in range(parameters):
            self.register_parameter(f"scale{i}", nn.Parameter(torch.ones(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(self.count):
            x = x * getattr(self, f"scale{i}")
        return x


@pytest.mark.long
def test_dynamo_looks_at_one_tensor_per_unit_and_at_nothing_per_parameter() -> None:
    def of_each_layer(parameters: int) -> dict[str, float]:
        few, many = (_guards(lambda: _Scaled(parameters), layers) for layers in (3, 9))
        return {kind: (many[kind] - few[kind]) / 6 for kind in many}

    with fake_world(2):
        more = of_each_layer(2)
        assert more == of_each_layer(5), "how parameters are read is looked at once for a class"
    assert more["TENSOR_MATCH"] == 1, "the parameter group"
    assert more["EQUALS_MATCH"] <= 3, "names in the Sequential, a number, and what FSDP2's hooks alone can do"
    if torch.__version__ >= "2.13":  # older ones look into the class of each module, and not once for all modules
        assert more["GuardManager"] <= 16, "the module, its dict and values in it; FSDP2's hooks and their dicts"


class _Recurrent(nn.Module):
    """Dynamo leaves its forward to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]


@pytest.fixture
def _frozen_later() -> object:
    yield
    gc.unfreeze()


def _stepped(*, freeze: bool) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    with fake_world(1):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()  # state of plain parameters, which has to follow them
        optimizer.zero_grad()
        compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
        if freeze:
            gc.freeze()
        for _ in range(2):
            compiled(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        followed = sum(
            held is own for held, own in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)
        )
        return [parameter.to_local().clone() for parameter in model.parameters()], followed  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_frozen_later")
def test_an_optimizer_from_before_follows_its_parameters() -> None:
    (plain, followed), (frozen, followed_frozen) = _stepped(freeze=False), _stepped(freeze=True)
    assert followed == followed_frozen == 4
    for ours, theirs in zip(frozen, plain, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("_frozen_later")
def test_a_model_whose_forward_dynamo_leaves_to_python_is_found() -> None:
    with fake_world(2):
        model = _Recurrent()
        compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
        gc.freeze()
        compiled(torch.ones(2, 3, 4)).sum().backward()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())


def test_hooks_on_all_optimizers_come_with_the_first_sharded_model() -> None:
    with fake_world(2):
        model = fully_shard(nn.Linear(2, 2))
        old = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([*model.parameters(), old], lr=0.1)
        old.grad = torch.ones(2)
        optimizer.step()  # of sharded parameters without gradients and a plain one with
        assert torch.equal(old, torch.full((2,), 0.9))
