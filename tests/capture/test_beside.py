"""Other data parallelism around compiled models, and models that are compiled in part, are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fsdp_compile import ConfigError, FSDPCompileError, fully_shard
from tests import long
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Stack
from tests.numerics.one_process.measure import gradient_difference
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import Run, WithOneProcess, compile_eagerly, compile_in_place


class _Task(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def _big() -> nn.Module:
    """More than DDP's first bucket of 1 MiB, so that Dynamo would split its graph."""
    return _Task(nn.Sequential(*(nn.Linear(WIDTH, WIDTH * 64), nn.ReLU(), nn.Linear(WIDTH * 64, WIDTH)) * 4))


MODELS: dict[str, Callable[[], nn.Module]] = {"small": Stack, "big": _big}


def _called(model: nn.Module) -> nn.Module:
    compile_eagerly(model)(torch.ones(2, WIDTH))
    return model


def _function(model: nn.Module) -> Call:
    return compile_eagerly(lambda x: model(x))  # noqa: PLW0108  a compiled function


def _around_in_place(wrapped: DistributedDataParallel) -> nn.Module:
    compile_in_place(wrapped.module)
    return wrapped


Call = Callable[[torch.Tensor], torch.Tensor]
FORMS: dict[str, Callable[[nn.Module], Call]] = {
    "around": lambda model: DistributedDataParallel(compile_eagerly(model)),
    "around-a-task": lambda model: DistributedDataParallel(_Task(compile_eagerly(model))),
    "around-a-called-one": lambda model: DistributedDataParallel(_called(model)),
    "around-module.compile": lambda model: DistributedDataParallel(compile_in_place(model)),
    "inside": lambda model: compile_eagerly(DistributedDataParallel(model)),
    "inside-a-task": lambda model: compile_eagerly(_Task(DistributedDataParallel(model))),
    "inside-module.compile": lambda model: _around_in_place(DistributedDataParallel(model)),
    "module.compile": lambda model: compile_in_place(DistributedDataParallel(model)),
    "function": lambda model: _function(DistributedDataParallel(model)),
}
INSIDE = ("inside", "inside-a-task", "inside-module.compile")


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except (BackendCompilerFailed, FSDPCompileError) as error:
        own = getattr(error, "inner_exception", error)
        return f"{type(own).__name__}: {own}"
    return ""


@pytest.mark.core
@long.parametrize("make", MODELS, always=["small"])
@long.parametrize("form", FORMS, always=["around", *INSIDE, "module.compile", "function"])
@on_ranks(timeout_s=60)
def test_ddp_is_refused_wherever_it_stands(form: str, make: str) -> None:
    message = _refusal(lambda: FORMS[form](MODELS[make]())(torch.ones(2, WIDTH)).sum().backward())
    assert message.startswith(f"{ConfigError.__name__}: DistributedDataParallel averages gradients by itself")
    assert "the model without DistributedDataParallel" in message


def _replicate_with_fsdp(model: nn.Module) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp

    replicate_with_fsdp(model, mesh=init_device_mesh("cpu", (2,)))


REPLICATED_BY_TORCH: dict[str, Callable[[nn.Module], object]] = {
    "replicate": replicate,
    "replicate_with_fsdp": _replicate_with_fsdp,
}


def _sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 5))


@pytest.mark.parametrize(("form", "of"), [("module", _sequential), ("module", Stack), ("function", Stack)])
@pytest.mark.parametrize("wrapped_by", REPLICATED_BY_TORCH)
def test_what_torch_replicates_is_refused(wrapped_by: str, form: str, of: Callable[[], nn.Module]) -> None:
    with fake_world(2):
        model = of()
        REPLICATED_BY_TORCH[wrapped_by](model)
        call = _function(model) if form == "function" else compile_eagerly(model)
        message = _refusal(lambda: call(torch.ones(2, WIDTH)))
    assert "averages gradients by itself" in message
    assert "the model without" in message


@pytest.mark.parametrize("wrapped_by", REPLICATED_BY_TORCH)
@on_ranks()
def test_a_module_of_torch_behind_the_graph_break_of_its_replication_is_averaged_once(wrapped_by: str) -> None:
    """Dynamo starts no graph in it, so there is nothing to refuse."""
    pair = WithOneProcess(_sequential, Run.EAGER, REPLICATED_BY_TORCH[wrapped_by], shape=WIDTH, twice=False)
    pair.backward(_function(pair.model))
    assert gradient_difference(*pair) < 1e-6


