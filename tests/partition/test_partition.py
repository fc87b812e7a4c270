"""What a rank holds: its share of parameters, gradients and optimizer state, and nothing unsharded from forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard, units
from fsdp_compile.ir.graph import Phase, Role, StepGraph, require
from fsdp_compile.lower import region
from fsdp_compile.partition.partition import save_copies_of_updated_inputs
from tests import long
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Checkpointed, Frozen, Stack, StackOfThree
from tests.numerics.one_process.measure import batches
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import compile_eagerly, loss_of

ALIGNMENT_BYTES = 128


def _stored(tensors: Iterator[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors: padding counts, and views of one buffer count once."""
    locals_ = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in locals_}
    return sum(storages.values())


def _held_after_a_step() -> dict[str, int]:
    torch.manual_seed(0)
    model = Stack()
    full = sum(p.numel() * p.element_size() for p in model.parameters())
    compiled = compile_eagerly(model)
    optimizer = torch.optim.AdamW(model.parameters())
    (batch,) = batches(1, 4)
    loss_of(compiled(batch)).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    held = {"full": full, "count": len(gradients)}
    held["parameters"] = _stored(iter(model.parameters()))
    held["gradients"] = _stored(iter(gradients))
    optimizer.step()
    state = [t for s in optimizer.state.values() for k, t in s.items() if k != "step"]
    held["state"] = _stored(iter(state))
    held["slots"] = sum(1 for unit in units(model) for group in unit.groups for _ in group.params)
    return held


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_rank_holds_its_share(world_size: int) -> None:
    """1/N of the bytes, plus one padded row and the alignment of each parameter."""
    row = (3 * WIDTH + 1) * 4
    for held in run_ranks(_held_after_a_step, world_size=world_size):
        slack = held["slots"] * (ALIGNMENT_BYTES + row)
        assert held["count"] == held["slots"]
        assert held["parameters"] <= held["full"] / world_size + slack
        assert held["gradients"] <= held["full"] / world_size + slack
        assert held["state"] <= 2 * (held["full"] / world_size + slack)


class _Saved:
    """Bytes that autograd saves, by whether they are a parameter group, an activation, or something unsharded."""

    def __init__(self, model: nn.Module) -> None:
        self.shards = {group.flat.data_ptr() for unit in units(model) for group in unit.groups}
        self.full = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
        self.unsharded_bytes = 0
        self.count = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if tensor.data_ptr() not in self.shards and (
            tuple(tensor.shape) in self.full or tuple(reversed(tensor.shape)) in self.full
        ):
            self.unsharded_bytes += tensor.numel() * tensor.element_size()
        return tensor


def _saved_bytes(make: type[nn.Module], *, keep: bool) -> tuple[int, int]:
    model = fully_shard(make(), reshard_after_forward=not keep)
    compiled = compile_eagerly(model)
    (batch,) = batches(1, 7)  # no activation has the shape of a parameter
    saved = _Saved(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda t: t):
        loss = loss_of(compiled(batch))
    loss.backward()
    return saved.unsharded_bytes, saved.count


