"""What the first call of a plain model goes by: names of torch's frames, Dynamo's paths to inputs, and its restart."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from fsdp_compile.modules.forward import in_forward
from torch import fx, nn
from torch._dynamo import convert_frame, symbolic_convert

from fsdp_compile._torch import dynamo
from fsdp_compile.capture import first_call

pytestmark = pytest.mark.core


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _compile(function: Any, note: Callable[[fx.GraphModule], None]) -> Any:
    """Compiled by a backend that calls `note` while Dynamo compiles."""

    def backend(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        note(gm)
        return gm.forward

    return torch.compile(function, backend=backend)


def _frames() -> list[tuple[str, str]]:
    """Names of the functions on the stack, and the modules of torch that they are in."""
    return [(frame.f_code.co_name, frame.f_globals.get("__name__", "")) for frame in dynamo.stack()]


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("compile_wrapper", "torch._dynamo.eval_frame"),
        ("__call__", "torch._dynamo.eval_frame"),
        ("_call_impl", "torch.nn.modules.module"),
    ],
)
def test_torch_calls_compiled_models_by_this_name(name: str, where: str) -> None:
    seen: list[tuple[str, str]] = []
    _compile(_Model(), lambda _gm: seen.extend(_frames()))(torch.ones(4))
    assert (name, where) in seen
    assert name in (*dynamo.MODULE_CALLS, dynamo.COMPILED_CALL)


@pytest.mark.parametrize("attribute", ["f_locals", "f_globals", "f_code", "speculation_log"])
def test_dynamo_tells_of_the_frame_that_it_compiles_by_this_name(attribute: str) -> None:
    seen: list[bool] = []

    def note(_gm: fx.GraphModule) -> None:
        seen.append(hasattr(symbolic_convert.InstructionTranslator.current_tx(), attribute))

    _compile(_Model(), note)(torch.ones(4))
    assert seen == [True]


def test_a_parameter_is_found_through_the_modules_that_hold_it() -> None:
    model = _Model()
    ways: list[list[nn.Module]] = []

    def note(gm: fx.GraphModule) -> None:
        ways.extend(list(first_call.modules_on_the_way(node)) for node in gm.graph.find_nodes(op="placeholder"))

    def function(x: torch.Tensor) -> torch.Tensor:  # the path to the model starts at its closure
        return model(x)

    _compile(function, note)(torch.ones(4))
    assert [model, model.inner] in [list(dict.fromkeys(way)) for way in ways]


def test_a_path_that_is_no_python_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "source_prefixes", lambda _node: ["no python", "unknown", "[][0]", "{}[0]", "[1]"])
    assert list(dynamo.values_on_the_way(fx.Graph().placeholder("x"))) == [[1]]


def test_the_compiled_model_is_found_on_the_stack() -> None:
    model, found = _Model(), []
    _compile(model, lambda _gm: found.extend(first_call.compiled_modules()))(torch.ones(4))
    assert found[0] is model


def test_dynamo_traces_again_when_told_to_and_forgets_earlier_graph_breaks() -> None:
    calls, model = [], _Model()

    def note(_gm: fx.GraphModule) -> None:
        calls.append(in_forward())
        if len(calls) == 1:
            raise first_call.trace_again()

    assert _compile(model, note)(torch.ones(4)).tolist() == [2.0] * 4
    assert calls == [False, True]  # until the outermost call returns, reads gather by themselves
    assert not in_forward()


def test_frames_that_compile_are_told_by_their_file() -> None:
    callers = []
    _compile(_Model(), lambda _gm: callers.append(dynamo.caller_of_root_frame()))(torch.ones(4))
    assert callers[0] is not None
    assert callers[0].f_code.co_filename != convert_frame.__file__


def test_a_frame_is_on_the_stack_until_it_returns() -> None:
    def inner() -> Any:
        frame = inspect.currentframe()
        assert frame is not None
        assert dynamo.is_on_stack(frame)
        return frame

    assert not dynamo.is_on_stack(inner())
    assert dynamo.is_on_stack(sys._getframe())
