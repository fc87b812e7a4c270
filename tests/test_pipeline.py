"""The pipeline runs the verifier, and tells it which pass ran last and what was promised."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable

import pytest
from torch import fx

from fsdp_compile import pipeline
from fsdp_compile.errors import InvariantError
from fsdp_compile.ir.graph import Phase, Role, Stage, StepGraph
from fsdp_compile.options import FSDPOptions
from tests.verify import breaks, memory_breaks
from tests.verify.graphs import graph

Edit = Callable[[StepGraph], fx.Node]


@dataclasses.dataclass
class WrongPass:
    """Breaks the graph with one edit of `breaks`, its plan, and remembers where."""

    edit: Edit
    named: fx.Node | None = None
    name = "wrong-pass"
    requires, ensures = Stage.BUCKETED, Stage.FINAL

    def plan(self, _step: StepGraph) -> Edit:
        return self.edit

    def apply(self, step: StepGraph, plan: Edit) -> None:
        self.named = plan(step)


@pytest.fixture
def only_pass(monkeypatch: pytest.MonkeyPatch) -> Callable[[Edit], WrongPass]:
    """Makes the pipeline run one wrong pass and nothing else."""

    def install(edit: Edit) -> WrongPass:
        wrong = WrongPass(edit)
        monkeypatch.setattr(pipeline, "passes", lambda *_, **__: (wrong,))
        return wrong

    return install


@pytest.mark.parametrize(
    ("edit", "phase", "rule"),
    [
        (breaks.wait_moved_after_its_use, Phase.FORWARD, "gather-waited"),
        (breaks.gradient_reduced_twice, Phase.BACKWARD, "reduced-once"),
        (memory_breaks.reshard_deleted, Phase.BACKWARD, "no-use-after-reshard"),
        (breaks.reductions_swapped, Phase.BACKWARD, "plan-order"),
        (memory_breaks.gather_started_too_early, Phase.FORWARD, "unsharded-bytes"),
    ],
)
def test_a_wrong_pass_is_refused(edit: Edit, phase: Phase, rule: str, only_pass: Callable[[Edit], WrongPass]) -> None:
    wrong = only_pass(edit)

    with pytest.raises(InvariantError) as caught:
        pipeline.transform(graph(phase), FSDPOptions(prefetch=1))

    assert f"wrong after wrong-pass\n  {rule}: %{wrong.named} " in str(caught.value)


@pytest.mark.parametrize("prefetch", [*pipeline.KINDS_OF_SCHEDULES, 0])
def test_each_pass_takes_what_the_one_before_it_leaves(prefetch: int | str) -> None:
    every = pipeline.passes(FSDPOptions(prefetch=prefetch))
    assert every[0].requires is None
    assert [one.ensures for one in every[:-1]] == [one.requires for one in every[1:]]
    assert every[-1].ensures is Stage.FINAL


def test_a_correct_graph_is_returned(only_pass: Callable[[Edit], WrongPass]) -> None:
    only_pass(lambda step: step.output)
    step = graph(Phase.BACKWARD)

    assert pipeline.transform(step, FSDPOptions(prefetch=1)) is step
    assert list(step.nodes(Role.GATHER))


@pytest.mark.parametrize("before", [gc.enable, gc.disable])
def test_the_collector_goes_on_after_the_passes_if_it_ran_before(
    before: Callable[[], None], only_pass: Callable[[Edit], WrongPass]
) -> None:
    ran: list[bool] = []

    def fail(_step: StepGraph) -> fx.Node:
        ran.append(gc.isenabled())
        raise ValueError("inside")

    only_pass(fail)
    before()
    is_on = gc.isenabled()
    try:
        with pytest.raises(ValueError, match="inside"):
            pipeline.transform(graph(Phase.BACKWARD), FSDPOptions(prefetch=1))
        assert ran == [False], "a full collection in the middle of the passes takes seconds"
        assert gc.isenabled() is is_on
    finally:
        gc.enable()
