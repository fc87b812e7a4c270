"""Collectives of one model that run between its compiled graphs: one graph for each block, say.

    forward     graph of block 1       graph of block 2       graph of block 3
    running     gather 2               gather 3               gather 4
    backward    graph of block 3       graph of block 2       graph of block 1
    running     gather 2               gather 1, reduce 3     reduce 2

A graph that is about to run starts the gathers of the graphs that came after it in the step before: as many as fit into
the memory of the largest one, and at least one. It waits for its own messages one by one, where it needs them. Where
its unit has a list of what to prefetch, it starts those instead, and they stay until they are used. Where another graph
comes, its messages are gathered when it is called, as in the first step. Gathers run ahead only within one forward of
the root, or within one backward, since parameters may change in between.

Under `reshard_after_forward="auto"` messages stay from forward to backward in the memory that gathers ahead leave: at
the end of a forward nothing is ahead, and those of the last graphs, which backward needs first, are not gathered again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from fsdp_compile._torch.autograd import after_outermost_backward, after_this_backward, backward_in_progress
from fsdp_compile._torch.distributed import collectives
from fsdp_compile.layout.profiler_ranges import Range, profiled

if TYPE_CHECKING:
    from fsdp_compile.fsdp2.param_group import ParamGroup

_LOGGER: Final = logging.getLogger("fsdp_compile.progress")


@dataclasses.dataclass(frozen=True)
class Gather:
    """An all-gather at the beginning of a graph, of one or more messages. Those with the same code are equal.

    Attributes:
        code: Of `start`.
        start: Takes flat tensors, returns running messages.
        flats: Positions of these flat tensors among the inputs of the graph.
        nbytes: Of the gathered messages.
    """

    code: str
    start: Callable[..., Sequence[torch.Tensor]] = dataclasses.field(compare=False)
    flats: tuple[int, ...] = dataclasses.field(compare=False)
    nbytes: int = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Head:
    """The all-gathers at the beginning of a graph, whose running messages it takes after its own inputs.

    Attributes:
        gathers: In their order.
        ahead: How many graphs that follow may gather ahead; `None` for what fits into the memory of the largest.
        may_stay: Whether the messages may stay in memory for a backward, which may find them by equal gathers.
    """

    gathers: tuple[Gather, ...]
    ahead: int | None
    may_stay: bool

    @property
    def flats(self) -> Iterator[int]:
        """Positions of all flat tensors that it gathers."""
        return itertools.chain.from_iterable(gather.flats for gather in self.gathers)


@dataclasses.dataclass(frozen=True, eq=False)
class Tail:
    """What follows the reductions at the end of a backward.

    Attributes:
        stages: Each waits for what the one before has returned, the first for what the graph has; the last returns
            gradients of flat tensors, others what runs.
        running: How many running reductions the graph returns after its own outputs.
        outputs: Positions of the gradients among the outputs of the graph.
        flats: Positions of the flat tensors among its inputs.
    """

    stages: tuple[Callable[..., Sequence[torch.Tensor]], ...]
    running: int
    outputs: tuple[int, ...]
    flats: tuple[int, ...]


class Reduction:
    """Gradients of one graph whose reductions run, in the `stages` that are left."""

    def __init__(self, tail: Tail, running: Sequence[torch.Tensor], units: Sequence[str]) -> None:
        self.stages = list(tail.stages)
        self._values = running
        self._units = units

    def advance(self) -> None:
        """Waits for what runs, and starts the next stage, if there is one."""
        if self.stages:
            with profiled(Range.REDUCE_WAIT, self._units):
                self._values = self.stages.pop(0)(*self._values)

    def finish(self) -> Sequence[torch.Tensor]:
        """Waits for all stages; returns the gradients."""
        while self.stages:
            self.advance()
        return self._values


_Message = tuple[Gather, tuple["ParamGroup", ...]]
"""Of a graph, what is gathered together, and of which groups."""


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a graph: what it gathers."""

    messages: tuple[_Message, ...]
    head: Head = dataclasses.field(compare=False)

    @property
    def groups(self) -> Iterator[ParamGroup]:
        """The parameter groups that it gathers."""
        return itertools.chain.from_iterable(groups for _, groups in self.messages)

    @functools.cached_property
    def nbytes(self) -> int:
        """Of the gathered messages."""
        return sum(gather.nbytes for gather, _ in self.messages)


