"""Whether all ranks shard the same values.

Each rank keeps its part of its own copy of the model. Copies that differ, as those of scripts that seed by rank and
rely on DDP's broadcast, would be mixed to a model that no rank has made. So parameters are hashed while they are full,
and the hashes compared before the first forward: values that were loaded in between count no more.
"""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.tensors import is_wrapper, local_tensor, wrapped_by
from fsdp_compile.comm import groups
from fsdp_compile.comm.exchange import all_reduce_max, wire_of
from fsdp_compile.errors import RankMismatchError
from fsdp_compile.runtime.module_state import ParamOwner
from fsdp_compile.runtime.units import FSDPUnit, ModelState
from fsdp_compile.sharding import same_settings
from fsdp_compile.sharding.arguments import InitFrom

_CHUNK = 2**20
_FACTOR = 6364136223846793005  # odd, so that no bit is lost in a product
_PLAIN = (torch.Tensor, nn.Parameter)


@dataclasses.dataclass(frozen=True)
class _InitialParam:
    """A parameter as it was sharded.

    Attributes:
        owner: A module that has it, as `attribute`. No reference to the parameter, which could not be swapped then.
        full: Hash of this rank's full value, if it had one.
        own: Hash of the part that this rank keeps: another one later means that the parameter was written.
    """

    name: str
    owner: weakref.ref[nn.Module]
    attribute: str
    full: torch.Tensor | None
    own: torch.Tensor | None

    def unchanged(self) -> torch.Tensor | None:
        """The hash of the full value; `None` if the parameter was written since."""
        owner = self.owner()
        own = None if owner is None else _hash_of_part(owner._parameters.get(self.attribute))
        if own is None or self.own is None or not torch.equal(own, self.own.to(own.device)):
            return None
        return self.full


@dataclasses.dataclass(frozen=True)
class _Difference:
    """A value that `first`, the first rank of a mesh, and other ranks have differently."""

    name: str
    first: int
    others: list[int]


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """What one call of `fully_shard` is going to compare; it must not keep the model alive.

    Attributes:
        number: Of the call, among those that shard over the group.
    """

    mesh: DeviceMesh
    number: int
    initial: list[_InitialParam]
    buffers: list[tuple[str, weakref.ref[nn.Module], str]]

    def run(self) -> None:
        """Compares; raises `RankMismatchError` on all ranks if two of them differ."""
        if not self.initial and not self.buffers:
            return
        held = {name: (m, attribute) for name, ref, attribute in self.buffers if (m := ref()) is not None}
        buffers = {name: hash_of(module._buffers.get(attribute)) for name, (module, attribute) in held.items()}
        hashes = {**{each.name: each.unchanged() for each in self.initial}, **buffers}
        _refuse_different_calls([str(self.number), *hashes], self.mesh)
        found = _first_difference(hashes, self.mesh)
        if found is None:
            return
        kind = "buffer" if found.name in buffers else "parameter"
        raise RankMismatchError(
            f"ranks start with different values of a {kind}, and each rank would keep what it has of its own",
            where=f"{found.name}, on rank {found.first} and rank {', '.join(map(str, found.others))}",
            instead="torch.manual_seed() with the same seed on every rank before the model is made, or the same "
            "checkpoint on every rank; or sync_module_states=True, an argument of fully_shard() and an option of "
            "torch.compile(model, backend='fsdp', options={...}), which takes the first rank's values, as DDP does",
        )


@dataclasses.dataclass(frozen=True)
class InitialValues:
    """The values that one call of `fully_shard` found on this rank.

    Attributes:
        full: Hashes of the full parameters, by name and first place.
        buffers: Name, module and attribute of each buffer that has a value and is saved in checkpoints.
    """

    mesh: DeviceMesh
    full: dict[tuple[str, ParamOwner], torch.Tensor | None]
    buffers: list[tuple[str, weakref.ref[nn.Module], str]]

    def note(self, made: Iterable[FSDPUnit], model: ModelState) -> None:
        """Has the values compared before the first forward of the model, now that they are sharded."""
        made = [unit for unit in made if unit.policy.mesh == self.mesh]
        if self.mesh.size() == 1:
            return
        place = next((groups.rank_store(param.spec.group) for unit in made for param in unit.params), None)
        number = 0 if place is None else next(place.sharding_calls)
        params = {param.module_refs[0]: param for unit in made for param in unit.params}
        initial = [
            _InitialParam(name, weakref.ref(place[0]), place[1], full, hash_of(params[place].sharded_view))
            for (name, place), full in self.full.items()
        ]
        model.before_next_forward.append(_Comparison(self.mesh, number, initial, self.buffers).run)


def take(
    root: nn.Module,
    parameters: Iterable[tuple[str, ParamOwner, nn.Parameter]],
    mesh: DeviceMesh,
    source: InitFrom,
    ignored: Iterable[nn.Module],
) -> InitialValues:
    """Hashes what is about to be sharded; nothing where other values are going to count.

    Args:
        root: The module of the call.
        parameters: Name, place and full value of each parameter that will be sharded.
        mesh: The ranks.
        source: Whose values count.
        ignored: Modules whose buffers each rank may have of its own.
    """
    if source is not InitFrom.EACH_RANK or mesh.size() == 1:
        return InitialValues(mesh, {}, [])
    full = {(name, place): hash_of(_own_value(parameter)) for name, place, parameter in parameters}
    apart = {part for module in ignored for part in module.modules()}
    buffers = [(name, weakref.ref(owner), attribute) for name, owner, attribute in _saved_buffers(root, apart)]
    return InitialValues(mesh, full, buffers)


