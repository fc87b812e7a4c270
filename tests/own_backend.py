"""Compiles by a function of a test, to whose graphs FSDP2's hooks leave units, as to those of the backend "fsdp"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from fsdp_compile import units
from fsdp_compile.fsdp2.take_over import note_backend

CompileGraph = Callable[[fx.GraphModule, Sequence[Any]], Any]


def compiled_by(compile_graph: CompileGraph, model: nn.Module, **arguments: Any) -> Callable[..., Any]:
    """Takes a sharded model over and compiles it.

    Args:
        compile_graph: Compiles one Dynamo graph.
        model: The model.
        arguments: Others of `torch.compile`.
    """
    assert units(model)
    return torch.compile(model, backend=_compile_graph, options={"compile_graph": compile_graph}, **arguments)


def _compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, CompileGraph]) -> Any:
    return options["compile_graph"](gm, example_inputs)


note_backend(_compile_graph)
