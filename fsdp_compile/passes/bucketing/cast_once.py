"""Casts neighbouring messages of a flat parameter at once: one kernel, and one buffer that all of them lie in.

    slice(%flat, 0, 64), cast    ->    slice(%flat, 0, 192), cast, slice 0 to 64
    slice(%flat, 64, 192), cast                                    slice 64 to 192

A kernel for each message would take longer for the host to start than to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from fsdp_compile.cost.fusion import WRITTEN
from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.graph import Role
from fsdp_compile.layout.messages import cast, narrow
from fsdp_compile.passes.bucketing.messages import Message, joint_record


def cast_together(b: GraphBuilder, runs: Iterable[Message]) -> Mapping[Message, fx.Node]:
    """Records the casts that several runs of neighbours share; returns the message of each such run."""
    messages: dict[Message, fx.Node] = {}
    for stretch in _stretches([run for run in runs if _is_cast(run)]):
        if len(stretch) == 1:
            continue
        flat, begin, end = stretch[0].flat, stretch[0].begin, _end(stretch[-1])
        b.record = joint_record([single for run in stretch for single in run.singles], Role.SHARD)
        whole = cast(b, narrow(b, flat, 0, begin, end), stretch[0].singles[0].spec.param_dtype)
        whole.meta[WRITTEN] = True  # or each message would be cast by itself
        for run in stretch:
            b.record = run.record(Role.SHARD)
            messages[run] = narrow(b, whole, 0, run.begin - begin, _end(run) - begin)
    return messages


def _is_cast(run: Message) -> bool:
    single = run.singles[0]
    spec = single.spec
    # What comes from the host is copied message by message, and 8-bit messages are not casts.
    plain = not (single.is_post_forward or spec.gather_format or spec.compute)
    return plain and spec.param_dtype != single.flat.meta["val"].dtype


def _stretches(runs: Sequence[Message]) -> list[list[Message]]:
    """Runs that follow each other in one flat parameter."""
    flats = list(dict.fromkeys(run.flat for run in runs))
    stretches: list[list[Message]] = []
    for run in sorted(runs, key=lambda run: (flats.index(run.flat), run.begin)):
        before = stretches[-1][-1] if stretches else None
        if before is not None and before.flat is run.flat and _end(before) == run.begin:
            stretches[-1].append(run)
        else:
            stretches.append([run])
    return stretches


def _end(run: Message) -> int:
    return run.begin + run.span