class _Order:
    """The calls of one forward of the root, or of one backward, in their order."""

    def __init__(self) -> None:
        self._expected: list[_Call] = []
        self._seen: list[_Call] = []
        self._place = 0
        self._named: list[_Call] = []
        """Of the next ones, those that lists of the calls so far name."""

    def follow(self, call: _Call) -> bool:
        """Notes a call; returns whether it is the one that was expected."""
        expected = self._expected[self._place : self._place + 1] in ([], [call])
        self._seen.append(call)
        try:  # calls in between are left out
            self._place = self._expected.index(call, self._place) + 1
        except ValueError:
            self._place = len(self._expected)
        return expected

    @property
    def next(self) -> Sequence[_Call]:
        """The calls that are expected from here on."""
        return self._expected[self._place :]

    def named(self, titles: Collection[str]) -> Sequence[_Call]:
        """The calls that read some units, and those that were named before."""
        once = dict.fromkeys(self.next)
        self._named = [c for c in once if c in self._named or any(group.unit.title in titles for group in c.groups)]
        return self._named

    def end(self) -> None:
        """Expects the calls that were seen the next time: also after an error, which the other ranks may not have."""
        self._expected = self._seen or self._expected
        self._seen, self._named, self._place = [], [], 0


class Pipeline:
    """The gathers that run ahead of the graphs of one model, and the reductions that run on after them."""

    def __init__(self) -> None:
        self._forward, self._backward = _Order(), _Order()
        self._ahead: dict[_Message, tuple[Sequence[torch.Tensor], Sequence[int]]] = {}
        self._staying: list[_Call] = []
        """Graphs of this forward whose messages are among those, the last one last."""
        self._largest = 0
        self._is_in_forward = False
        self._running: list[Reduction] = []
        # By backward: one may run inside of another, which waits for it (reentrant checkpointing).
        self._arriving: dict[int, dict[ParamGroup, tuple[Reduction, int]]] = {}
        self._has_told = False

    def begin_forward(self) -> None:
        """Before a forward of the root: what an earlier one has left is of old parameters."""
        if backward_in_progress() == -1 and self._arriving:  # an earlier backward has raised
            self._arriving = {}
            self._end_backward()
        self._drop_all()
        self._staying = []
        self._forward.end()
        self._is_in_forward = True

    def end_forward(self) -> None:
        """After a forward of the root."""
        self._drop_all(keep=list(_messages_of(self._staying)))
        self._forward.end()
        self._is_in_forward = False

    def gathering(self, call: _Call) -> list[torch.Tensor]:
        """The running messages of a graph that is about to run; starts those of the graphs that follow it."""
        expected: list[_Call] = []
        if self._follow_backward() != -1:
            expected = self._expected_after(call, self._backward)
        elif self._is_in_forward:
            expected = self._expected_after(call, self._forward)
        own = {message: self._taken(message) for message in call.messages}
        self._stay(call, expected)
        kept = list(_messages_of((*expected, *self._staying)))
        self._drop_all(keep=kept)
        for message in kept:
            if message not in self._ahead:
                self._ahead[message] = (own[message] if message in own else _start(message)), _versions(message)
        return [each for message in call.messages for each in own[message]]

    def _taken(self, message: _Message) -> Sequence[torch.Tensor]:
        """A message that runs ahead, or else starts now."""
        running, versions = self._ahead.pop(message, ((), ()))
        if list(versions) == _versions(message):
            return running
        _wait(running)
        return _start(message)

    def _stay(self, call: _Call, expected: Sequence[_Call]) -> None:
        """Chooses what stays for backward: the messages of `call`, and of graphs before it where gathers leave room."""
        used, self._staying = self._staying, []
        if self._is_in_forward and call.head.may_stay and backward_in_progress() == -1:
            room = self._largest - sum(other.nbytes for other in {*expected} - {call})
            for other in reversed(used):
                if other != call and other not in expected and (room := room - other.nbytes) >= 0:
                    self._staying.insert(0, other)
            self._staying.append(call)

    def _expected_after(self, call: _Call, order: _Order) -> list[_Call]:
        """The calls whose messages may be in memory while `call` computes."""
        self._largest = max(self._largest, call.nbytes)
        if not order.follow(call) and not self._has_told:
            self._has_told = True
            title = next(call.groups).title
            _LOGGER.info("unit %s: another graph than in the step before gathers when it is called", title)
        titles = {title for group in call.groups for title in group.unit.prefetched[order is self._backward]}
        stayed = set(_messages_of(self._staying))
        found, nbytes = list[_Call](), 0
        for other in () if titles else order.next:
            if other != call and other not in found:
                nbytes += other.nbytes
                # What has stayed for this backward is there: else nothing would be sent while its first graph computes.
                count = sum(each != call and not stayed.issuperset(each.messages) for each in (*found, other))
                ahead = call.head.ahead
                if (count > 1 and nbytes > self._largest) if ahead is None else count > ahead:
                    break
            found.append(other)
        return [*found, *(other for other in order.named(titles) if other not in found)]

    def reduced(self, groups: Sequence[ParamGroup], reduction: Reduction) -> list[torch.Tensor]:
        """What goes through autograd for gradients whose reductions run; those of earlier graphs get on."""
        arriving = self._arriving[self._follow_backward()]
        given = []
        for number, group in enumerate(groups):
            # Of another graph that reads the unit: autograd adds what they give, and -0.0 changes no bit.
            earlier = arriving.get(group)
            zeros = group.flat.new_full((), -0.0).expand_as(group.flat)
            given.append(zeros if earlier is None else earlier[0].finish()[earlier[1]])
            arriving[group] = reduction, number
        for earlier_one in self._running:
            earlier_one.advance()
        self._running = [*(one for one in self._running if one.stages), reduction]
        return given

    def arrived(self, group: ParamGroup, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of a group, where `gradient` has come through autograd."""
        if not self._arriving:  # as of a whole model in one graph
            return gradient
        reduction, number = self._arriving.get(backward_in_progress(), {}).pop(group, (None, 0))
        if reduction is None:
            return gradient
        last = reduction.finish()[number]
        return last if gradient.stride() == (0,) else gradient + last

    def _follow_backward(self) -> int:
        """The backward that runs, or -1."""
        task = backward_in_progress()
        if task != -1 and task not in self._arriving:
            self._arriving[task] = {}
            after_this_backward(lambda: self._arriving.pop(task, None))
            after_outermost_backward(self._end_backward)
        return task

    def _end_backward(self) -> None:
        for reduction in self._running:
            reduction.finish()
        self._running = []
        self._drop_all()
        self._backward.end()

    def _drop_all(self, keep: Collection[_Message] = ()) -> None:
        for message in [message for message in self._ahead if message not in keep]:
            _wait(self._ahead.pop(message)[0])


def gathering(head: Head, groups: Mapping[int, ParamGroup], args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The running messages of a graph that is about to run; `groups` are by the positions of their flat tensors."""
    pipeline = _pipeline(groups, head.flats)
    if pipeline is None:
        return [each for gather in head.gathers for each in gather.start(*(args[at] for at in gather.flats))]
    return pipeline.gathering(_Call(tuple((one, tuple(groups[at] for at in one.flats)) for one in head.gathers), head))


def reduced(tail: Tail, groups: Mapping[int, ParamGroup], outputs: Sequence[Any], *, now: bool) -> list[Any]:
    """The outputs of a backward that has returned running reductions after its own; `now` waits for these."""
    own = len(outputs) - tail.running
    titles = [groups[at].title for at in tail.flats if at in groups]
    reduction, made = Reduction(tail, outputs[own:], titles), list(outputs[:own])
    pipeline = None if now else _pipeline(groups, tail.flats)
    if pipeline is None:
        gradients = reduction.finish()
    else:
        gradients = pipeline.reduced([groups[at] for at in tail.flats], reduction)
    for output, gradient in zip(tail.outputs, gradients, strict=True):
        made[output] = gradient
    return made


def _pipeline(groups: Mapping[int, ParamGroup], flats: Iterable[int]) -> Pipeline | None:
    """That of the model that some flat tensors are of; `None` for those of several models, which wait at once.

    Also for copies of flat tensors, which hooks on saved tensors have made.
    """
    pipelines = {groups[at].unit.model.pipeline if at in groups else None for at in flats}
    return pipelines.pop() if len(pipelines) == 1 else None


def _messages_of(calls: Iterable[_Call]) -> Iterator[_Message]:
    return itertools.chain.from_iterable(call.messages for call in calls)


def _start(message: _Message) -> Sequence[torch.Tensor]:
    gather, groups = message
    with profiled(Range.ALL_GATHER, [group.title for group in groups]):
        return gather.start(*(group.flat for group in groups))


def _wait(running: Iterable[torch.Tensor]) -> None:
    for each in running:
        collectives.wait_tensor(each)


def _versions(message: _Message) -> list[int]:
    # A write to a DTensor counts on the DTensor, and not on its local tensor, the view of the flat tensor.
    return [each._version for group in message[1] for each in (group.flat, *(p.parameter for p in group.params))]
