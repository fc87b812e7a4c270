"""Wrong use is refused by the right class of error, with what was wrong, where, and what to write instead.

An error of the backend reaches the user as the `inner_exception` of Dynamo's `BackendCompilerFailed`, whose own text
contains ours whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from fsdp_compile import ConfigError, FSDPCompileError, UnsupportedModelError, fully_shard
from tests.models.outlines import Block, Small, Transformer
from tests.two_sides import MIXED, compile_eagerly


def _says(error: FSDPCompileError, what: str, where: str, instead: str) -> None:
    assert what in error.what
    assert where in (error.where or "")
    assert instead in (error.instead or "")
    assert str(error) == f"{error.what}\n  where: {error.where}\n  instead: {error.instead}"


def _refusal(call: Callable[[], object]) -> FSDPCompileError:
    """What `call` was refused with, looked up where Dynamo puts it."""
    with pytest.raises((BackendCompilerFailed, FSDPCompileError)) as caught:
        call()
    if isinstance(caught.value, FSDPCompileError):
        return caught.value
    assert isinstance(caught.value, BackendCompilerFailed)
    inner = caught.value.inner_exception
    assert isinstance(inner, FSDPCompileError)
    assert str(inner) in str(caught.value), "readable through Dynamo's wrapping"
    assert type(inner).__name__ in str(caught.value)
    return inner


OPTIONS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "unknown": ({"prefech": 1}, "unknown option 'prefech'", "options={...}", "'prefetch'"),
    "bad-value": ({"prefetch": -1}, "'prefetch' cannot be -1", "'prefetch'", "0, 1, 2"),
    "bad-reshard": ({"reshard_after_forward": 3}, "reshard_after_forward=3", "reshard_after_forward", "False"),
    "bad-policy": (
        {"auto_wrap_policy": "blocks"},
        "'blocks' is no wrap policy",
        "auto_wrap_policy",
        "ModuleWrapPolicy",
    ),
    "bad-mesh": ({"mesh": (2, 2)}, "mesh is a tuple", "mesh=", "init_device_mesh"),
}


@pytest.mark.core
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("kind", OPTIONS)
def test_wrong_options_of_the_backend(kind: str) -> None:
    options, what, where, instead = OPTIONS[kind]
    error = _refusal(lambda: compile_eagerly(Small(), **options)(torch.ones(2, 6)))
    assert type(error) is ConfigError
    _says(error, what, where, instead)


@pytest.mark.usefixtures("world")
def test_a_partitioner_of_inductor() -> None:
    class Given(CustomPartitionerFn):
        def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
            raise NotImplementedError

        def uuid(self) -> str:
            return "given"

    def compile_with(settings: dict[str, Any]) -> FSDPCompileError:
        return _refusal(lambda: compile_eagerly(Small(), lower="inductor", inductor=settings)(torch.ones(2, 6)))

    of_options = compile_with({"custom_partitioner_fn": Given()})
    torch._dynamo.reset()
    with inductor_config.patch(custom_partitioner_fn=Given()):
        of_process = compile_with({})
    for error in (of_options, of_process):
        assert type(error) is ConfigError
        _says(error, "a partitioner was given", "custom_partitioner_fn", "checkpoint")


@pytest.mark.usefixtures("world")
def test_a_refused_call_leaves_the_model_as_it_was() -> None:
    model = Small()
    before = list(model.parameters())
    _refusal(lambda: compile_eagerly(model, mesh="all")(torch.ones(2, 6)))
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert model(torch.ones(2, 6)).shape == (2, 3)
    assert type(model) is Small


@pytest.mark.usefixtures("world")
def test_meta_parameters() -> None:
    with torch.device("meta"):
        plain, sharded = Small(), fully_shard(Small())
    error = _refusal(lambda: compile_eagerly(plain)(torch.ones(2, 6, device="meta")))
    assert type(error) is ConfigError
    _says(error, "on the meta device", "scale", "to_empty")
    with pytest.raises(RuntimeError, match="should be materialized from meta device"):
        compile_eagerly(sharded)(torch.ones(2, 6))


@pytest.mark.usefixtures("world")
def test_a_plain_model_with_a_parameter_that_is_not_contiguous() -> None:
    model = Small()
    model.scale = nn.Parameter(torch.ones(2, 6).t())
    error = _refusal(lambda: compile_eagerly(model)(torch.ones(2, 6)))
    assert type(error) is UnsupportedModelError
    _says(error, "not contiguous", "scale", "p.contiguous()")
    assert type(model.scale) is nn.Parameter


@pytest.mark.usefixtures("world")
def test_sharding_what_is_sharded_already() -> None:
    model = fully_shard(Transformer())
    for part in (model, model.blocks[0], model.embed):
        with pytest.raises(AssertionError, match="fully_shard has already been applied"):
            fully_shard(part)


@pytest.mark.usefixtures("world")
def test_sharding_what_torch_replicates_already() -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp

    model = Block()
    replicate_with_fsdp(model, mesh=init_device_mesh("cpu", (4,)))
    error = _refusal(lambda: compile_eagerly(model)(torch.ones(2, 16)))
    assert type(error) is ConfigError
    _says(error, "averages gradients by itself", "ReplicateBlock", "the model without")
    with pytest.raises(AssertionError, match="ReplicateBlock"):
        fully_shard(model)


@pytest.mark.core
@pytest.mark.usefixtures("world")
def test_a_mesh_of_the_wrong_dimension() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pipe", "replicate", "shard"))
    compiled = compile_eagerly(Small(), mesh=mesh)
    for call in (lambda: fully_shard(Small(), mesh=mesh), lambda: compiled(torch.ones(2, 6))):
        with pytest.raises(ValueError, match="expects a 1D or 2D DeviceMesh"):
            call()
    fully_shard(Small(), mesh=mesh["replicate", "shard"])


def test_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    for call in (lambda: fully_shard(Small()), lambda: compile_eagerly(Small())(torch.ones(2, 6))):
        error = _refusal(call)
        assert type(error) is ConfigError
        _says(error, "lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT", "os.environ", "torchrun")
    assert not dist.is_initialized()


ARGUMENTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "offload": ({"offload_policy": CPUOffloadPolicy}, "offload_policy is a type", "offload_policy=", "leave it out"),
    "reshard-integer": ({"reshard_after_forward": 3}, "reshard_after_forward=3", "reshard_after_forward=", "1, 2, 4"),
    "reshard-zero": ({"reshard_after_forward": 0}, "reshard_after_forward=0", "reshard_after_forward=", "1, 2, 4"),
    "reshard-text": ({"reshard_after_forward": "no"}, "reshard_after_forward='no'", "reshard_after_forward=", "True"),
    "no-precision": ({"mp_policy": torch.bfloat16}, "mp_policy is a dtype", "mp_policy=", "MixedPrecisionPolicy"),
    "mesh-dims": (
        {"dp_mesh_dims": "fsdp"},
        "dp_mesh_dims names dimensions of a mesh",
        "dp_mesh_dims=",
        "a mesh with it",
    ),
    "mesh": ({"mesh": "cuda"}, "mesh is a str", "mesh=", "init_device_mesh"),
}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_wrong_arguments_of_fully_shard(kind: str) -> None:
    arguments, what, where, instead = ARGUMENTS[kind]
    model = Small()
    before = list(model.parameters())
    error = _refusal(lambda: fully_shard(model, **arguments))
    assert type(error) is ConfigError
    _says(error, what, where, instead)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True)), "nothing was touched"


@pytest.mark.usefixtures("world")
def test_roots_that_cannot_be_called() -> None:
    for container in (nn.ModuleList([Small()]), nn.ModuleDict({"a": Small()})):
        with pytest.raises(ValueError, match="containers that do not implement forward"):
            fully_shard(container)
    roots: list[tuple[Any, str]] = [({Small()}, "set"), (Small().parameters(), "generator")]
    for root, kind in roots:
        error = _refusal(lambda: fully_shard(root))  # noqa: B023  runs at once
        assert type(error) is ConfigError
        _says(error, f"{kind} is not a torch.nn.Module", "fully_shard(module)", "pass the module")


@pytest.mark.usefixtures("world")
def test_a_parameter_that_belongs_to_no_module() -> None:
    loose = nn.Parameter(torch.ones(3))
    error = _refusal(lambda: compile_eagerly(lambda x: x * loose)(torch.ones(3)))
    assert type(error) is ConfigError
    _says(error, "whose gradients no rank would average", "loose", "fully_shard(model)")


def _evaluate_and_train(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Two compiles of a plain model, each with options of its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for options in (first, second):
        compile_eagerly(model, **options)(torch.ones(2, 4)).sum().backward()


@pytest.mark.usefixtures("world")
def test_options_for_sharding_of_a_model_that_is_sharded_already() -> None:
    asked = {"reshard_after_forward": False}
    error = _refusal(lambda: compile_eagerly(fully_shard(nn.Linear(4, 4)), **asked)(torch.ones(2, 4)))
    assert "option 'reshard_after_forward' says how to shard" in str(error)
    assert "fully_shard(model, reshard_after_forward=...)" in str(error)
    firsts: list[dict[str, Any]] = [{}, {"reshard_after_forward": True}]
    for first in firsts:
        error = _refusal(lambda: _evaluate_and_train(first, asked))  # noqa: B023  runs at once
        assert type(error) is ConfigError
        _says(error, "the model was sharded before", "'reshard_after_forward'", "in all compiles of a plain model")


@pytest.mark.long
@pytest.mark.usefixtures("world")
def test_a_second_compile_may_say_the_same_or_nothing() -> None:
    def options() -> dict[str, Any]:
        policies = {"mp_policy": MIXED, "auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
        return {**policies, "reshard_after_forward": False}

    for second in (options(), {}, {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}):
        _evaluate_and_train(options(), second)
    compiled = compile_eagerly(nn.Linear(4, 4), reshard_after_forward=False)
    for rows in (2, 3):  # compiled again for another number of rows
        compiled(torch.ones(rows, 4)).sum().backward()
    sized = [functools.partial(size_based_auto_wrap_policy, min_num_params=8) for _ in range(2)]
    _evaluate_and_train({"auto_wrap_policy": sized[0]}, {"auto_wrap_policy": sized[1]})
