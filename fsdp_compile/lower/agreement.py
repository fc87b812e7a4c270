"""All ranks of a group must run the same collectives: compared through the store when they compile.

    compiled for the first time      every rank compares; if plans differ, all follow that of the group's first rank
    compiled again, for other sizes  nobody waits: the rank follows the plan that was agreed on

What a program reads, and in which order, has to be the same on all ranks: else all get an error. A plan may differ
where it is made with times, since each rank estimates them for the sizes of its own batch. Batches differ, so one rank
may compile again for a size that the others have not met; its collectives must be those of the graphs that they have,
or the ranks would hang. So there is one plan for each order in which graphs read, and a rank takes part in a comparison
only when it compiles a graph that reads in an order that is new to it: the n-th such comparison has to be of the same
graph on every rank of a group.

A rank that refuses to compile (its batch is larger, and does not fit a budget) reports that in place of the first
comparison, since the others would wait for it. Later it may be the only one that compiles, and go on with a graph that
it has.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import fx

from fsdp_compile.comm import groups
from fsdp_compile.comm.rendezvous import Difference, RefusedElsewhereError, digest_of
from fsdp_compile.errors import FSDPCompileError, RankFailedError, RankMismatchError
from fsdp_compile.ir.calls import group_of, line_of, names_in, natural, numbered, starts_of
from fsdp_compile.ir.graph import Phase, Record, StepGraph, require

_SPECS = " with "
"""What follows in the line of a collective as it was inserted: how its parameters are gathered and reduced."""
_OTHER_SIZES = "; or, if batches have other sizes, options={'prefetch': 1}, whose plan does not depend on them"

Collectives = Sequence[tuple[str, str]]
"""The collectives of a graph in its order: the alias of its process group, and its line."""
Order = tuple[str, ...]
"""The lines of all collectives of a graph, as `ir.calls.numbered` writes them."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """What ranks compare of one graph.

    Attributes:
        inserted: Its collectives as the program reads: one for each parameter, before any plan.
        planned: Its collectives as they will run.
    """

    inserted: Collectives
    planned: Collectives


@dataclasses.dataclass(frozen=True)
class Settings:
    """What else plans depend on.

    Attributes:
        shared: Options by name, that have to be the same on all ranks.
        own: Stands for what may differ between ranks: graphs that read alike have a plan for each.
        measured: Stands for the measured times that graphs were planned with; empty if there are none.
        can_follow: Whether graphs were planned for the sizes of this rank, and could be planned in another order.
    """

    shared: Mapping[str, str]
    own: str
    measured: str
    can_follow: bool

    @property
    def text(self) -> str:
        """What has to be the same on all ranks."""
        return json.dumps([self.measured, self.shared])


class OtherPlanError(RankMismatchError):
    """The ranks have agreed on another plan than this rank's.

    Attributes:
        orders: That of each graph concerned.
        is_known: Whether all of them were agreed on in earlier compiles, so that no rank waits for this one.
    """

    def __init__(self, orders: Mapping[Phase, Order], *, is_known: bool) -> None:
        self.orders = orders
        self.is_known = is_known
        super().__init__(
            "this rank has planned other orders of its collectives than the other ranks",
            where=f"the {' and the '.join(phase.value for phase in orders)} graph",
            instead="options={'prefetch': 1}, whose plan does not depend on the sizes of a rank's batch",
        )


def agree(graphs: Mapping[Phase, Compared], settings: Settings) -> None:
    """Compares the transformed graphs of a compile with those that the other ranks of their groups compile.

    Raises:
        OtherPlanError: If the graphs could follow another plan, and have to.
        RankMismatchError: On every rank of a group, if two of them differ.
        RefusedElsewhereError: If a rank has refused to compile as many graphs; all may try again.
        RankFailedError: If a rank does not compile as many graphs in time, or the store fails.
    """
    other: dict[Phase, Order] = {}
    are_known = []
    for phase, graph in graphs.items():
        mine, known = _order(graph.planned), _known(graph, settings)
        if mine in known:
            continue
        are_known.append(bool(known) and settings.can_follow)
        agreed = known[0] if are_known[-1] else _agreed(graph, settings)
        if agreed != mine:
            other[phase] = agreed
    if other:
        raise OtherPlanError(other, is_known=all(are_known))


def _places(graph: Compared) -> dict[str, groups.RankStore]:
    return {alias: place for alias, _ in graph.inserted if (place := groups.rank_store(alias)) is not None}


def _key(graph: Compared, settings: Settings) -> str:
    return _digest([settings.text, settings.own, *(line for _, line in graph.inserted)])


def _known(graph: Compared, settings: Settings) -> list[Order]:
    """What ranks have agreed on for graphs that read like this one; its own plan where no others are there."""
    places = _places(graph)
    return next((place.plans.get(_key(graph, settings), []) for place in places.values()), [_order(graph.planned)])


def _agreed(graph: Compared, settings: Settings) -> Order:
    """Agrees with the other ranks on the order of a graph's collectives."""
    places, key = _places(graph), _key(graph, settings)
    with telling_all():
        for alias, place in places.items():
            graph = dataclasses.replace(graph, planned=_compare(place, alias, graph, settings))
    agreed = _order(graph.planned)
    for place in places.values():
        place.plans.setdefault(key, []).append(agreed)
    return agreed


