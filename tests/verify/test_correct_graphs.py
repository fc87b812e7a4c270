"""What the pipeline makes of many models gives no rule a reason to complain, after any pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile.cost.sizes import result_bytes
from fsdp_compile.cost.timeline import waits_of
from fsdp_compile.ir.graph import Phase, Record, Role, Stage, StepGraph, record_of, role_of
from fsdp_compile.ir.queries import aliases
from fsdp_compile.ir.text.parser import parse_graph
from fsdp_compile.ir.text.printer import format_graph
from fsdp_compile.layout.flat_layout import ReduceLayout
from fsdp_compile.layout.spec import Update
from fsdp_compile.options import FSDPOptions
from fsdp_compile.pipeline import passes
from fsdp_compile.verify.check import complaints
from fsdp_compile.verify.facts import Limits
from fsdp_compile.verify.report import Complaint
from tests import long
from tests.models.graphs import MODELS
from tests.verify.captured import World, capture
from tests.verify.graphs import OPEN, graph

PREFETCH_1 = Limits(prefetch=1)
WORLDS = {
    "1-rank": World(1),
    "2-ranks": World(2),
    "8-ranks": World(8),
    "2x2-mesh": World(4, replicas=2),
    "2x1-mesh": World(2, replicas=2),
    "kept-for-backward": World(2, reshard_after_forward=False),
    "kept-if-there-is-room": World(2, reshard_after_forward="auto"),
    "bf16-sent": World(2, policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "bf16-reduced": World(2, policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)),
    "updated": World(2, update=Update.IN_BACKWARD),
    "updated-1-rank": World(1, reshard_after_forward=False, update=Update.IN_BACKWARD),
    "looked-up": World(2, embedding="sharded"),
    "looked-up-in-one-unit": World(2, units=("head",), embedding="sharded"),
    "looked-up-2x2-mesh": World(4, replicas=2, units=("head",), embedding="sharded"),
    "looked-up-updated": World(2, units=("head",), embedding="sharded", update=Update.IN_BACKWARD),
    "updated-2x2-mesh": World(4, replicas=2, reshard_after_forward=False, update=Update.IN_BACKWARD),
}
# Every way of sharding for the plainest model; every model sharded the plainest way; both for the odd ones.
CASES = [("tables" if "looked-up" in world else "stack", world) for world in WORLDS]
CASES += [(model, "2-ranks") for model in MODELS if model != "stack"]
CASES += [(model, "updated") for model in ("tied", "repeated", "unused")]
CASES += [(model, "updated-1-rank") for model in ("tied", "weight-as-gradient")]
CASES += [("uneven", "1-rank"), ("uneven", "8-ranks"), ("partial", "2x2-mesh"), ("tied", "kept-for-backward")]
CASES += [("tied", "kept-if-there-is-room"), ("uneven", "kept-if-there-is-room")]
DYNAMIC = ["stack", "tied", "norms", "mixed"]

ALWAYS = [("stack", world) for world in ("2x2-mesh", "kept-if-there-is-room", "bf16-reduced", "updated-2x2-mesh")]
ALWAYS += [case for case in CASES if case[0] not in ("stack", "convolution", "twins")]
ALWAYS = [case for case in ALWAYS if case[0] != "tied" or case[1] == "updated"]


class Checked:
    """What each pass leaves of the graphs of a model: complaints, and texts, which read back.

    Args:
        model: Name in `MODELS`.
        world: Ranks and sharding.
        limits: What the graphs are held to.
        how: Other arguments of `capture`.
    """

    def __init__(self, model: str, world: World, limits: Limits = PREFETCH_1, **how: Any) -> None:
        self.limits = limits
        self.seen: list[str] = []
        self.texts: list[str] = []
        self.found: list[tuple[str, Complaint]] = []
        self._records: list[dict[str, Record | None]] = []
        make, inputs = MODELS[model]
        self.steps = capture(make, inputs(), world, watch=self._look, **how)
        for text, records in zip(self.texts, self._records, strict=True):
            parsed = parse_graph(text)
            assert format_graph(parsed) == text
            assert records_of(parsed) == records
            parsed.graph.lint()

    def _look(self, step: StepGraph, name: str, stage: Stage | None) -> None:
        self.seen.append(name)
        self.texts.append(format_graph(step))
        self._records.append(records_of(step))
        if stage is not None:
            self.found += [(name, c) for c in complaints(step, stage=stage, limits=self.limits)]


def records_of(step: StepGraph) -> dict[str, Record | None]:
    return {node.name: record_of(node) for node in step.graph.nodes}


@pytest.mark.core
@long.parametrize(("model", "world"), CASES, always=ALWAYS, ids=["-".join(case) for case in CASES])
def test_a_correct_graph_gives_no_complaint_after_any_pass_and_reads_back(model: str, world: str) -> None:
    checked = Checked(model, WORLDS[world])
    assert checked.seen[:2] == ["capture", "insert-collectives"]
    assert len(checked.seen) % 2 == 0  # forward and backward
    assert checked.found == []


@long.parametrize("model", DYNAMIC, always=["tied", "mixed"])
def test_graphs_with_sizes_that_are_symbols_read_back(model: str) -> None:
    assert all("\nsymbol s" in text for text in Checked(model, World(2), dynamic=True).texts)


@long.parametrize("model", ["stack", "tied", "mixed", "uneven"], always=["tied", "mixed"])
def test_ranks_have_the_same_text(model: str) -> None:
    first, last = (Checked(model, World(8, rank=rank)) for rank in (0, 7))
    assert first.texts == last.texts


@long.parametrize("world", ["2x2-mesh", "bf16-sent"], always=["2x2-mesh"])
def test_fsdp2s_messages_give_no_complaint_after_any_pass(world: str) -> None:
    limits = Limits(prefetch=1, reduce_layout=ReduceLayout.FSDP2)
    checked = Checked("stack", WORLDS[world], limits, reduce_layout="fsdp2")
    assert checked.found == []
    assert all(len(node.all_input_nodes) == 1 for node in checked.steps[1].nodes(Role.REDUCE))  # one message each


JOINED = [("stack", world) for world in ("2-ranks", "2x2-mesh", "kept-for-backward", "bf16-sent")]
JOINED += [(model, "2-ranks") for model in ("tied", "twins")]


@long.parametrize(("model", "world"), JOINED, always=[("tied", "2-ranks")], ids=["-".join(case) for case in JOINED])
def test_units_that_share_collectives_give_no_complaint_and_read_back(model: str, world: str) -> None:
    make, inputs = MODELS[model]
    joined = Checked(model, WORLDS[world], bucket_mb=1)
    assert joined.found == []
    for step, alone in zip(joined.steps, capture(make, inputs(), WORLDS[world]), strict=True):
        starts = [len(list(s.nodes(Role.GATHER, Role.REDUCE, Role.REPLICATE))) for s in (step, alone)]
        assert starts[0] < starts[1]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_prefetching_stays_within_its_distance(prefetch: int) -> None:
    make, inputs = MODELS["stack"]
    for step in capture(make, inputs(), World(2), prefetch=prefetch):
        assert len(list(step.nodes(Role.GATHER))) == 3
        assert complaints(step, limits=Limits(prefetch=prefetch)) == []
        if prefetch:
            tighter = complaints(step, limits=Limits(prefetch=prefetch - 1))
            assert {c.rule for c in tighter} == {"unsharded-bytes"} or prefetch > 2


def test_inference_without_a_backward_gives_no_complaint() -> None:
    make, inputs = MODELS["tied"]
    (step,) = capture(make, inputs(), World(2), training=False)
    assert list(step.nodes(Role.GATHER))
    assert complaints(step) == []


@pytest.mark.parametrize("units", [("qkv",), ("qkv", "out")], ids=["one-unit", "two-units"])
def test_views_of_a_split_weight_are_read_before_it_is_resharded(units: tuple[str, ...]) -> None:
    make, inputs = MODELS["fused"]
    for step in capture(make, inputs(), World(2, units=units)):
        assert list(step.nodes(Role.RESHARD))
        assert complaints(step) == []


def test_a_parameter_that_is_sent_as_a_gradient_behind_the_last_step_is_planned() -> None:
    step = graph(Phase.BACKWARD, model="weight-as-gradient", stage=Stage.INSERTED)
    for graph_pass in passes(FSDPOptions())[1:]:
        graph_pass.apply(step, graph_pass.plan(step))
    assert complaints(step) == []


def test_a_unit_with_an_unused_parameter_among_other_units_gives_no_complaint() -> None:
    make, inputs = MODELS["unused"]
    for step in capture(make, inputs(), World(2, units=("first", "second"))):
        assert complaints(step) == []


def test_two_models_whose_modules_have_the_same_names_are_told_apart() -> None:
    make, inputs = MODELS["twins"]
    forward, backward = capture(make, inputs(), World(2, units=("left", "right"), root=False))
    for step in (forward, backward):
        assert len(list(step.nodes(Role.GATHER))) == 4
        assert complaints(step, limits=Limits(prefetch=1)) == []
    assert len(list(backward.nodes(Role.FLAT_GRADIENT))) == 4


def test_saved_parameters_that_are_read_last_by_one_node_are_both_freed_there() -> None:
    step = graph(Phase.BACKWARD, model="norms", world=dataclasses.replace(OPEN, units=tuple("0123")), prefetch=0)
    order = step.order()
    ends = {
        saved: max(order[user] for a in aliases([saved]) for user in a.users) for saved in step.nodes(Role.SAVED_PARAM)
    }
    assert len(set(ends.values())) < len(ends), "weight and bias of a norm"
    freed = {
        gather: min(order[user] for w in waits_of(gather) for user in w.users if role_of(user) is Role.RESHARD)
        for gather in step.nodes(Role.GATHER)
    }
    spans = [(0, end, saved) for saved, end in ends.items()] + [(order[g], end, g) for g, end in freed.items()]
    most = max(sum(result_bytes(n) for b, e, n in spans if b <= at <= e) for at in (order[g] for g in freed))
    assert complaints(step, stage=Stage.FINAL, limits=Limits(unsharded_bytes=most)) == []
    assert complaints(step, stage=Stage.FINAL, limits=Limits(unsharded_bytes=most - 1)) != []


def test_a_view_of_a_saved_parameter_that_nobody_reads_ends_no_budget() -> None:
    step = graph(Phase.BACKWARD, world=OPEN)
    saved = next(step.nodes(Role.SAVED_PARAM))
    with step.graph.inserting_before(next(node for node in step.graph.nodes if node.op != "placeholder")):
        view = step.graph.call_function(torch.ops.aten.view.default, (saved, [-1]))
    view.meta["val"] = saved.meta["val"].view(-1)
    assert complaints(step, limits=Limits(unsharded_bytes=10**9)) == []