def compare(model: ModelState) -> None:
    """Compares what was hashed with the other ranks, once; all ranks of the mesh call it together.

    Raises:
        RankMismatchError: On all ranks, if two of them were sharded with different values, or in different ways.
        RankFailedError: If a rank does not come, or fails meanwhile.
    """
    if model.before_next_forward:
        # Through the store, where this rank hears of one that fails in its first compile.
        same_settings.compare(model)
    while model.before_next_forward:
        model.before_next_forward[0]()
        del model.before_next_forward[0]


def _saved_buffers(root: nn.Module, apart: set[nn.Module]) -> Iterator[tuple[str, nn.Module, str]]:
    # Others are caches and the like, whose memory may be uninitialized. What is on meta gets its value later, as
    # parameters on meta do, maybe behind those of uneven shards, which draw different amounts of random numbers.
    for path, module in root.named_modules():
        own = module._buffers.items() if module not in apart else ()
        for attribute, buffer in own:
            has_value = buffer is not None and not buffer.is_meta
            if has_value and attribute not in module._non_persistent_buffers_set:
                yield f"{path}.{attribute}".removeprefix("."), module, attribute


def _own_value(parameter: nn.Parameter) -> torch.Tensor:
    return local_tensor(parameter) if isinstance(parameter, DTensor) else parameter


def _hash_of_part(parameter: object) -> torch.Tensor | None:
    return hash_of(local_tensor(parameter)) if isinstance(parameter, DTensor) else None


def hash_of(value: torch.Tensor | None) -> torch.Tensor | None:
    """A number of 62 bits that stands for the bits of a tensor, on its device; `None` for one without plain memory.

    Of a class that wraps tensors, it stands for those.
    """
    if value is not None and is_wrapper(value):
        return _hash_of_parts(wrapped_by(value))
    if value is None or type(value) not in _PLAIN or value.is_meta or value.layout is not torch.strided:
        return None
    with torch.no_grad():
        words = _words(value.detach().resolve_conj().resolve_neg())
        result = torch.zeros((), dtype=torch.int64, device=value.device)
        places = torch.arange(min(_CHUNK, words.numel()), dtype=torch.int64, device=value.device)
        factors = (2 * places + 1) * _FACTOR
        # Integers are added exactly, in any order, and so are the same on every rank; chunks bound the memory.
        for chunk in words.split(_CHUNK):
            result = result * _FACTOR + (chunk * factors[: chunk.numel()]).sum() + chunk.numel()
        return (result ^ (result >> 32)) & (2**62 - 1)


def _hash_of_parts(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    hashes = [hash_of(part) for part in parts]
    known = [each for each in hashes if each is not None]
    if not known or len(known) < len(hashes):
        return None
    with torch.no_grad():
        return hash_of(torch.stack([each.to(known[0].device) for each in known]))


def _words(value: torch.Tensor) -> torch.Tensor:
    octets = value.reshape(-1).contiguous().view(torch.uint8)
    if octets.numel() % 8:
        return octets
    return (octets.clone() if octets.storage_offset() % 8 else octets).view(torch.int64)


def _first_difference(hashes: dict[str, torch.Tensor | None], mesh: DeviceMesh) -> _Difference | None:
    """The first name for which all ranks have a hash, and not the same."""
    wire = wire_of(mesh)
    mine = torch.tensor([0 if h is None else h.item() for h in hashes.values()], dtype=torch.int64, device=wire)
    missing = torch.tensor([h is None for h in hashes.values()], dtype=torch.int64, device=wire)
    # One reduction finds the largest and the smallest hash, and what some rank has none of.
    bounds = torch.stack([mine, -mine, missing])
    all_reduce_max(bounds, mesh)
    differing = ((bounds[0] != -bounds[1]) & (bounds[2] == 0)).nonzero().flatten().tolist()
    if not differing:
        return None
    ranks = mesh.mesh.flatten().tolist()
    of_ranks = torch.full((len(ranks),), -1, dtype=torch.int64, device=wire)
    of_ranks[ranks.index(mesh.get_rank())] = mine[differing[0]]
    all_reduce_max(of_ranks, mesh)
    first, *others = zip(ranks, of_ranks.tolist(), strict=True)
    return _Difference(list(hashes)[differing[0]], first[0], [rank for rank, found in others if found != first[1]])


def _refuse_different_calls(call: Sequence[str], mesh: DeviceMesh) -> None:
    """Refuses ranks that compare different calls of `fully_shard`: its number, and names of parameters and buffers."""
    digest = int.from_bytes(hashlib.sha256("\n".join(call).encode()).digest()[:7], "big")
    bounds = torch.tensor([digest, -digest], device=wire_of(mesh))
    all_reduce_max(bounds, mesh)
    if bounds[0].item() != -bounds[1].item():
        raise RankMismatchError(
            "ranks run different modules, or hold parameters or buffers of different names",
            where=f"the first forward; on this rank of {', '.join(call[1:4])}{' ...' * (len(call) > 4)}",
            instead="the same model and the same control flow on every rank; a module that has no rows on a rank is "
            "called there all the same, with an empty tensor",
        )