def _compare(place: groups.RankStore, alias: str, graph: Compared, settings: Settings) -> Collectives:
    """Compares with the ranks of one group; returns the collectives that they all plan, or follow."""
    room, number = place.rendezvous(), next(place.compiles)
    read = _digest([settings.text, *_on(alias, graph.inserted)])
    planned = _digest(_on(alias, graph.planned))
    difference = room.compare(number, f"{read} {planned}", _text(settings, graph.planned))
    if difference is None:
        return graph.planned
    # Of many ranks, the two in the difference need not be those that read in another order.
    second = room.compare(f"{number}/read", read, _text(settings, graph.inserted))
    if second is not None:
        raise _mismatch(room.ranks, second, alias)
    if not settings.can_follow:
        raise _mismatch(room.ranks, difference, alias)
    room.forget(number)
    return _collectives_in(difference.first)


def digests(collectives: Collectives) -> dict[str, int]:
    """For each group on which a transformed graph communicates, a number that stands for its collectives on it."""
    aliases = [alias for alias in dict(collectives) if groups.rank_store(alias) is not None]
    return {alias: int(_digest(_on(alias, collectives))[:14], 16) for alias in aliases}


def in_order(records: Iterable[Record]) -> list[Record]:
    """Parameter groups in an order that is the same for all layers, and on all ranks, that share a graph."""
    return sorted(records, key=lambda record: natural(record.parameters[0]))


def collectives_of(step: StepGraph) -> list[tuple[str, str]]:
    """The collectives of a graph."""
    return [(group_of(node), line_of(node)) for node in starts_of(step)]


def inserted_in(step: StepGraph) -> list[tuple[str, str]]:
    """The collectives of a graph that has one for each parameter, with all that plans without times depend on.

    Neighbours of one unit are in the order of their names: theirs in the graph may depend on sizes.
    """
    units: dict[str, int] = {}
    found: list[tuple[str, str]] = []
    for _, run in itertools.groupby(starts_of(step), lambda node: (require(node).unit, node.target)):
        lines = [(group_of(node), f"{line_of(node)}{_SPECS}{_described(node, units)}") for node in run]
        found += sorted(lines, key=lambda line: natural(names_in(line[1])[0]))
    return found


def _described(node: fx.Node, units: dict[str, int]) -> str:
    """The number of its unit in the graph, and its specs: names of groups and hooks are a rank's own."""
    specs = (
        dataclasses.replace(
            spec,
            group="",
            replicate_group="",
            post_forward_group="",
            reduce_group="its" if spec.reduce_group else "",
            hook="its" if spec.hook else "",
            stride=1,
            replicate_stride=1,
        )
        for spec in require(node).specs
    )
    return f"unit {units.setdefault(require(node).unit, len(units))}: {'; '.join(spec.text for spec in specs)}"


