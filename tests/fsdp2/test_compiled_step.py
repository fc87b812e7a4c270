"""What runs around compiled graphs: functions, pending gradients, named errors; and how much, counted in calls."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fsdp_compile
from fsdp_compile.backend import fsdp
from fsdp_compile.errors import RankFailedError, UnsupportedModelError
from fsdp_compile.fsdp2.module_class import FLAT
from fsdp_compile.lower.compiled_step import CompiledStep
from fsdp_compile.optim.step_in_backward import step_in_backward
from tests.fake_world import fake_world
from tests.fsdp2.test_plain import Recurrent
from tests.models.kinds import WIDTH, Slim
from tests.ranks import on_ranks
from tests.two_sides import WithFsdp2, compile_eagerly, loss_of, made, shard_blocks, unique_graphs

EAGER: dict[str, Any] = {"lower": "eager"}


def _sharded() -> Any:
    return shard_blocks(made(Slim), fully_shard)


def _input(seed: int = 1) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))


def _pair() -> WithFsdp2:
    return WithFsdp2(Slim, functools.partial(shard_blocks, fully_shard=fully_shard), _input)


@on_ranks()
def test_a_compiled_function_follows_parameters_that_were_replaced() -> None:
    pair = _pair()
    function = compile_eagerly(lambda x: loss_of(pair.model(x)), fullgraph=True)
    for step in range(4):
        pair.zero_grad()
        for each in pair:
            if step == 1:
                each.load_state_dict({k: v.clone() * 2 for k, v in each.state_dict().items()}, assign=True)
            if step == 2:
                each.head.weight.requires_grad_(requires_grad=False)
        pair.accumulate(loss=lambda call, x: function(x) if call is pair.model else loss_of(call(x)))


@on_ranks()
def test_a_compiled_function_whose_parameters_are_trained_later_says_so() -> None:
    model = _sharded().requires_grad_(requires_grad=False)
    x = _input().requires_grad_()
    function = compile_eagerly(lambda x: loss_of(model(x)), fullgraph=True)
    function(x).backward()
    model.requires_grad_()
    with pytest.raises(UnsupportedModelError, match="all frozen"):
        function(x)
    function(x).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.long
@on_ranks()
def test_gradients_of_inputs_leave_pending_gradients_where_they_are() -> None:
    pair = _pair()
    compiled = pair.compiled(fullgraph=False)
    for _ in range(2):
        x = _input(2).requires_grad_()
        pair.zero_grad()
        pair.change(lambda model: model.set_requires_gradient_sync(False))
        pair.backward()
        # FSDP2 itself reduces what is left, whatever was asked for.
        pair.model.set_requires_gradient_sync(True)
        torch.autograd.grad(loss_of(compiled(x)), x)
        assert all(p.grad is None for p in pair.model.parameters())
        loss_of(compiled(x)).backward(inputs=[x])
        assert all(p.grad is None for p in pair.model.parameters())
        pair.reference.set_requires_gradient_sync(True)
        pair.accumulate()


def _fail(*_: object) -> None:
    raise ValueError("expected")


@pytest.mark.long
@on_ranks()
def test_a_compiled_function_follows_parameters_after_a_call_that_raised() -> None:
    """Before it all units have followed their parameters, and none has run since."""

    def shard(model: Any) -> Any:
        for part in model:
            fully_shard(part)
        return fully_shard(model)

    pair = WithFsdp2(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))), shard, _input)
    compiled = compile_eagerly(pair.model)
    function = compile_eagerly(lambda x: loss_of(pair.model(x)))

    def loss(call: Any, x: torch.Tensor) -> torch.Tensor:
        return function(x) if call is pair.model else loss_of(call(x))

    pair.accumulate(loss=loss)
    pair.accumulate(compiled)
    with compiled.register_forward_pre_hook(_fail), pytest.raises(ValueError, match="expected"):
        compiled(_input())
    for each in pair:
        each.load_state_dict({k: v.clone() * 2 for k, v in each.state_dict().items()}, assign=True)
    pair.zero_grad()
    pair.accumulate(loss=loss)


@on_ranks()
def test_a_compiled_function_does_not_go_on_with_the_parameters_before_a_conversion() -> None:
    model, tokens = _sharded(), torch.randint(0, 4, (2, 3), generator=torch.Generator().manual_seed(0))
    embedding = torch.nn.functional.one_hot(tokens, WIDTH)

    @torch.compile(backend=fsdp, options=EAGER)
    def call(x: torch.Tensor) -> torch.Tensor:
        return model(x.to(next(iter(model.parameters())).dtype))

    assert call(embedding).dtype is torch.float32
    model.bfloat16()
    with pytest.raises(UnsupportedModelError, match="parameters were converted since the last call"):
        call(embedding)
    model(embedding.bfloat16())
    loss_of(call(embedding)).backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}


@on_ranks()
def test_a_collective_that_fails_names_the_units() -> None:
    def fail(args: list[Any]) -> None:
        raise dist.DistNetworkError("connection closed by peer")

    around, says = CompiledStep.around, r"in a compiled forward of unit blocks\.0, blocks\.1, \(root\)"
    with (
        mock.patch.object(CompiledStep, "around", lambda step, _: around(step, fail)),
        pytest.raises(RankFailedError, match=says),
    ):
        compile_eagerly(_sharded())(_input())


@on_ranks()
def test_it_is_plain_data() -> None:
    seen, of = [], CompiledStep.of

    def note(*args: Any) -> CompiledStep:
        seen.append(of(*args))
        return seen[-1]

    with mock.patch.object(CompiledStep, "of", note):
        loss_of(compile_eagerly(_sharded())(_input())).backward()
    assert len(seen) == 2
    assert [pickle.loads(pickle.dumps(step)) for step in seen] == seen
    assert dataclasses.is_dataclass(CompiledStep)


def _graphs(backend: Any, options: dict[str, Any]) -> int:
    """Graphs of a script that accumulates, evaluates, and has batches of five shapes."""
    torch.compiler.reset()
    counters.clear()
    model: Any = _sharded() if options else Slim()
    call = torch.compile(model, backend=backend, options=options, fullgraph=True)
    shapes = ((4, 8), (4, 6), (3, 7), (1, 5), (4, 9))
    for rows, length in shapes:
        x = torch.randn(rows, length, WIDTH)
        for last in (False, False, True):
            if options:
                model.set_requires_gradient_sync(last)
            loss_of(call(x)).backward()
        model.zero_grad()
        with torch.no_grad():
            call(x[:1])
    return unique_graphs()


@on_ranks()
def test_accumulation_adds_at_most_one_graph_for_each_shape_and_no_frame_reaches_the_recompile_limit() -> None:
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        ours, plain = _graphs(fsdp, EAGER), _graphs("eager", {})
    assert plain < ours <= 2 * plain


@pytest.mark.long
@on_ranks()
def test_models_of_one_class_share_a_graph_as_without_sharding() -> None:
    counts = []
    forms: list[Callable[[nn.Module], Any]] = [lambda model: model, fully_shard]
    for form in forms:
        torch.compiler.reset()
        counters.clear()
        for _ in range(4):
            call = compile_eagerly(form(Slim()))
            for step in range(2):
                loss_of(call(_input(step))).backward()
        counts.append(unique_graphs())
    assert counts == [1, 1]


@on_ranks()
def test_an_optimizer_that_updates_in_backward_may_be_made_before_the_plain_model_is_sharded() -> None:
    ends = []
    for in_backward in (True, False):
        model = made(Slim)
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        if in_backward:
            step_in_backward(optimizer)
        call = compile_eagerly(model)
        for step in range(3):
            loss_of(call(_input(step))).backward()
            assert not in_backward or all(p.grad is None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        ends.append(torch.cat([p.full_tensor().flatten() for p in model.parameters()]))
    one, other = ends
    assert torch.equal(one, other)


# What a step runs of our Python code; nothing of it searches the heap.

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
        model = Recurrent()
        compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
        gc.freeze()
        compiled(torch.ones(2, 3, 6)).sum().backward()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())


def test_hooks_on_all_optimizers_come_with_the_first_sharded_model() -> None:
    with fake_world(2):
        model = fsdp_compile.fully_shard(nn.Linear(2, 2))
        old = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([*model.parameters(), old], lr=0.1)
        old.grad = torch.ones(2)
        optimizer.step()  # of sharded parameters without gradients and a plain one with
        assert torch.equal(old, torch.full((2,), 0.9))


def test_a_conversion_leaves_no_buffer_of_a_group_that_is_gone() -> None:
    with fake_world(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).requires_grad_(requires_grad=False)
        model[1].requires_grad_()
        fully_shard(model)
        compiled = compile_eagerly(model)
        compiled(torch.ones(2, 4))
        model.requires_grad_().double()
        compiled(torch.ones(2, 4).double())
        assert [name for part in model for name in vars(part) if name.startswith(FLAT)] == [f"{FLAT}0"] * 2
