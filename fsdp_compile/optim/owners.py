"""Owners: each sharded parameter is updated as a whole on one rank, to which the others send their parts.

    round 0    parts of parameters, gradients, state   ->  owners    one all-to-all
               each owner updates its parameters of the round
               parts of parameters and state          <-  owners    one all-to-all
    round 1    its parts are sent to the owners while those of round 0 are updated
    ...
    the end    every rank hears of the others what state there is now, and of errors; state of a form that it did not
               have before is sent last

Between steps nothing lives at an owner: state of any shape is a DTensor over the parameter's mesh. So it takes 1/N of
the memory on each rank, is saved and loaded like parameters are, and each step may choose other owners. With replicas
(HSDP), each row of the mesh updates its own share of the parameters and sends the results to the other rows.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_compile._torch.tensors import local_tensor, new_dtensor, tree_leaves, tree_map
from fsdp_compile.fsdp2.shards import is_number, union
from fsdp_compile.optim.flat_step import has_plain_memory
from fsdp_compile.optim.updates import Job, Updates

Cost = Callable[[torch.Size], float]
"""How long the update of a parameter of some shape takes, in any unit."""
Form = tuple[torch.Size, torch.dtype]
_ALIGNMENT = 16
"""Bytes to which parts are padded in a message: there a view of any dtype may begin."""
_ROUND_BYTES = 2**23
"""Of the parameters that one owner updates in a round, unless there is one that is larger."""


def matrix_cost(shape: torch.Size) -> float:
    """Multiplications in the product of a matrix and its transpose, which matrix optimizers compute again and again."""
    rows = shape[0] if len(shape) > 1 else shape.numel()
    return shape.numel() * min(rows, shape.numel() // max(rows, 1))


def shares_of(costs: Sequence[float], owners: int) -> list[list[int]]:
    """Divides jobs such that all owners take about as long: the longest first, each to the owner that has least."""
    loads = [(0.0, owner) for owner in range(owners)]
    shares: list[list[int]] = [[] for _ in range(owners)]
    for job in sorted(range(len(costs)), key=lambda job: -costs[job]):
        load, owner = heapq.heappop(loads)
        shares[owner].append(job)
        heapq.heappush(loads, (load + costs[job], owner))
    return shares


@dataclasses.dataclass(frozen=True)
class Split:
    """A tensor of which each rank has a part, as `Shard(dim)` splits it."""

    shape: torch.Size
    dtype: torch.dtype
    dim: int

    def parts(self, full: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
        """Views of the full tensor, the part of each rank."""
        rows = -(-self.shape[self.dim] // size)
        return full.tensor_split([rank * rows for rank in range(1, size)], self.dim)

    def forms(self, size: int) -> list[Form]:
        """Shapes and dtypes of the parts."""
        return [(part.shape, self.dtype) for part in self.parts(torch.empty(self.shape, device="meta"), size)]


@dataclasses.dataclass(frozen=True)
class _OnDevice:
    """A number on the device of a parameter, on its way to other ranks."""

    value: torch.Tensor


Shares = list[list[Job]]
"""The jobs of each rank of a row."""
Full = dict[int, list[torch.Tensor]]
"""Full tensors, by the number of their job."""


class Owners:
    """The ranks of a mesh, of which each updates some of the parameters on it.

    Args:
        mesh: Of one dimension, or of two: parameters are split over one, and alike over the other, of whose rows each
            updates some.
        across: The dimension over which they are split.
        device: Where they are.
        cost: By which parameters are divided among owners.
    """

    def __init__(self, mesh: DeviceMesh, across: int, device: torch.device, cost: Cost = matrix_cost) -> None:
        self._mesh, self._across, self._device, self._cost = mesh, across, device, cost
        self._size, self._rank = mesh.size(across), mesh.get_local_rank(across)
        self._group = mesh.get_group(across)
        self._along = 1 - across if mesh.ndim > 1 else None
        self._rows = 1 if self._along is None else mesh.size(self._along)
        self._row = 0 if self._along is None else mesh.get_local_rank(self._along)

    def _split(self, value: torch.Tensor, parameter: DTensor) -> Split:
        placement = _placements(value.shape, parameter)[self._across]
        assert isinstance(placement, Shard)
        return Split(value.shape, value.dtype, placement.dim)

    def run(self, jobs: Sequence[Job], updates: Updates) -> None:
        """Updates all parameters, each at its owner. All ranks of the mesh call it with the same jobs.

        Args:
            jobs: Their state becomes the new one, unless an update has failed.
            updates: For those that this rank owns, and what ranks tell one another of them in the end.
        """
        shares = shares_of([self._cost(job.parameter.shape) for job in jobs], self._rows * self._size)
        owned = [[jobs[number] for number in share] for share in shares]
        rows = [owned[row * self._size : (row + 1) * self._size] for row in range(self._rows)]
        rounds = _rounds(rows[self._row])
        outlines, late = self._update_all(rounds, updates)
        heard = union({**updates.said, **outlines}, [self._mesh])
        is_late = {job.number: self._set_state(job, heard.pop(("state", job.number), None)) for job in jobs}
        for each in rounds:
            remaining = [[job for job in share if is_late[job.number]] for share in each]
            if any(remaining):
                self._give_back(remaining, late, begin=1).finish()
        for row, share in enumerate(rows if self._along is not None else ()):
            self._tell_rows(row, [tensor for jobs in share for job in jobs for tensor in job.locals()])
        updates.hear(heard)

    def _update_all(self, rounds: list[Shares], updates: Updates) -> tuple[dict[Any, Any], Full]:
        """Returns outlines of the new state that this rank has made, and the tensors of state whose form is new."""
        outlines: dict[Any, Any] = {}
        late: Full = {}
        returning: _Transfer | None = None
        coming = self._fetch(rounds[0]) if rounds else None
        for number, here in enumerate(rounds):
            following = self._fetch(rounds[number + 1]) if number + 1 < len(rounds) else None
            assert coming is not None
            parts = zip(self._splits_of(here[self._rank]), *coming.finish(), strict=True)
            full = iter([torch.cat(each, split.dim) for split, *each in parts])
            results: Full = {}
            for job in here[self._rank]:
                values, gradient, old = next(full), next(full), [next(full) for _ in job.sharded()]
                results[job.number] = [values, *old]
                pieces = iter(old)
                state = tree_map(lambda leaf, i=pieces: next(i) if isinstance(leaf, DTensor) else leaf, job.state)
                with updates.guarded():
                    values, state = updates.update(job, values, gradient, state)
                    outline, made = self._outline(job, state)
                    pickle.dumps(outline)  # an error here is this rank's alone
                    outlines["state", job.number] = outline
                    if _splits(outline) == [self._split(leaf, job.parameter) for leaf in job.sharded()]:
                        results[job.number] = [values, *made]
                    else:
                        results[job.number][0], late[job.number] = values, made
            if returning is not None:
                returning.finish()
            returning, coming = self._give_back(here, results), following
        if returning is not None:
            returning.finish()
        return outlines, late

    def _fetch(self, shares: Shares) -> _Transfer:
        """Starts to send this rank's parts to their owners."""
        sent = [[local_tensor(each) for job in share for each in job.sent()] for share in shares]
        by_tensor = [split.forms(self._size) for split in self._splits_of(shares[self._rank])]
        by_rank = [[forms[rank] for forms in by_tensor] for rank in range(self._size)]
        return _Transfer(self._group, self._device, sent, by_rank)

    def _splits_of(self, jobs: Sequence[Job]) -> list[Split]:
        """Of all that an owner gets."""
        return [self._split(each, job.parameter) for job in jobs for each in job.sent()]

    def _give_back(self, shares: Shares, full: Full, *, begin: int = 0) -> _Transfer:
        """Starts to return full tensors from their owners, each rank's parts to it; from number `begin` of a job on."""
        sent: list[list[torch.Tensor]] = [[] for _ in range(self._size)]
        for job in shares[self._rank]:
            for like, value in zip([job.parameter, *job.sharded()][begin:], full[job.number], strict=True):
                for rank, part in enumerate(self._split(like, job.parameter).parts(value, self._size)):
                    sent[rank].append(part)
        targets = [[tensor for job in share for tensor in job.locals()[begin:]] for share in shares]
        forms = [[(tensor.shape, tensor.dtype) for tensor in each] for each in targets]
        return _Transfer(self._group, self._device, sent, forms, targets)

    def _outline(self, job: Job, state: dict[Any, Any]) -> tuple[dict[Any, Any], list[torch.Tensor]]:
        """State without the tensors that are sent by themselves, and these."""
        made: list[torch.Tensor] = []

        def outline(key: Any, leaf: Any) -> Any:
            if type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.device != self._device:
                return leaf
            leaf = leaf.detach()
            if leaf.dim() == 0 or is_number(key, leaf):
                return _OnDevice(leaf.cpu())
            made.append(leaf)
            return self._split(leaf, job.parameter)

        found = {key: tree_map(functools.partial(outline, key), value) for key, value in state.items()}
        return found, made

    def _set_state(self, job: Job, outline: dict[Any, Any] | None) -> bool:
        """Gives a job its new state; returns whether it is of a new form, so that its values are yet to come."""
        if outline is None:  # its update has failed
            return False
        before = job.sharded()
        is_known = _splits(outline) == [self._split(leaf, job.parameter) for leaf in before]
        known = iter(before)

        def value(leaf: Any) -> Any:
            if isinstance(leaf, _OnDevice):
                return leaf.value.to(self._device)
            if not isinstance(leaf, Split):
                return leaf
            if is_known:
                return next(known)
            shape, dtype = leaf.forms(self._size)[self._rank]
            local = torch.empty(shape, dtype=dtype, device=self._device)
            return new_dtensor(local, self._mesh, _placements(leaf.shape, job.parameter), leaf.shape)

        job.state = tree_map(value, outline)
        return not is_known

    def _tell_rows(self, row: int, tensors: list[torch.Tensor]) -> None:
        """Makes tensors on all rows those of one."""
        assert self._along is not None
        if not tensors:
            return
        forms = [(each.shape, each.dtype) for each in tensors]
        message = torch.empty(sum(itertools.starmap(_padded, forms)), dtype=torch.uint8, device=self._device)
        places = _views(message, forms)
        if row == self._row:
            _copy(tensors, places)
        dist.broadcast(message, group=self._mesh.get_group(self._along), group_src=row)
        if row != self._row:
            _copy(places, tensors)


