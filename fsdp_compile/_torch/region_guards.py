"""Dynamo's guards at each call of a nested region (`torch.compiler.nested_compile_region`), not at its first one alone.

Torch 2.13 repeats the graph of a region at a call where the guards of an earlier call would hold. Those of modules
inside of the module that is called are not among them, nor is which tensors are one, and no guard is added for the
later call. So a layer whose inner module has another class or attribute, or in which something changes later, would be
computed as the first layer is.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Container, Iterator, Mapping
from typing import Any

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import is_from_source
from torch._dynamo.variables.builder import VariableBuilder

_REGIONS = "torch._dynamo.variables.invoke_subgraph"
"""Torch 2.11 does not have it: there Dynamo traces each call."""


@functools.cache
def guard_each_call() -> None:
    """Makes Dynamo look up, and add, all guards of a region at each of its calls, in this process."""
    if importlib.util.find_spec(_REGIONS) is None:
        return
    # There is no hook for it.
    regions: Any = importlib.import_module(_REGIONS)
    build_condition, is_reusable = regions.build_reuse_condition, regions.is_reusable

    @functools.wraps(build_condition)
    def build_whole_condition(tracer: Any, call: Any, *sources: Any) -> Any:
        condition = build_condition(tracer, call, *sources)
        return condition if condition is not None and _add_guards_below(condition, tracer.output, call) else None

    @functools.wraps(is_reusable)
    def is_reusable_and_guarded(tracer: Any, condition: Any, call: Any, earlier: Any) -> bool:
        if not is_reusable(tracer, condition, call, earlier):
            return False
        replaced = regions.build_source_replacement(earlier.arg_sources, call.arg_sources)
        guards = list(_guards_of_call(condition, replaced, tracer.output))
        if None in guards:
            return False
        inputs = {
            _source_of_call(place.source, replaced)
            for place in earlier.subgraph_input_mapping
            if isinstance(place, regions.LiftedCapturedSource)
        }
        for guard in sorted(guards):  # torch has them in a set, whose order differs from rank to rank
            _install(guard, tracer, inputs)
        return True

    regions.build_reuse_condition, regions.is_reusable = build_whole_condition, is_reusable_and_guarded


def _add_guards_below(condition: Any, output: Any, call: Any) -> bool:
    """Adds what Dynamo guards on below the arguments of a call; whether it can be looked up for other calls."""
    guards: Any = importlib.import_module("torch._dynamo.guards")
    known = {id(guard) for *_, guard in condition.guards}
    arguments = [source for source in call.arg_sources if source is not None]
    for guard in output.guards:
        source = guard.originating_source
        if id(guard) in known or not any(is_from_source(source, argument) for argument in arguments):
            continue
        check = guards.GUARD_VALUE_DISPATCH.get(guard.create_fn_name())
        if guard.inner_create_fn() is GuardBuilder.DUPLICATE_INPUT:
            check = guards.GuardCheckSpec(lambda *_: None, lambda *_: True)  # it has two sources: `_guards_of_call`
        elif check is guards.SKIP_GUARD:
            continue
        if not isinstance(check, guards.GuardCheckSpec):
            return False
        try:
            expected = check.get_metadata_fn(guard, output.resolve_source_value(source))
        except Exception:
            return False
        condition.guards.append((source, check, expected, guard))
    return True


def _guards_of_call(condition: Any, replaced: Mapping[Any, Any], output: Any) -> Iterator[Any]:
    """The guards of an earlier call for one with other arguments; `None` where what was one tensor is two."""
    for source, _, _, guard in condition.guards:
        own, kind, create = _source_of_call(source, replaced), guard.inner_create_fn(), guard.create_fn
        if kind is GuardBuilder.DUPLICATE_INPUT:
            other = _source_of_call(create.keywords["source_b"], replaced)
            is_one = output.resolve_source_value(own) is output.resolve_source_value(other)
            yield own.make_guard(functools.partial(kind, source_b=other)) if is_one else None
        elif own != source:
            yield own.make_guard(create)


def _source_of_call(source: Any, replaced: Mapping[Any, Any]) -> Any:
    """Where a call with other arguments finds what an earlier one found at `source`."""
    return source.clone(lambda part: replaced.get(part, part))


def _install(guard: Any, tracer: Any, inputs: Container[Any]) -> None:
    """Installs a guard of a call; `inputs` are tensors that torch will make inputs of the graph, with their guards."""
    source = guard.originating_source
    if guard.inner_create_fn() is not GuardBuilder.TENSOR_MATCH:
        install_guard(guard)
    elif source not in inputs:
        # As an input, too: a tensor has one guard, and what makes this one has the tensor of the earlier call with it.
        VariableBuilder(tracer, source)(tracer.output.resolve_source_value(source))