class _ReadInTwoRegions(nn.Module):
    """A parameter that is read in two checkpointed regions, which AC by itself would save between them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

    def _region(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self._region, x, use_reentrant=False)
        return x


@long.parametrize("make", [Stack, Checkpointed, _ReadInTwoRegions], always=[Checkpointed, _ReadInTwoRegions])
def test_no_unsharded_byte_is_saved_for_backward(make: type[nn.Module]) -> None:
    with fake_world(2):
        unsharded_bytes, count = _saved_bytes(make, keep=False)
    assert count > 0
    assert unsharded_bytes == 0


def test_unsharded_parameters_are_saved_on_request() -> None:
    with fake_world(2):
        unsharded_bytes, _ = _saved_bytes(Stack, keep=True)
    assert unsharded_bytes > 0


Sent = dict[str, list[str]]
"""Units that the graphs of a phase gather, free or reduce, one after the other; those of which the gather starts before
the one in front of it is waited for; those of its flat parameters and of their gradients; parameters that are reduced;
units of what backward finds saved; a phase once for each of its graphs."""


_ROLES = {
    "flats": Role.FLAT,
    "flat gradients": Role.FLAT_GRADIENT,
    "gathers": Role.GATHER,
    "reshards": Role.RESHARD,
    "reduces": Role.REDUCE,
}


@contextmanager
def each_graph(see: Callable[[StepGraph], object]) -> Iterator[None]:
    """Shows each graph that is compiled inside of it, after the passes."""

    class Watched(region.Region):
        def finish(self, gm: Any, phase: Phase, compile_graph: Any) -> Any:
            see(StepGraph(gm, phase))
            return super().finish(gm, phase, compile_graph)

    with mock.patch("fsdp_compile.backend.Region", Watched):
        yield


def sent(make: Callable[[], nn.Module], **options: Any) -> Sent:
    torch._dynamo.reset()
    seen: Sent = {"saved": []}

    def see(step: StepGraph) -> None:
        phase = step.phase.value
        seen["saved"] += [require(n).unit for n in step.nodes(Role.SAVED_PARAM)]
        seen.setdefault(f"{phase} graphs", []).append(phase)
        seen.update({f"{phase} {what}": [require(n).unit for n in step.nodes(role)] for what, role in _ROLES.items()})
        seen[f"{phase} reduced"] = [name for n in step.nodes(Role.REDUCE) for name in require(n).parameters]
        waits = {require(n).unit: n for n in reversed(list(step.nodes(Role.GATHER_WAIT)))}
        before = [(waits[require(one).unit], following) for one, following in pairwise(step.nodes(Role.GATHER))]
        seen[f"{phase} ahead"] = [require(n).unit for wait, n in before if n < wait]

    with each_graph(see):
        (batch,) = batches(1, 7)
        loss = loss_of(compile_eagerly(make(), **options)(batch))
        if loss.requires_grad:
            loss.backward()
    return seen


@pytest.fixture(scope="module")
def stack() -> Sent:
    with fake_world(2):
        return sent(StackOfThree, bucket_mb=0)


def _bottom_up() -> nn.Module:
    """The head is a parameter of the root's unit."""
    model = StackOfThree()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model, reshard_after_forward=True)


def test_one_graph_of_each_phase_has_one_flat_parameter_and_one_gradient_for_each_unit(stack: Sent) -> None:
    every = ["blocks.0", "blocks.1", "blocks.2", "head"]
    assert (stack["forward graphs"], stack["backward graphs"]) == (["forward"], ["backward"])
    assert sorted(stack["forward flats"]) == every
    assert sorted(stack["backward flats"]) == every
    assert stack["forward flat gradients"] == []
    assert sorted(stack["backward flat gradients"]) == every


def test_an_inference_graph_gathers_each_unit_and_frees_it_before_its_end() -> None:
    with fake_world(2), torch.no_grad():
        seen = sent(StackOfThree, bucket_mb=0, prefetch=1)
    assert "backward graphs" not in seen
    assert seen["forward gathers"] == ["blocks.0", "blocks.1", "blocks.2", "head"]
    assert seen["forward reshards"] == seen["forward gathers"]


def test_backward_gathers_each_unit_again_and_reduces_it_once(stack: Sent) -> None:
    with fake_world(2):
        checkpointed = sent(Checkpointed, prefetch=1)
        frozen = sent(Frozen, prefetch=0)
        bottom_up = sent(_bottom_up, bucket_mb=0)
    for seen, blocks in ((stack, ["blocks.0", "blocks.1", "blocks.2"]), (checkpointed, ["blocks.0", "blocks.1"])):
        assert seen["forward gathers"] == [*blocks, "head"]
        assert seen["backward gathers"] == ["head", *reversed(blocks)]
        assert seen["backward reduces"] == ["head", *reversed(blocks)]
        assert seen["forward reduces"] == []
    for phase in ("forward", "backward"):
        assert checkpointed[f"{phase} ahead"] == checkpointed[f"{phase} gathers"][1:]
        assert frozen[f"{phase} ahead"] == [], "prefetch=0"
    # The frozen first block is gathered, but not again: no gradient goes through it.
    assert frozen["forward gathers"] == ["blocks.0", "blocks.1", "blocks.2", "head"]
    assert frozen["backward gathers"] == ["head", "blocks.2", "blocks.1"]
    trained = {name for name, p in Frozen().named_parameters() if p.requires_grad and name != "unused"}
    assert len(frozen["backward reduced"]) == len(trained)
    assert set(frozen["backward reduced"]) == trained
    # The root's unit is one like any other, unless FSDP2's default keeps it for backward.
    for key in ("forward gathers", "forward reshards", "backward gathers", "backward reshards"):
        assert bottom_up[key] == ["(root)" if unit == "head" else unit for unit in stack[key]], key
        assert "(root)" in bottom_up[key], key


