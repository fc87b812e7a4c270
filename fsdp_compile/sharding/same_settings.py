"""Whether all ranks shard in the same way: compared through the store, before the first collective of a model.

Ranks that gather a parameter in other dtypes, at other times or in other layouts would send messages that do not fit
each other: errors of the backend that name nothing, ranks that wait, or wrong numbers.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator

import torch

from fsdp_compile.comm import groups
from fsdp_compile.comm.groups import RankStore
from fsdp_compile.comm.rendezvous import Difference, digest_of
from fsdp_compile.errors import FSDPCompileError, RankMismatchError
from fsdp_compile.runtime.units import FSDPParamGroup, ModelState

_FIELDS = (
    *("shape", "dim", "size", "replicas", "param_dtype", "gather_format", "reduce_dtype", "reshard"),
    *("post_forward_size", "divide", "grad_placement", "forward_prefetch", "backward_prefetch", "extent", "offset"),
)
"""What of a spec decides which messages a rank sends, and when. Names of groups and hooks are a rank's own."""


def compare(model: ModelState) -> None:
    """Compares versions and settings within each group of ranks that shares parameters of a model, which all call it.

    Raises:
        RankMismatchError: On all ranks of a group, if two of them differ.
        RankFailedError: If a rank does not come in time, or fails meanwhile.
    """
    for place, lines in _described(model).items():
        text = "\n".join(lines)
        room = place.rendezvous("begin its first forward")
        try:
            difference = room.compare(f"first/{next(place.comparisons)}", digest_of(text), text)
        except FSDPCompileError as error:
            _tell(groups.rank_stores(), error)
            raise
        if difference is not None:
            mismatch = _mismatch(place.ranks, difference)
            # The ranks of this place have the error, and may go on with another model.
            _tell([each for each in groups.rank_stores() if not {*each.ranks} <= {*place.ranks}], mismatch)
            raise mismatch


def _tell(places: Iterable[RankStore], error: FSDPCompileError) -> None:
    """Ends all waiting in some places: no rank waits for one that has failed."""
    for place in places:
        place.rendezvous().tell(error)


def _described(model: ModelState) -> dict[RankStore, list[str]]:
    """For each group of ranks, what they have in common: versions, and the parameters that they share."""
    described: dict[RankStore, list[str]] = {}
    versions = _versions()
    for group in (group for unit in model.units for group in unit.param_groups):
        compared = group.compared
        for place in () if compared is None else (compared.shard, compared.replicate):
            if place is not None:
                described.setdefault(place, versions.copy()).extend(_lines(group, place))
    return described


def _versions() -> list[str]:
    try:
        own = importlib.metadata.version("fsdp-compile")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed, but imported from its sources"
    # Without the build: ranks of one version of torch may have others.
    return [f"version of torch: {torch.__version__.partition('+')[0]}", f"version of fsdp_compile: {own}"]


_UNIT = "unit number"
"""Begins a line by which ranks know that they run the same unit: those of a group number what they shard alike."""


def _lines(group: FSDPParamGroup, place: RankStore) -> Iterator[str]:
    yield f"{_UNIT} {group.unit.numbers[place]} ({group.unit.title})"
    for param in group.params:
        name = group.unit.parameter_name(param)
        yield f"{name}: dtype {param.parameter.dtype}"
        yield f"{name}: reduced by {'a hook' if param.spec.hook else 'an average'}"
        yield from (f"{name}: {field} {getattr(param.spec, field)}" for field in _FIELDS)


def _mismatch(ranks: tuple[int, ...], found: Difference) -> RankMismatchError:
    _, mine, others = found.parting()
    other = ranks[found.other]
    if mine.startswith(_UNIT) and others.startswith(_UNIT):
        return RankMismatchError(
            f"rank {ranks[0]} and rank {other} run different modules",
            where=f"[{mine}] on rank {ranks[0]}, [{others}] on rank {other}",
            instead="the same model and the same control flow on every rank; a module that has no rows on a rank is "
            "called there all the same, with an empty tensor",
        )
    return RankMismatchError(
        f"rank {ranks[0]} and rank {other} shard a model differently",
        where=f"[{mine}] on rank {ranks[0]}, [{others}] on rank {other}",
        instead="the same versions, the same model, and the same arguments of fully_shard() and options of "
        "torch.compile() on every rank",
    )
