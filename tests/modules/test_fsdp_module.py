"""Sharded modules are torch's `FSDPModule`s: each of its methods, and torch's own functions for such modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_compile.modules.eager_reads import GatheredParameter, reads
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, ShardedModule, UnsupportedModelError, fully_shard, units
from tests import long
from tests.beside import close, compile_eagerly
from tests.fake_world import fake_world
from tests.ranks import run_ranks


class _Encoder(nn.Module):
    """One whose `encode` reads a parameter of its own and calls a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.full((4,), 0.5))
        self.fails = False

    def encode(self, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        out = self.layer(x) * self.scale
        if self.fails:
            raise ValueError("in the middle")
        return out * self.scale if twice else out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.encode(x))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = _Encoder()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder.encode(x, twice=True))


def test_no_method_of_torch_is_left_to_torch(fake_world: Callable[..., Any]) -> None:
    """One that was would look for parameter groups of FSDP2's, and find none."""
    ours = [name for name in vars(FSDPModule) if callable(getattr(FSDPModule, name)) and not name.startswith("__")]
    assert [name for name in ours if getattr(ShardedModule, name) is getattr(FSDPModule, name)] == []


def test_which_modules_are_fsdp_modules(fake_world: Callable[..., Any]) -> None:
    with fake_world(2):
        model: Any = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
        fully_shard(model[0])
        fully_shard(model)
        assert [isinstance(module, FSDPModule) for module in model.modules()] == [True, True, False, False, False]
        assert type(model).__name__ == "FSDPSequential"
        part: Any = model[:1]  # made by calling the class of `model`
        assert type(part) is nn.Sequential
        assert part[0] is model[0]
        model.to(torch.float64)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
        compiled: Any = torch.compile(nn.Linear(4, 4), backend="fsdp", options={"lower": "eager"})
        compiled(torch.ones(2, 4))
        assert isinstance(compiled._orig_mod, FSDPModule)


_REFUSED: dict[str, tuple[object, ...]] = {
    "set_custom_all_gather": (None,),
    "set_custom_reduce_scatter": (None,),
    "set_all_reduce_hook": (print,),
    "set_symm_mem_for_comm": (),
    "set_reduce_scatter_unused_params": (True,),
    "set_reduce_scatter_max_input_buffers": (2,),
    "set_allocate_memory_from_process_group_for_comm": (True,),
    "set_post_optim_event": (3,),
    "set_unshard_in_backward": (1,),
    "_set_unshard_async_op": (None,),
}


@pytest.mark.parametrize("method", _REFUSED)
def test_what_cannot_be_done_is_refused_by_name(method: str, fake_world: Callable[..., Any]) -> None:
    with fake_world(2):
        model = fully_shard(nn.Linear(4, 4))
        with pytest.raises(ConfigError, match=rf"where: {method}"):
            getattr(model, method)(*_REFUSED[method])


def test_defaults_of_refused_methods_are_taken(fake_world: Callable[..., Any]) -> None:
    with fake_world(2):
        model: Any = fully_shard(nn.Linear(4, 4))
        off, on = False, True
        model.set_reduce_scatter_unused_params(off, recurse=False)
        model.set_reduce_scatter_max_input_buffers(1)
        model.set_allocate_memory_from_process_group_for_comm(off)
        for flag in (off, on):
            model.set_unshard_in_backward(flag)
            model._set_unshard_async_op(flag)
        with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
            model.set_reduce_scatter_divide_factor(3.0)
        handle = model.unshard(async_op=True)
        assert isinstance(handle, UnshardHandle)
        handle.wait()


class _Event:
    """Counts how often a stream was told to wait for it."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def test_the_next_forward_waits_for_the_event_of_an_optimizer_once(fake_world: Callable[..., Any]) -> None:
    with fake_world(2):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0])
        fully_shard(model)
        for read in (lambda: model(torch.ones(2, 4)), model[0].unshard):
            event = _Event()
            model.set_post_optim_event(event)
            assert event.waits == 0
            read()
            read()
            assert event.waits == 1


class _TiedMethod(nn.Module):
    """Reads one parameter at the end of a method and at the start of the next call; may step in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 12).reshape(4, 3))
        self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x @ self.table * self.scale, self.table)

    def two_steps(self, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        for _ in range(2):
            loss = self.encode(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def kinds(self) -> set[type]:
        return {type(p) for p in self.parameters()}


def _check_methods_that_train() -> None:
    model: Any = _TiedMethod()
    reference: Any = copy.deepcopy(model)
    fully_shard(model)
    for name in ("encode", "two_steps", "kinds"):
        register_fsdp_forward_method(model, name)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference))
    x = torch.ones(2, 4)
    for _ in range(2):
        for each, own in ((model, optimizer), (reference, other)):
            each.encode(x).square().mean().backward()
            own.step()
            own.zero_grad()
        close(model.encode(x).detach(), reference.encode(x), "a method after a step")
    close(model.two_steps(x, optimizer), reference.two_steps(x, other), "a step in a method")
    assert not reads.__dict__, "gathered parameters end with the method"
    with torch.no_grad():
        assert all(issubclass(kind, GatheredParameter) for kind in model.kinds())


def test_a_method_reads_what_an_optimizer_has_written_since() -> None:
    run_ranks(_check_methods_that_train)