class _CheckpointedNorm(nn.Module):
    """Reads buffers in a checkpointed region that updates them: a batch norm's, and one of its own through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 5)
        self.register_buffer("mean", torch.zeros(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.normalize, x, use_reentrant=False))

    def in_one_process(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.normalize(x))

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.mean, torch.Tensor)
        y = self.norm(x - self.mean.view(-1)).sin()
        self.mean.mul_(0.9).add_(x.detach().mean(0)[:, None], alpha=0.1)
        return y


class _Counting(nn.Module):
    """Adds what it counts in a buffer, before a checkpointed region that reads the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(lambda y: y + self.shift, self.counted(x), use_reentrant=False))

    def in_one_process(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.counted(x) + self.shift)

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.count, torch.Tensor)
        for _ in range(2):
            self.count.add_(1)
            x = x.tanh() + 0.1 * self.count
        return x


class _Centered(nn.Module):
    """Subtracts a running mean, which it then moves; checkpoints nothing: the partitioner chooses what to save."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.mean, torch.Tensor)
        assert isinstance(self.scale, torch.Tensor)
        h = self.first(x)
        y = torch.sin(h - self.mean) * self.scale.clone()
        with torch.no_grad():
            self.mean.lerp_(h.detach().mean(0), 0.5)
            self.scale.mul_(1.5)
        return self.head(y)

    in_one_process = forward


_Kind = type[_CheckpointedNorm] | type[_Counting] | type[_Centered]


def _trained(kind: _Kind, lower: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients and buffers of two steps, compiled; and of one process that does not checkpoint."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, reference = kind(), kind()
    reference.load_state_dict(model.state_dict())
    compiled = compile_eagerly(model, lower=lower)
    for batch in batches(2, 4):
        loss_of(compiled(batch)).backward()
        loss_of(reference.in_one_process(batch)).backward()
    mine = [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]
    theirs = [p.grad for p in reference.parameters() if p.grad is not None]
    return [*mine, *model.buffers()], [*theirs, *reference.buffers()]


def _all_kinds(lower: str) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    return [_trained(kind, lower) for kind in (_CheckpointedNorm, _Counting, _Centered)]


@long.parametrize("lower", ["eager", "inductor"], always=["eager"])
def test_models_may_update_the_buffers_that_they_read(lower: str) -> None:
    (kinds,) = run_ranks(_all_kinds, lower, world_size=1)
    for mine, theirs in kinds:
        torch.testing.assert_close(mine, theirs)


def test_a_copy_has_one_name_in_both_graphs_also_where_backward_has_copies_of_its_own() -> None:
    forward, backward = fx.Graph(), fx.Graph()
    updated = forward.placeholder("primals_1")
    updated.meta["val"] = torch.ones(2, device="meta")
    doubled = forward.call_function(torch.ops.aten.mul.Tensor, (updated, 2))
    forward.call_function(torch.ops.aten.copy_.default, (updated, doubled))
    forward.output((doubled, updated))
    saved = backward.placeholder("primals_1")
    backward.output((backward.call_function(torch.ops.aten.clone.default, (saved,)),))

    save_copies_of_updated_inputs(forward, backward, 1)

    returned = forward.output_node().args[0]
    assert isinstance(returned, tuple)
    (found,) = backward.find_nodes(op="placeholder")
    assert isinstance(returned[1], fx.Node)
    assert found.name == returned[1].name != "primals_1"


_drawn: list[torch.Tensor] = []


@torch.library.custom_op("fsdp_test_partition::noisy", mutates_args=())
def _noisy(weight: torch.Tensor) -> torch.Tensor:
    _drawn.append(torch.randn(weight.shape))
    return weight + _drawn[-1]


@_noisy.register_fake
def _(weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(weight)


torch.library.register_autograd("fsdp_test_partition::noisy", lambda _ctx, grad: grad)


class _Noisy(nn.Module):
    """A weight that an operator of the user's adds noise to; nothing tells torch that it is random."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(torch.tanh(self.first(x)), _noisy(self.second.weight))


@on_ranks()
def test_operators_that_are_not_torchs_run_once() -> None:
    """How often the operator has run; gradients are those of its first run."""
    _drawn.clear()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model: Any = _Noisy()
    alone = copy.deepcopy(model)
    for part in (model.first, model.second, model):
        fully_shard(part)
    batch = torch.randn(4 * world, WIDTH).chunk(world)[rank]
    torch.manual_seed(1)  # the same noise on each rank, so that the second weight has one gradient
    compile_eagerly(model)(batch).square().mean().backward()
    nn.functional.linear(torch.tanh(alone.first(batch)), alone.second.weight + _drawn[0]).square().mean().backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(theirs.grad)
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad / world)
    assert len(_drawn) == 1
