"""What each pass did to each graph, written to a folder and to torch's structured trace.

With `options={"artifacts": folder}` the first rank writes, for every compiled graph,

    graph00-forward/0-captured.txt
    graph00-forward/1-insert-collectives.txt         the graph after the pass
    graph00-forward/1-insert-collectives.plan.txt    what it decided
    graph00-forward/1-insert-collectives.diff.txt    a unified diff

All ranks make the same text. The structured trace gets it too, so that tlparse shows it. Nothing is formatted unless
one of the two is asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_compile._torch.dynamo import trace_structured_artifact
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.text.printer import format_diff, format_graph, format_plan
from fsdp_compile.passes.base import GraphPass

_GRAPH_FOLDER = re.compile(r"graph(\d+)-")


class Watcher:
    """Writes one graph before and after each pass; without a folder, to the structured trace alone."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        first = not dist.is_initialized() or dist.get_rank() == 0
        self._folder = Path(folder) if folder is not None and first else None
        self._graph_folder: Path | None = None
        self._position = 0
        self._before = ""
        self._plan = ""

    def captured(self, step: StepGraph) -> None:
        """The graph before any pass."""
        if self._folder is not None:
            self._graph_folder = _new_graph_folder(self._folder, step.phase.value)
            self._before = format_graph(step)
        self._write(step, "captured", "txt", lambda: format_graph(step))

    def planned(self, step: StepGraph, graph_pass: GraphPass[Any], plan: object) -> None:
        """The decisions of a pass, before it is applied: the plan names nodes that may be gone afterwards."""
        self._position += 1
        self._write(step, graph_pass.name, "plan.txt", lambda: format_plan(plan))

    def applied(self, step: StepGraph, graph_pass: GraphPass[Any]) -> None:
        """The graph after a pass."""
        self._write(step, graph_pass.name, "txt", lambda: format_graph(step))
        if self._graph_folder is not None:
            before, self._before = self._before, format_graph(step)
            self._write(step, graph_pass.name, "diff.txt", lambda: format_diff(before, self._before))

    def _write(self, step: StepGraph, name: str, kind: str, text: Callable[[], str]) -> None:
        file = f"{self._position}-{name}.{kind}"
        trace_structured_artifact(f"fsdp_{step.phase.value}_{file}", "string", payload_fn=text)
        if self._graph_folder is not None:
            (self._graph_folder / file).write_text(text().rstrip("\n") + "\n", encoding="utf-8")


def _new_graph_folder(folder: Path, phase: str) -> Path:
    """The next numbered folder: forward and backward of one compile have consecutive numbers."""
    # Behind the last one, and not as many as there are: somebody may have deleted some.
    numbers = [int(match[1]) for path in folder.glob("graph*-*") if (match := _GRAPH_FOLDER.match(path.name))]
    number = max(numbers, default=-1) + 1
    made = folder / f"graph{number:02d}-{phase}"
    made.mkdir(parents=True)
    return made
