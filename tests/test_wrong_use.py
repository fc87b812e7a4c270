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
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from fsdp_compile import ConfigError, FSDPCompileError, UnsupportedModelError, fully_shard
from tests.models.outlines import Block, Small, Transformer


def _compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="fsdp", options={"lower": "eager", **options})


def _check(error: FSDPCompileError, what: str, where: str, instead: str, kind: type = ConfigError) -> None:
    assert type(error) is kind
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
    _check(_refusal(lambda: _compiled(Small(), **options)(torch.ones(2, 6))), what, where, instead)


@pytest.mark.usefixtures("world")
def test_a_partitioner_of_inductor() -> None:
    class Given(CustomPartitionerFn):
        def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
            raise NotImplementedError

        def uuid(self) -> str:
            return "given"

    def compile_with(settings: dict[str, Any]) -> FSDPCompileError:
        return _refusal(lambda: _compiled(Small(), lower="inductor", inductor=settings)(torch.ones(2, 6)))

    of_options = compile_with({"custom_partitioner_fn": Given()})
    torch._dynamo.reset()
    with inductor_config.patch(custom_partitioner_fn=Given()):
        of_process = compile_with({})
    for error in (of_options, of_process):
        _check(error, "a partitioner was given", "custom_partitioner_fn", "checkpoint")


@pytest.mark.usefixtures("world")
def test_a_refused_call_leaves_the_model_as_it_was() -> None:
    model = Small()
    before = list(model.parameters())
    _refusal(lambda: _compiled(model, mesh="all")(torch.ones(2, 6)))
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert model(torch.ones(2, 6)).shape == (2, 3)
    assert type(model) is Small


@pytest.mark.usefixtures("world")
def test_meta_parameters_of_a_plain_model() -> None:
    error = _refusal(lambda: _compiled(_meta())(torch.ones(2, 6, device="meta")))
    _check(error, "on the meta device", "scale", "to_empty")


def _meta() -> Small:
    with torch.device("meta"):
        return Small()


def _shard_replicated() -> None:
    """What torch replicates already."""
    model: Any = replicate_with_fsdp(Block(), mesh=init_device_mesh("cpu", (4,)))
    fully_shard(model)


OF_TORCH: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "sharded twice": (lambda: fully_shard(fully_shard(Small())), AssertionError, "has already been applied"),
    "replicated": (_shard_replicated, AssertionError, "ReplicateBlock"),
    "a list": (lambda: fully_shard(nn.ModuleList([Small()])), ValueError, "do not implement forward"),
    "a dict": (lambda: fully_shard(nn.ModuleDict({"a": Small()})), ValueError, "do not implement forward"),
    "on meta": (
        lambda: _compiled(fully_shard(_meta()))(torch.ones(2, 6)),
        RuntimeError,
        "should be materialized from meta device",
    ),
}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name", OF_TORCH)
def test_errors_of_torch(name: str) -> None:
    call, kind, text = OF_TORCH[name]
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.usefixtures("world")
def test_a_plain_model_with_a_parameter_that_is_not_contiguous() -> None:
    model = Small()
    model.scale = nn.Parameter(torch.ones(2, 6).t())
    error = _refusal(lambda: _compiled(model)(torch.ones(2, 6)))
    _check(error, "not contiguous", "scale", "p.contiguous()", UnsupportedModelError)
    assert type(model.scale) is nn.Parameter


@pytest.mark.usefixtures("world")
def test_a_model_that_torch_replicates() -> None:
    model = replicate_with_fsdp(Block(), mesh=init_device_mesh("cpu", (4,)))
    error = _refusal(lambda: _compiled(model)(torch.ones(2, 16)))
    _check(error, "averages gradients by itself", "ReplicateBlock", "the model without")


@pytest.mark.core
@pytest.mark.usefixtures("world")
def test_a_mesh_of_the_wrong_dimension() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pipe", "replicate", "shard"))
    for call in (lambda: fully_shard(Small(), mesh=mesh), lambda: _compiled(Small(), mesh=mesh)(torch.ones(2, 6))):
        with pytest.raises(ValueError, match="expects a 1D or 2D DeviceMesh"):
            call()
    fully_shard(Small(), mesh=mesh["replicate", "shard"])


def test_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    for call in (lambda: fully_shard(Small()), lambda: _compiled(Small())(torch.ones(2, 6))):
        error = _refusal(call)
        _check(error, "lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT", "os.environ", "torchrun")
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
    _check(error, what, where, instead)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True)), "nothing was touched"


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("root", [{Small()}, Small().parameters()], ids=["set", "generator"])
def test_roots_that_are_no_modules(root: Any) -> None:
    error = _refusal(lambda: fully_shard(root))
    _check(error, f"{type(root).__name__} is not a torch.nn.Module", "fully_shard(module)", "pass the module")


@pytest.mark.usefixtures("world")
def test_a_parameter_that_belongs_to_no_module() -> None:
    loose = nn.Parameter(torch.ones(3))
    error = _refusal(lambda: _compiled(lambda x: x * loose)(torch.ones(3)))
    _check(error, "whose gradients no rank would average", "loose", "fully_shard(model)")


@pytest.mark.usefixtures("world")
def test_a_part_of_a_model_that_is_sharded_already() -> None:
    model = fully_shard(Transformer())
    for part in (model.blocks[0], model.embed):
        with pytest.raises(AssertionError, match="fully_shard has already been applied"):
            fully_shard(part)


def _train_with_an_option_for_sharding(model: nn.Module) -> None:
    compiled = _compiled(model, reshard_after_forward=False)
    compiled(torch.ones(2, 4)).sum().backward()
    compiled(torch.ones(3, 4)).sum().backward()


@pytest.mark.usefixtures("world")
def test_options_for_sharding_are_refused_where_the_model_is_sharded_already() -> None:
    error = _refusal(lambda: _train_with_an_option_for_sharding(fully_shard(nn.Linear(4, 4))))
    assert "option 'reshard_after_forward' says how to shard" in str(error)
    assert "fully_shard(model, reshard_after_forward=...)" in str(error)
    _train_with_an_option_for_sharding(nn.Linear(4, 4))


def _evaluate_and_train(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Two compiles of a plain model, each with options of its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for options in (first, second):
        _compiled(model, **options)(torch.ones(2, 4)).sum().backward()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("first", [{}, {"reshard_after_forward": True}])
def test_a_second_compile_cannot_shard_in_another_way(first: dict[str, Any]) -> None:
    asked = {"reshard_after_forward": False}
    error = _refusal(lambda: _evaluate_and_train(first, asked))
    _check(error, "the model was sharded before", "'reshard_after_forward'", "in all compiles of a plain model")


@pytest.mark.long
@pytest.mark.usefixtures("world")
def test_a_second_compile_may_say_the_same_or_nothing() -> None:
    def options() -> dict[str, Any]:
        bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        return {"mp_policy": bf16, "auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "reshard_after_forward": False}

    for second in (options(), {}, {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}):
        _evaluate_and_train(options(), second)
    sized = [functools.partial(size_based_auto_wrap_policy, min_num_params=8) for _ in range(2)]
    _evaluate_and_train({"auto_wrap_policy": sized[0]}, {"auto_wrap_policy": sized[1]})
