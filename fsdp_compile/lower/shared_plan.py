"""One plan for all ranks: that of the first rank, which the others follow where their own is another one.

    compiled for the first time      all compare what they read, and what they plan, with the first rank, whose plan is
                                     followed where another one differs
    compiled again, for other sizes  nobody waits: the rank follows the plan that was noted for these reads

Ranks have to read and reduce the same parameters: else all get an error. Plans may differ where they are made with
times, since each rank estimates them for the sizes of its own batch. A rank that compiles again for a size that the
others have not met has to run the collectives of the graphs that they have. So a process notes each plan under what its
program reads and reduces, and takes the first one that a later graph with the same reads can follow: the n-th
comparison has to be of the same graphs on every rank of a group. The order in which the program reads has to be the
same; that in which its graphs do need not be, since AOTAutograd may order them by sizes.

On a mesh of replicas and shards, ranks compare in one dimension after the other: the plan is that of the mesh's first
rank. A rank that refuses to compile (its batch is larger, and does not fit a budget) reports that in place of the first
comparison, since the others would wait for it. Later it may be the only one that compiles, and go on with a graph that
it has.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import fx

from fsdp_compile.comm import groups
from fsdp_compile.comm.groups import RankStore
from fsdp_compile.comm.rendezvous import RefusedElsewhereError, Rendezvous, digest_of
from fsdp_compile.errors import FSDPCompileError, RankFailedError, RankMismatchError
from fsdp_compile.ir.calls import group_of, line_of, natural, numbered, starts_of
from fsdp_compile.ir.graph import Phase, Record, Role, StepGraph, record_of, require
from fsdp_compile.ir.queries import TEXT_POSITION, read_text
from fsdp_compile.layout.spec import Reshard, parse
from fsdp_compile.options import FSDPOptions
from fsdp_compile.passes.follow_order import CannotFollowError

_OPTIONS = ("prefetch", "reduce_layout", "bucket_mb", "embedding")
"""Options on which all ranks' collectives depend alike."""
_SETTINGS = (
    *("offset", "extent", "dim", "replicas", "param_dtype", "gather_format", "reduce_dtype", "reshard"),
    *("post_forward_size", "divide", "grad_placement", "forward_prefetch", "backward_prefetch"),
)
"""What decides of a read which messages a rank sends, and when; names of groups and hooks are a rank's own."""

