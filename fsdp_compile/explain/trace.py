"""The graphs that a compile would run, made by the backend's own pipeline and then not run.

Dynamo, AOTAutograd, partitioner and passes are those of a real compile. Compiled code is replaced by a function that
returns hollow tensors of the right types, so that Python goes on after a graph break.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from fsdp_compile._torch.dynamo import detect_fake_mode, ends_in_graph_break
from fsdp_compile.capture.flat_inputs import flat_inputs
from fsdp_compile.capture.forms import is_whole_model, refusal_of_several, refuse_budget_of_a_part
from fsdp_compile.capture.shard_embeddings import shard_lookups
from fsdp_compile.cost.sizes import concrete
from fsdp_compile.errors import FSDPCompileError, UnsupportedModelError
from fsdp_compile.explain.open_batch import Inputs, OpenBatch
from fsdp_compile.explain.stand_in import hollow
from fsdp_compile.fsdp2.module_class import user_class
from fsdp_compile.fsdp2.take_over import note_backend
from fsdp_compile.ir.graph import KEY, Phase, Role, StepGraph, record_of, require, role_of
from fsdp_compile.lower.compiled_step import Compiled
from fsdp_compile.lower.eager import compile_eagerly
from fsdp_compile.lower.inductor import compile_with_inductor
from fsdp_compile.lower.region import Region
from fsdp_compile.options import FSDPOptions
from fsdp_compile.partition.recompute import blocks
from fsdp_compile.pipeline import keep, transform

Claim = tuple[str, str]
"""Unit and name of a parameter."""


@dataclasses.dataclass(kw_only=True)
class TracedRegion(Region):
    """A region that records its graphs before and after the passes.

    Attributes:
        captured: Copies of its graphs before the passes, and before it is chosen what stays unsharded; forward first.
        whole: Whether it reads every unit of the model.
        batch: What is open in its sizes.
        runs: Receives the region for each call of its forward, and which parameters it was called with.
        fixed: How many blocks are computed again in backward; `None` for as few as the budget allows.
    """

    captured: list[StepGraph]
    whole: bool
    batch: OpenBatch
    runs: list[Run]
    fixed: int | None

    def blocks_again(self, joint: fx.GraphModule, attempted: int) -> int:
        """How many blocks backward computes again."""
        return attempted if self.fixed is None else min(self.fixed, len(blocks(joint.graph)))

    def finish(self, gm: fx.GraphModule, phase: Phase, compile_graph: Callable[[Sequence[Any]], Compiled]) -> Compiled:  # noqa: ARG002
        """Returns a function of the graph's signature that computes nothing."""
        returned = gm.graph.output_node().args[0]
        nodes: Any = returned if isinstance(returned, tuple | list) else (returned,)
        values = [node.meta.get("val") if isinstance(node, fx.Node) else node for node in nodes]

        def example(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return hollow(value)
            return concrete(value) if isinstance(value, torch.SymInt) else value  # the number of the trace

        def run(args: list[Any]) -> list[Any]:
            if phase is Phase.FORWARD:
                given = flat_inputs(args)
                claims: dict[Claim, Claim] = {}
                for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
                    if role_of(node) is Role.FLAT and position in given:
                        claims.update(zip(require(node).claims, given[position].claims, strict=True))
                self.runs.append((self, claims))
            args.clear()
            return list(map(example, values))

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def of_run(self, claims: Mapping[Claim, Claim]) -> TracedRegion:
        """The region with the names of the parameters that it was called with.

        Blocks that are laid out alike share compiled code, where each is called from Python: one compile for all.
        """
        if all(compiled == called for compiled, called in claims.items()):
            return self
        captured, steps = ([_renamed(step, claims) for step in of] for of in (self.captured, self.steps))
        return dataclasses.replace(self, captured=captured, steps=steps)


def _renamed(step: StepGraph, claims: Mapping[Claim, Claim]) -> StepGraph:
    """A copy of a graph for other parameters."""
    units = {compiled: called for (compiled, _), (called, _) in claims.items()}
    copied = step.copy()
    for node in copied.graph.nodes:
        record = record_of(node)
        if record is not None:
            called = [claims.get(claim, claim) for claim in record.claims]
            node.meta[KEY] = dataclasses.replace(
                record,
                unit=units.get(record.unit, record.unit),
                parameters=tuple(name for _, name in called),
                owners=tuple(unit for unit, _ in called) if record.owners else (),
            )
    return copied


Run = tuple[TracedRegion, Mapping[Claim, Claim]]
"""A region that was called, and for each parameter that it was compiled for the one that it was called with."""


def trace(model: nn.Module, inputs: Inputs, options: FSDPOptions, recomputed: int | None = None) -> list[TracedRegion]:
    """Compiles a sharded stand-in without lowering it: see `traced_model`.

    Returns:
        The compiled regions in the order in which they run, each with a forward and, when training, a backward; one
        that runs for several blocks is there for each of them.

    Raises:
        UnsupportedModelError: If torch cannot trace the model.
    """
    runs: list[Run] = []
    try:
        given: dict[str, Any] = {"inputs": inputs, "options": options, "runs": runs, "recomputed": recomputed}
        called = torch.compile(_caller(), backend=_record, dynamic=False, options=given)
        called(model, *inputs.args, **inputs.kwargs)
    except FSDPCompileError:
        raise
    except Exception as error:
        cause = getattr(error, "inner_exception", None)  # what a backend raised, in Dynamo's wrapper
        if isinstance(cause, FSDPCompileError):
            raise cause from error
        raise UnsupportedModelError(
            f"the model cannot be traced: {type(error).__name__}: {error}",
            where=f"explain({user_class(model).__name__})",
            instead="arguments with which model(*args, **kwargs) runs; shapes are enough",
        ) from error
    if inputs.opened and len(runs) > 1:
        raise UnsupportedModelError(
            f"graph breaks split the model into {len(runs)} regions, and the batch stays open only in the first",
            where=f"plan({user_class(model).__name__}, ...)",
            instead="a model without graph breaks (TORCH_LOGS=graph_breaks says where they are), or explain() for a "
            "configuration that is chosen",
        )
    # As `refuse_budget_of_a_part`, where a loop in Python calls block after block.
    trained = [claims for region, claims in runs if claims and len(region.captured) > 1]
    if options.memory_budget_gb is not None and len(trained) > 1:
        (unit, _), *_ = trained[1].values()
        raise refusal_of_several(f"the graph before it does not read {unit}", options)
    return [region.of_run(claims) for region, claims in runs]


def _record(gm: fx.GraphModule, examples: Sequence[Any], *, options: Mapping[str, Any]) -> Any:
    """The backend: compiles no graph, but records what the passes make of it."""
    inputs: Inputs = options["inputs"]
    checked: FSDPOptions = options["options"]
    if checked.embedding == "sharded":
        shard_lookups(gm)
    refuse_budget_of_a_part(examples, checked, breaks=ends_in_graph_break(gm))
    only_captured = options["recomputed"] is not None
    captured: list[StepGraph] = []
    whole = is_whole_model(examples)

    def keep_what_fits(forward: StepGraph, backward: StepGraph) -> None:
        captured[:] = [forward.copy(), backward.copy()]  # of the last attempt, if a budget takes several
        if not only_captured:
            keep(forward, backward, checked, whole=whole)

    def run_passes(step: StepGraph) -> StepGraph:
        if not captured:  # a graph without a backward
            captured.append(step.copy())
        return step if only_captured else transform(step, checked)

    mode = detect_fake_mode([node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")])
    region = TracedRegion(
        flat_inputs(examples),
        run_passes,
        keep_what_fits,
        may_recompute=checked.may_recompute and not only_captured,
        captured=captured,
        whole=whole,
        batch=OpenBatch(inputs.symbols(gm, examples), None if mode is None else mode.shape_env),
        runs=options["runs"],
        fixed=options["recomputed"],
    )
    if checked.lower == "eager":
        return compile_eagerly(gm, examples, region)
    return compile_with_inductor(gm, examples, region, checked.inductor)


note_backend(_record)


def _caller() -> Callable[..., Any]:
    """A function from which one trace starts: Dynamo starts none in torch's own modules, it inlines their forwards."""

    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    # A new code object for each: Dynamo caches compiled code by it, and stops at a number of compiles.
    return types.FunctionType(call.__code__.replace(), call.__globals__)