def refuse(flats: Iterable[Record], error: FSDPCompileError) -> None:
    """Tells the ranks that compile the same as this one that it does not, or that another one does not."""
    if isinstance(error, RankMismatchError | RankFailedError) and not isinstance(error, RefusedElsewhereError):
        return  # all ranks know already
    specs = [spec for record in flats for spec in record.specs]
    aliases = [a for s in specs for a in (s.group, s.replicate_group, s.post_forward_group, s.reduce_group)]
    for place in dict.fromkeys(groups.rank_store(alias) for alias in aliases if alias):
        if place is None:
            continue
        if isinstance(error, RefusedElsewhereError) and error.heard_in == place.prefix:
            continue
        # Only ranks that have not agreed on anything yet all have to compile. A refusal counts as a round: ranks that
        # compile nothing would find it in their next round, in which this rank takes no part.
        if place.plans:
            continue
        place.rendezvous().refuse(next(place.compiles), error)


@contextmanager
def telling_all() -> Iterator[None]:
    """An error ends the comparisons of all groups of this rank, and so on: no rank waits for one that has failed."""
    try:
        yield
    except RefusedElsewhereError:
        raise
    except FSDPCompileError as error:
        for each in groups.rank_stores():
            each.rendezvous().tell(error)
        raise


def _digest(lines: Sequence[str]) -> str:
    return digest_of("\n".join(numbered(lines)))


def _order(collectives: Collectives) -> Order:
    return tuple(numbered([line for _, line in collectives]))


def _on(alias: str, collectives: Collectives) -> list[str]:
    return [line for each, line in collectives if each == alias]


def _text(settings: Settings, collectives: Collectives) -> str:
    return json.dumps([settings.measured, settings.shared, collectives])


def _collectives_in(text: str) -> Collectives:
    _, _, collectives = json.loads(text)
    return [(alias, line) for alias, line in collectives]


def _mismatch(ranks: tuple[int, ...], found: Difference, alias: str) -> RankMismatchError:
    other = found.other
    one, another = (json.loads(text) for text in (found.first, found.second))
    if one[0] != another[0]:
        return RankMismatchError(
            f"rank {ranks[0]} and rank {ranks[other]} plan with different measured times",
            where="options={'hardware': ...}",
            instead="the same file of fsdp-compile calibrate on all hosts, or a path that all hosts share",
        )
    names = [name for name in {**one[1], **another[1]} if one[1].get(name) != another[1].get(name)]
    if names:
        on_first, on_other = (", ".join(f"{name}={each[1].get(name)}" for name in names) for each in (one, another))
        return RankMismatchError(
            f"rank {ranks[0]} and rank {ranks[other]} compile with different options",
            where=f"options: {on_first} on rank {ranks[0]}, {on_other} on rank {ranks[other]}",
            instead="the same options of torch.compile() on every rank",
        )
    first, second = (_on(alias, _collectives_in(text)) for text in (found.first, found.second))
    pairs = zip(numbered(first), numbered(second), strict=False)
    number = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    return RankMismatchError(
        f"rank {ranks[0]} and rank {ranks[other]} compile different collectives",
        where=f"collective {number + 1}: {_at(first, number)} on rank {ranks[0]}, "
        f"{_at(second, number)} on rank {ranks[other]}",
        instead="the same control flow on every rank: which parameters are read, and in which order, must not depend "
        "on a rank's number or data; a module that has no rows on a rank is called there all the same, with an empty "
        "tensor" + (_OTHER_SIZES if _communicated(first) == _communicated(second) else ""),
    )


def _communicated(lines: Iterable[str]) -> list[tuple[str, str]]:
    """What is communicated, however it is ordered and joined: phase and operator with each parameter."""
    return sorted((line.partition(" of ")[0], name) for line in lines for name in names_in(line))


def _at(lines: Sequence[str], number: int) -> str:
    return f"[{lines[number]}]" if number < len(lines) else "nothing more"