Lines = tuple[str, ...]
"""The collectives of forward and backward, as `ir.calls.line_of` writes them."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """What ranks compare of the graphs of a compile.

    Attributes:
        read: What the program reads, in its order.
        inserted: Their collectives as the program reads: one for each parameter, before any plan.
        planned: Their collectives as they will run.
        groups: The aliases of the process groups of these.
        shared: Options by name, that have to be the same on all ranks.
    """

    read: Lines
    inserted: Lines
    planned: Lines
    groups: frozenset[str] = frozenset()
    shared: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, steps: Sequence[StepGraph], read: Lines, inserted: Mapping[Phase, Lines]) -> Compared:
        """Describes transformed graphs, the forward first."""
        starts = [node for step in steps for node in starts_of(step)]
        # A pipeline that was told to stop early has inserted nothing, and has nothing to plan.
        lines = (line for step in steps for line in inserted.get(step.phase, ()))
        return cls(read, tuple(lines), tuple(map(line_of, starts)), frozenset(map(group_of, starts)))

    @property
    def needs(self) -> tuple[Mapping[str, str], Lines, list[str]]:
        """What has to be the same on all ranks."""
        return self.shared, _numbered(self.read), sorted(_numbered(self.inserted))

    @property
    def digest(self) -> str:
        """Stands for it where ranks compare."""
        return digest_of(json.dumps([self.needs, _numbered(self.planned)]))

    @property
    def text(self) -> str:
        """What a rank that differs gets."""
        return json.dumps([self.read, self.inserted, self.planned, self.shared])

    @classmethod
    def of_text(cls, text: str) -> Compared:
        """Reads `text` of another rank."""
        read, inserted, planned, shared = json.loads(text)
        return cls(tuple(read), tuple(inserted), tuple(planned), shared=shared)


Follow = Callable[[Lines], Compared]
"""Transforms the graphs again, so that their collectives are some lines; nothing changes if it raises."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What else plans depend on.

    Attributes:
        shared: Options by name, that have to be the same on all ranks.
        own: Stands for what may differ between ranks: graphs that read alike have a plan for each.
        can_follow: Whether graphs are planned for the sizes of this rank, and nothing is promised that another order
            breaks.
    """

    shared: Mapping[str, str]
    own: str
    can_follow: bool

    @classmethod
    def of(cls, options: FSDPOptions, records: Iterable[Record]) -> Settings:
        """Those of a compile that reads the parameter groups of some records."""
        shared = {name: repr(getattr(options, name)) for name in _OPTIONS}
        shared["memory_budget_gb"] = "None" if options.memory_budget_gb is None else "a budget"
        cluster = options.planned_for.cluster if options.planned_for is not None else None
        shared["hardware"] = "" if cluster is None else f"measured times {cluster.digest[:16]}"
        budget = (options.memory_budget_gb, options.activations)
        own = repr([options.lower, options.stop_after, options.planned_for, budget, torch.is_grad_enabled()])
        specs = (spec for record in records for spec in record.specs)
        asks = any(s.reshard is Reshard.AUTO or s.forward_prefetch or s.backward_prefetch for s in specs)
        promises = options.memory_budget_gb is not None
        return cls(shared, own, options.prefetch == "auto" and not promises and not asks)


def settle(graphs: Compared, follow: Follow, settings: Settings) -> None:
    """Makes the graphs of a compile, transformed by this rank's own plan, those that the other ranks run.

    `follow` is called if they have to follow another plan.

    Raises:
        RankMismatchError: On every rank of a group, if two of them read otherwise, or one cannot follow.
        RefusedElsewhereError: If a rank has refused to compile as many graphs; all may try again.
        RankFailedError: If a rank does not compile as many graphs in time, or the store fails.
    """
    places = _places(graphs.groups)
    if not places:
        return
    graphs, may_follow = dataclasses.replace(graphs, shared=settings.shared), follow if settings.can_follow else None
    key = digest_of(json.dumps([settings.own, graphs.needs]))
    known = places[0].plans.get(key, [])
    if _takes_known(known, graphs.planned, may_follow):
        return
    rounds = [(place.rendezvous(), next(place.compiles)) for place in places]
    try:
        agreed = _exchange(rounds, graphs, may_follow)
    except RefusedElsewhereError as error:
        for room, number in rounds:
            if room.name != error.heard_in:  # else all of its ranks hear of it
                room.refuse(number, error)
        raise
    except FSDPCompileError as error:
        # This ends the comparisons of all groups of this rank, and so on: no rank waits for one that has failed.
        for each in groups.rank_stores():
            each.rendezvous().tell(error)
        raise
    for place in places:
        place.plans.setdefault(key, []).append(_numbered(agreed))


def _takes_known(known: Sequence[Lines], mine: Lines, follow: Follow | None) -> bool:
    """Follows the first known plan that the graphs can follow; of another program that reads alike, they cannot."""
    if follow is None:
        return _numbered(mine) in known
    for plan in known:
        if plan == _numbered(mine):
            return True
        try:
            follow(plan)
        except CannotFollowError:
            continue
        return True
    return False


def _exchange(rounds: Sequence[tuple[Rendezvous, int]], mine: Compared, follow: Follow | None) -> Lines:
    """Takes the plan of the first rank of each group in turn, and waits until all ranks have done so."""
    shown = mine
    for room, number in rounds:
        text = room.first(number, shown.digest, shown.text)
        if text is None:
            continue
        first = Compared.of_text(text)
        if first.needs != shown.needs or follow is None:
            raise _mismatch(room.ranks, first, room.rank, shown)
        shown = dataclasses.replace(mine, planned=first.planned)
        last = room
    if follow is not None and _numbered(shown.planned) != _numbered(mine.planned):
        with suppress(CannotFollowError):
            mine = dataclasses.replace(mine, planned=follow(_numbered(shown.planned)).planned)
        if _numbered(shown.planned) != _numbered(mine.planned):
            raise _mismatch(last.ranks, shown, last.rank, mine)
    for room, number in rounds:
        room.meet(number)
    return shown.planned


def _mismatch(ranks: tuple[int, ...], one: Compared, rank: int, other: Compared) -> RankMismatchError:
    """Names what the first rank of a group and another one, by its number in the group, have differently."""
    first, second = ranks[0], ranks[rank]
    names = [name for name in {**one.shared, **other.shared} if one.shared.get(name) != other.shared.get(name)]
    if names:
        on_first, on_other = (", ".join(f"{name}={each.shared.get(name)}" for name in names) for each in (one, other))
        return RankMismatchError(
            f"rank {first} and rank {second} compile with different options",
            where=f"options: {on_first} on rank {first}, {on_other} on rank {second}",
            instead="the same options of torch.compile() on every rank; one file of measured times for all hosts",
        )
    mine, others, hint = one.inserted, other.inserted, ""
    if one.needs == other.needs:
        mine, others = one.planned, other.planned
        hint = "; or, if batches have other sizes, options={'prefetch': 1}, whose plan does not depend on them"
    elif mine == others:
        mine, others = one.read, other.read
    pairs = zip(_numbered(mine), _numbered(others), strict=False)
    number = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(others)))
    one_at, other_at = (f"[{lines[number]}]" if number < len(lines) else "nothing more" for lines in (mine, others))
    return RankMismatchError(
        f"rank {first} and rank {second} compile different collectives",
        where=f"collective {number + 1}: {one_at} on rank {first}, {other_at} on rank {second}",
        instead="the same control flow on every rank: which parameters are read, and in which order, must not depend "
        "on a rank's number or data; a module that has no rows on a rank is called there all the same, with an empty "
        "tensor; a rank whose whole batch is empty needs lower='eager', or a row whose loss is multiplied by 0: "
        f"Inductor computes nothing of an empty input, and reads fewer parameters{hint}",
    )


def _numbered(lines: Lines) -> Lines:
    """The lines of each phase with numbers for names: layers that share a graph have the names of one of them."""
    return tuple(line for phase in Phase for line in numbered(list(lines_of(phase, lines))))


def lines_of(phase: Phase, lines: Lines) -> Lines:
    """Those of one graph."""
    return tuple(line for line in lines if line.startswith(f"{phase.value}:"))


def _places(aliases: Iterable[str]) -> list[RankStore]:
    """Where the ranks of some groups meet, without groups that are a part of another one."""
    found: dict[tuple[int, ...], RankStore] = {}
    for alias in sorted({*aliases}, reverse=True):  # groups of shards come before those of replicas
        if (place := groups.rank_store(alias)) is not None:
            found.setdefault(place.ranks, place)
    return [place for ranks, place in found.items() if not any({*ranks} < {*other} for other in found)]


def read_in(graph: fx.Graph) -> Lines:
    """What a graph of AOTAutograd's reads, which nothing has ordered yet: each parameter where it is read first."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        record = record_of(node.all_input_nodes[0]) if node.target in TEXT_POSITION else None
        if record is not None and record.role is Role.FLAT:
            spec = parse(read_text(node))
            name = record.parameters[[each.offset for each in record.specs].index(spec.offset)]
            found[f"{Phase.FORWARD.value}: read of {name} ({'x'.join(map(str, spec.shape))})"] = None
    return tuple(found)


def inserted_in(step: StepGraph) -> Lines:
    """The collectives of a graph that has one for each parameter, with all that plans without times depend on."""
    units = sorted({require(node).unit for node in starts_of(step)}, key=natural)
    found = []
    for node in starts_of(step):
        settings = (f"{name}={getattr(spec, name)}" for spec in require(node).specs for name in _SETTINGS)
        found.append(f"{line_of(node)} of unit {units.index(require(node).unit)} with {' '.join(settings)}")
    return tuple(found)


def refuse(flats: Iterable[Record], error: FSDPCompileError) -> None:
    """Tells the ranks that compile the same as this one that it does not."""
    if isinstance(error, RankMismatchError | RankFailedError):
        return  # all ranks know already
    specs = [spec for record in flats for spec in record.specs]
    for place in _places(a for s in specs for a in (s.group, s.replicate_group, s.post_forward_group, s.reduce_group)):
        # Only ranks that have noted no plan yet all have to compile. A refusal counts as a round: ranks that compile
        # nothing would find it in their next round, in which this rank takes no part.
        if not place.plans:
            place.rendezvous().refuse(next(place.compiles), error)