def _check_forward_method(compiled: bool) -> None:  # noqa: FBT001
    torch.manual_seed(0)
    model: Any = _Model()
    reference = copy.deepcopy(model)
    for part in (model.encoder, model):
        fully_shard(part)
    register_fsdp_forward_method(model.encoder, "encode")
    register_fsdp_forward_method(model.head, "forward_features")  # no FSDPModule: nothing happens, as with FSDP2
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    mine = batch.chunk(2)[dist.get_rank()]
    run = compile_eagerly(model) if compiled else model
    for read, theirs in ((run, reference), (model.encoder.encode, reference.encoder.encode)):
        read(mine).square().mean().backward()
        theirs(batch).square().mean().backward()
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert isinstance(parameter.grad, DTensor)
            close(parameter.grad.full_tensor(), expected.grad, "gradient")
    model.encoder.fails = True
    with pytest.raises(ValueError, match="in the middle"):
        model.encoder.encode(mine)
    assert isinstance(model.encoder.scale, DTensor)  # the method was left by an exception


@long.parametrize("compiled", [False, True], always=[True])
def test_torch_registers_further_forward_methods(compiled: bool) -> None:  # noqa: FBT001
    run_ranks(_check_forward_method, compiled)


def _check_casts() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    outputs = []
    for shard in (fsdp2, fully_shard):
        torch.manual_seed(0)
        model: Any = _Encoder()
        shard(model, mp_policy=policy)
        register_fsdp_forward_method(model, "encode")
        outputs.append(model.encode(torch.ones(2, 6), twice=True))
    assert outputs[0].dtype is torch.float64
    assert torch.equal(*outputs)


def test_a_registered_method_casts_what_a_forward_casts() -> None:
    run_ranks(_check_casts)


def test_torch_shares_what_there_is_to_share(fake_world: Callable[..., Any]) -> None:
    with fake_world(2):
        models: Any = [fully_shard(nn.Linear(4, 4)) for _ in range(2)]
        share_comm_ctx(models)


def _check_replicate() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    reference = copy.deepcopy(model)
    fully_shard(model[1])
    replicate(model)
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    model(batch.chunk(2)[dist.get_rank()]).square().mean().backward()
    reference(batch).square().mean().backward()
    assert isinstance(model[1].weight.grad, DTensor)
    close(model[1].weight.grad.full_tensor(), reference[1].weight.grad, "sharded")
    close(model[0].weight.grad, reference[0].weight.grad, "replicated")


def test_composable_replicate_leaves_sharded_modules_out() -> None:
    run_ranks(_check_replicate)


class _Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def _check_pipeline(stages_per_rank: int, looped: type = ScheduleInterleaved1F1B) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    place, data = mesh.get_local_rank("pipeline"), mesh.get_local_rank("data")
    torch.manual_seed(0)
    reference = nn.Sequential(*[_Stage() for _ in range(2 * stages_per_rank)])
    mine: list[Any] = copy.deepcopy([reference[place + 2 * i] for i in range(stages_per_rank)])
    batch, target = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(1))
    for stage in mine:
        fully_shard(stage.up, mesh=mesh["data"])
        fully_shard(stage, mesh=mesh["data"])
    group = mesh.get_group("pipeline")
    stages: list[Any] = [
        PipelineStage(m, place + 2 * i, 2 * stages_per_rank, torch.device("cpu"), group=group)
        for i, m in enumerate(mine)
    ]
    if stages_per_rank == 1:
        schedule: Any = Schedule1F1B(stages[0], 4, loss_fn=F.mse_loss)
    else:
        schedule = looped(stages, 4, loss_fn=F.mse_loss)
    for _ in range(2):
        reference.zero_grad()
        for model in mine:
            model.zero_grad()
        inputs = (batch.chunk(2)[data],) if place == 0 else ()
        schedule.step(*inputs, target=target.chunk(2)[data] if place == 1 else None)
        F.mse_loss(reference(batch), target).backward()
        for i, model in enumerate(mine):
            theirs = reference[place + 2 * i].parameters()
            for parameter, expected in zip(model.parameters(), theirs, strict=True):
                assert isinstance(parameter.grad, DTensor)
                close(parameter.grad.full_tensor(), expected.grad, "gradient")
            groups = [group for unit in units(model) for group in unit.param_groups]
            assert all(group.unsharded.is_sharded for group in groups)


@long.parametrize("stages_per_rank", [1, 2], always=[2])
def test_pipeline_stages_reduce_once_and_reshard(stages_per_rank: int) -> None:
    run_ranks(_check_pipeline, stages_per_rank, world_size=4)


def test_pipeline_schedules_that_split_backward_are_refused() -> None:
    """Their gradients of weights would be None without a word."""
    with pytest.raises(UnsupportedModelError, match="the schedule splits backward"):
        run_ranks(_check_pipeline, 2, ScheduleInterleavedZeroBubble, world_size=4)


def test_frameworks_find_no_sync_on_the_model() -> None:
    with fake_world(2):
        model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        with model.no_sync():
            model(torch.ones(2, 4)).sum().backward()
        assert [p.grad for p in model.parameters()] == [None] * 4, "they wait for the backward that reduces them"
        model(torch.ones(2, 4)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("made", ["sharded", "plain"])
def test_ddps_flag_holds_gradients_back(made: str) -> None:
    """`model.require_backward_grad_sync = ...`, on what `torch.compile` returned, before the first call and later."""
    with fake_world(2):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        if made == "sharded":
            fully_shard(model)
        compiled: Any = compile_eagerly(model)
        for _ in range(2):
            compiled.require_backward_grad_sync = False
            compiled(torch.ones(2, 4)).sum().backward()
            assert [p.grad for p in model.parameters()] == [None] * 4
            assert model.require_backward_grad_sync is False
            compiled.require_backward_grad_sync = True
            compiled(torch.ones(2, 4)).sum().backward()
            assert all(p.grad is not None for p in model.parameters())
            model.zero_grad()
        with pytest.raises(ConfigError, match="0 is no flag"):
            model.require_backward_grad_sync = 0