def _blocks_alone(form: str) -> str:
    """Compiles a part of a model, or all of its parts; trains one step."""
    torch.manual_seed(0)
    model = Stack()
    if form == "all":
        model.head = compile_eagerly(model.head)
    elif form == "head-for-another-backend":
        model.head = torch.compile(model.head, backend="eager")  # type: ignore[assignment]
    elif form == "head-in-place-for-another-backend":
        model.head.compile(backend="eager")
    elif form == "sharded":
        fully_shard(model)
    for number, block in enumerate(model.blocks):
        if form == "sharded":
            compile_in_place(block)
        else:
            model.blocks[number] = compile_eagerly(block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if form == "evaluated-first":
        with torch.no_grad():
            model(torch.ones(2, WIDTH))

    def step() -> None:
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()

    return _refusal(step)


@pytest.mark.core
@long.parametrize("form", ["alone", "head-for-another-backend", "head-in-place-for-another-backend"], always=["alone"])
def test_blocks_that_are_compiled_alone_are_refused(form: str) -> None:
    for message in run_ranks(_blocks_alone, form):
        assert message.startswith(f"{ConfigError.__name__}: only a part of a model is compiled")
        assert "Stack, parameter head." in message
        assert "torch.compile(model, backend='fsdp') of the whole model" in message


@long.parametrize("form", ["all", "sharded"], always=["all"])
def test_parts_are_compiled_where_nothing_is_left_over(form: str) -> None:
    assert run_ranks(_blocks_alone, form) == ["", ""]


def test_an_optimizer_of_sharded_and_plain_parts_is_refused() -> None:
    for message in run_ranks(_blocks_alone, "evaluated-first"):
        assert "others that no rank averages" in message
        assert "SGD: 2 of " in message


@long.parametrize("closure", [False, True], always=[False])
@on_ranks()
def test_a_plain_model_beside_a_compiled_one_is_refused(closure: bool) -> None:  # noqa: FBT001
    """No module contains both parts; the plain one is never compiled."""
    torch.manual_seed(0)
    body, head = Stack(), nn.Linear(5, 3)
    before = copy.deepcopy(head)
    compiled = compile_eagerly(body)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)

    def compute() -> float:
        head(compiled(torch.ones(2, WIDTH))).sum().backward()
        return 0.0

    if closure:  # before it is called, there are no gradients yet
        with torch.no_grad():
            compiled(torch.ones(2, WIDTH))
        optimizer.step(compute)
        message = _refusal(lambda: optimizer.step(compute))
    else:
        compute()
        message = _refusal(optimizer.step)
        assert torch.equal(head.weight, before.weight)
    assert "others that no rank averages" in message


@on_ranks()
def test_ddp_that_ignores_what_is_sharded_averages_the_rest() -> None:
    """A sharded part is compiled in place, in a model whose rest DDP averages."""
    pair = WithOneProcess(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Stack()), Run.UNSHARDED, shape=WIDTH)
    compile_in_place(fully_shard(pair.model[1]))
    sharded = [name for name, _ in pair.model.named_parameters() if name.startswith("1.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(pair.model, sharded)
    pair.twice = False
    pair.backward(DistributedDataParallel(pair.model))
    pair.compare_gradients()


class _PartlySharded(nn.Module):
    """Of which a part is sharded, and the rest stays plain, as FSDP2 leaves it without a call on the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x * self.scale)


@on_ranks()
def test_the_plain_rest_of_a_model_is_trained_behind_a_function_too() -> None:
    net = _PartlySharded()
    fully_shard(net.body)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return net(x).sum()

    compile_eagerly(lambda x: loss(x))(torch.ones(2, WIDTH)).backward()  # noqa: PLW0108  its code names no model
    assert net.scale.grad is not None


@pytest.mark.long
@on_ranks()
def test_optimizers_of_plain_parameters_step_as_always() -> None:
    """Another model's optimizer, and one of the ignored parameters of a compiled model."""
    other, model = nn.Linear(WIDTH, 5), Stack()
    fully_shard(model, ignored_params=[model.head])
    for call in (compile_eagerly(model), other):
        call(torch.ones(4, WIDTH)).sum().backward()
    for parameters in (list(other.parameters()), list(model.head.parameters())):
        before = [p.clone() for p in parameters]
        torch.optim.SGD(parameters, lr=0.1).step()
        assert not any(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
