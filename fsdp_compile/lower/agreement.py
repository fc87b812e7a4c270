"""All ranks of a group must compile the same collectives: compared through the store, before any of them runs.

A rank that compiles alone must not wait for others: batches differ, so one rank may recompile for a size that the
others have not met. But the collectives of its graph must be those of the other ranks' graphs, or the ranks would hang.
So a rank takes part in a comparison only when it compiles an order of collectives that it has not compiled before; the
n-th such order has to be the same on every rank of a group. A rank that refuses to compile (its batch is larger, and
does not fit a budget) reports that in place of the first order, since the others would wait for it. Later it may be the
only one that compiles, and go on with a graph that it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fsdp_compile.comm import groups
from fsdp_compile.comm.rendezvous import Difference, RefusedElsewhereError, digest_of
from fsdp_compile.errors import FSDPCompileError, RankFailedError, RankMismatchError
from fsdp_compile.ir.graph import EXCHANGES, Record, Role, StepGraph, require, role_of

_STARTS = (Role.GATHER, Role.REDUCE, Role.REPLICATE, *EXCHANGES)
_NAMES = re.compile(r"(?<= of )(.*)(?= \()")
"""The names of parameters in a line."""
_PLANNED = "planned with measured times "
"""How the first line begins where times were measured."""
_OTHER_SIZES = "; or, if batches have other sizes, options={'prefetch': 1}, whose plan does not depend on them"
_REFUSED = "refused"
"""The digest of an order that a rank refused to compile."""


Collectives = Mapping[str, Sequence[str]]
"""A line for each collective of a graph, by the alias of its process group."""


def agree(collectives: Collectives, measured: str = "") -> None:
    """Compares the collectives of a transformed graph with those that the other ranks of their groups compile.

    Args:
        collectives: Of the graph.
        measured: Stands for the measured times that the graph was planned with; empty if there are none.

    Raises:
        RankMismatchError: On every rank of a group, if two of them differ.
        RefusedElsewhereError: If a rank has refused to compile as many orders; all may try again.
        RankFailedError: If a rank does not compile as many orders in time, or the store fails.
    """
    for alias, mine in collectives.items():
        place = groups.rank_store(alias)
        if place is None:
            continue
        lines = [f"{_PLANNED}{measured}", *mine] if measured else mine
        digest = _digest(lines)
        if digest not in place.agreed:
            place.agreed.append(digest)
            try:
                _compare(place, len(place.agreed), digest, lines)
            except RefusedElsewhereError:
                place.agreed[-1] = _REFUSED  # a refusal counts as an order, on all ranks
                raise


def digests(collectives: Collectives) -> dict[str, int]:
    """For each group on which a transformed graph communicates, a number that stands for its collectives on it."""
    return {alias: int(_digest(lines)[:14], 16) for alias, lines in collectives.items()}


def in_order(records: Iterable[Record]) -> list[Record]:
    """Parameter groups in an order that is the same for all layers, and on all ranks, that share a graph."""
    return sorted(records, key=lambda record: _natural(record.parameters[0]))


def collectives_of(step: StepGraph) -> dict[str, list[str]]:
    """The lines of a graph's collectives, by group; of groups whose ranks are processes."""
    starts = [node for node in step.graph.nodes if node.meta.get("fsdp") and require(node).role in _STARTS]
    found: dict[str, list[str]] = {}
    for node in starts:
        alias = group_of(node)
        if groups.rank_store(alias) is not None:
            found.setdefault(alias, []).append(_line(node))
    return found


def _digest(lines: Sequence[str]) -> str:
    return digest_of("\n".join(_numbered(lines)))


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
        # Only ranks that have not agreed on anything yet all have to compile. A refusal counts as an order: ranks that
        # compile nothing would find it in their next round, in which this rank takes no part.
        if any(digest != _REFUSED for digest in place.agreed):
            continue
        place.agreed.append(_REFUSED)
        place.rendezvous().refuse(len(place.agreed), error)


def _compare(place: groups.RankStore, number: int, digest: str, mine: Sequence[str]) -> None:
    room = place.rendezvous()
    try:
        difference = room.compare(number, digest, "\n".join(mine))
        if difference is not None:
            raise _mismatch(room.ranks, difference)
    except RefusedElsewhereError:
        raise
    except FSDPCompileError as error:
        # An error ends the comparisons of all groups of this rank, and so on: no rank waits for one that has failed.
        for each in groups.rank_stores():
            each.rendezvous().tell(error)
        raise


def group_of(node: fx.Node) -> str:
    """The alias of the group on which a collective runs."""
    if role_of(node) in EXCHANGES:
        return require(node).specs[0].group
    # The only text among the arguments that starts as aliases do.
    return next(a for a in node.args if isinstance(a, str) and a.startswith("fsdp."))


def _line(node: fx.Node) -> str:
    record = require(node)
    messages = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    if record.role is Role.LOOK_UP:  # the number of rows may differ between ranks
        messages = []
    sizes = ", ".join(f"{v.numel()} {str(v.dtype).removeprefix('torch.')}" for v in messages)
    operator = str(node.target).removeprefix("_c10d_functional.").removesuffix(".default")
    return f"{record.phase.value}: {operator} of {', '.join(record.parameters)} ({sizes})"


def _numbered(lines: Sequence[str]) -> list[str]:
    """The lines with each parameter as its place among those of the graph, in the order of their numbered names.

    Layers of one shape share a graph, which has the names of the layer that was called first: on a rank that compiles
    again for its own batch that may be another layer. The order of layers within a graph is the same for all that share
    it.
    """
    names = {name for line in lines for name in _names(line)}
    places = {name: str(i) for i, name in enumerate(sorted(names, key=_natural))}
    return [_NAMES.sub(lambda found: ", ".join(places[n] for n in found[1].split(", ")), line, 1) for line in lines]


def _names(line: str) -> list[str]:
    found = _NAMES.search(line)
    return found[1].split(", ") if found else []


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts `experts.9` before `experts.10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _mismatch(ranks: tuple[int, ...], found: Difference) -> RankMismatchError:
    first, second, other = found.first.splitlines(), found.second.splitlines(), found.other
    if first[0] != second[0] and any(lines[0].startswith(_PLANNED) for lines in (first, second)):
        return RankMismatchError(
            f"rank {ranks[0]} and rank {ranks[other]} plan with different measured times",
            where="options={'hardware': ...}, or options={'refine_after': ...}",
            instead="the same file of fsdp-compile calibrate on all hosts, or a path that all hosts share; one number "
            "of steps",
        )
    pairs = zip(_numbered(first), _numbered(second), strict=False)
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
    return sorted((line.partition(" of ")[0], name) for line in lines for name in _names(line))


def _at(lines: Iterable[str], number: int) -> str:
    return next((f"[{line}]" for i, line in enumerate(lines) if i == number), "nothing more")