def place_of(parameter: DTensor, state: dict[Any, Any]) -> tuple[DeviceMesh, int, torch.device] | None:
    """The first arguments of the `Owners` of a parameter with a gradient; `None` if it stays."""
    mesh, placements = parameter.device_mesh, parameter.placements
    split = [dim for dim, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    if mesh.ndim > 2 or len(split) != 1 or type(placements[split[0]]) is not Shard:
        return None
    if not has_plain_memory(parameter):
        return None
    sharded = [leaf for leaf in tree_leaves(state) if isinstance(leaf, DTensor)]
    if any(type(local_tensor(each)) is not torch.Tensor for each in sharded):
        return None
    if any((each.device_mesh, each.placements) != (mesh, _placements(each.shape, parameter)) for each in sharded):
        return None
    return mesh, split[0], local_tensor(parameter).device


def _placements(shape: torch.Size, parameter: DTensor) -> tuple[Placement, ...]:
    """Of state: those of its parameter, if that has the same shape; else it is split in its longest dimension."""
    own = tuple(parameter.placements)
    if shape == parameter.shape:
        return own
    longest = Shard(max(range(len(shape)), key=shape.__getitem__))
    return tuple(longest if placement.is_shard() else placement for placement in own)


def _splits(outline: Any) -> list[Split]:
    return [leaf for leaf in tree_leaves(outline) if isinstance(leaf, Split)]


def _rounds(row: Shares) -> list[Shares]:
    """The jobs of each rank of a row, in rounds."""
    found: list[Shares] = []
    for owner, jobs in enumerate(row):
        number, nbytes = 0, 0
        for job in jobs:
            more = job.parameter.numel() * job.parameter.element_size()
            if nbytes and nbytes + more > _ROUND_BYTES:
                number, nbytes = number + 1, 0
            nbytes += more
            while len(found) <= number:
                found.append([[] for _ in row])
            found[number][owner].append(job)
    return found


class _Transfer:
    """Lists of tensors on their way from each rank of a group to each other.

    Args:
        group: The ranks.
        device: Of the tensors.
        sent: This rank's, for each.
        forms: Of those that it gets, from each.
        targets: Where they are copied to.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        sent: Sequence[Sequence[torch.Tensor]],
        forms: Sequence[Sequence[Form]],
        targets: Sequence[Sequence[torch.Tensor]] = (),
    ) -> None:
        self._targets = targets
        sizes = [sum(_padded(tensor.shape, tensor.dtype) for tensor in each) for each in sent]
        self._sent = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        tensors = [tensor for each in sent for tensor in each]
        _copy(tensors, _views(self._sent, [(tensor.shape, tensor.dtype) for tensor in tensors]))
        theirs = [sum(itertools.starmap(_padded, each)) for each in forms]
        received = torch.empty(sum(theirs), dtype=torch.uint8, device=device)
        self._received = [_views(part, each) for part, each in zip(received.split(theirs), forms, strict=True)]
        # Read when it is waited for: until then both messages have to stay.
        self._work = dist.all_to_all_single(received, self._sent, theirs, sizes, group=group, async_op=True)

    def finish(self) -> list[list[torch.Tensor]]:
        """Waits for the tensors; those with targets are there then."""
        self._work.wait()
        for tensors, targets in zip(self._received, self._targets, strict=False):
            _copy(tensors, targets)
        return self._received


def _padded(shape: torch.Size, dtype: torch.dtype) -> int:
    return -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _views(message: torch.Tensor, forms: Sequence[Form]) -> list[torch.Tensor]:
    """The tensors in a message."""
    parts = zip(message.split(list(itertools.starmap(_padded, forms))), forms, strict=True)
    return [part[: shape.numel() * dtype.itemsize].view(dtype).view(shape) for part, (shape, dtype) in parts]


def _copy(sources: Iterable[torch.Tensor], targets: Iterable[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
