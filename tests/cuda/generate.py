"""The code that Inductor writes for the package's graphs on a GPU, generated on a machine without one.

Dynamo traces a hollow model, whose CPU memory was never written, through the real backend: capture, partition, passes
and rules are those of any compile. Each graph is then moved to a fake `cuda:0`, lowered, scheduled and written as code,
which is returned and never run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_compile.lower.inductor
from fsdp_compile.explain.stand_in import hollow, shard_stand_in
from fsdp_compile.fsdp2.module_class import refresh_reads
from fsdp_compile.ir.graph import Phase, Role, StepGraph, require, role_of
from tests.cuda.llama import SMALL, Llama, Sizes
from tests.cuda.pretended_gpu import SM_90, Architecture, pretended_gpu
from tests.fake_world import fake_world

BF16: Mapping[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model in a world of ranks that do not exist."""

    sizes: Sizes = SMALL
    ranks: int = 8
    replicas: int = 1  # of hybrid sharding; 1 for none
    sharding: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # arguments of `fully_shard`
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the backend
    # What a script does with the model before it is sharded.
    before: Callable[[nn.Module], object] = lambda _model: None
    after: Callable[[nn.Module], object] = lambda _model: None  # and afterwards
    dtype: torch.dtype = torch.bfloat16  # of what the model is called with
    autocast: bool = False  # whether it is called under `torch.autocast`
    architecture: Architecture = SM_90


@dataclasses.dataclass(frozen=True)
class Code:
    """One graph as it was planned, and what Inductor wrote for it."""

    planned: StepGraph
    wrapper: str


class _EndError(Exception):
    """All code is there."""


def generate(case: Case) -> dict[Phase, Code]:
    """The wrappers, with their Triton kernels, of the forward and the backward graph of a case."""
    codes: dict[Phase, Code] = {}

    def compile_for_gpu(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        phase = Phase.BACKWARD if kwargs.get("is_backward") else Phase.FORWARD
        planned = StepGraph(gm, phase).copy()
        with pretended_gpu(case.architecture), _writing_only() as written:
            on_gpu, mode = _moved(gm, inputs)
            with torch._guards.tracing(torch._guards.TracingContext(mode)):
                made = real(gm, on_gpu, **kwargs)
        codes[phase] = Code(planned, written[-1])
        return _Lowered(getattr(made, "source_code"))  # noqa: B009  not of every kind of output

    real = fsdp_compile.lower.inductor.compile_fx_inner
    with (
        fake_world(case.ranks),
        mock.patch.object(fsdp_compile.lower.inductor, "compile_fx_inner", compile_for_gpu),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1),
        contextlib.suppress(_EndError),
    ):
        model, sizes = _sharded(case), case.sizes
        compiled = torch.compile(_caller(), backend="fsdp", dynamic=False, options=dict(case.options))
        table = torch.empty(sizes.tokens, sizes.head_width, dtype=case.dtype)
        inputs = torch.zeros(1, sizes.tokens, dtype=torch.long), hollow(table), hollow(table)
        compiled(model, case.autocast, *inputs)
    assert codes, "nothing was compiled"
    return codes


@dataclasses.dataclass
class _Lowered:
    """In place of what Inductor compiled."""

    source_code: str
    _boxed_call: bool = True

    def __call__(self, _args: list[Any]) -> Any:
        raise _EndError


def _sharded(case: Case) -> nn.Module:
    with torch.device("meta"):
        model = Llama(case.sizes)
    case.before(model)
    shape = (case.ranks,) if case.replicas == 1 else (case.replicas, case.ranks // case.replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    taken = shard_stand_in(model, mesh=mesh, **{"reshard_after_forward": True, **case.sharding})
    case.after(model)
    for group in taken.groups:
        refresh_reads(group)
    return model


def _caller() -> Callable[..., Any]:
    def call(model: nn.Module, autocast: bool, *inputs: torch.Tensor) -> Any:  # noqa: FBT001  as Dynamo calls it
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(*inputs)

    # A code object of its own, so that no two cases share what Dynamo compiled.
    return types.FunctionType(call.__code__.replace(), call.__globals__)


def _moved(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[list[Any], Any]:
    """Puts a graph on `cuda:0`, but for shards on the host; returns its inputs there, and their mode."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp
    from torch.utils._pytree import tree_map

    gpu = torch.device("cuda", 0)

    def on_gpu(value: Any) -> Any:
        return gpu if isinstance(value, torch.device) and value.type == "cpu" else value

    for node in gm.graph.nodes:
        node.args, node.kwargs = tree_map(on_gpu, node.args), tree_map(on_gpu, node.kwargs)
        if role_of(node) is Role.OFFLOAD_IN:
            node.update_arg(1, "cuda")
    gm.recompile()
    mode = FakeTensorMode()
    fakes = list(inputs)
    with mode:
        for at, (node, value) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)):
            if isinstance(value, torch.Tensor):
                is_on_host = role_of(node) is Role.FLAT and require(node).specs[0].compute
                device = torch.device("cpu") if is_on_host else gpu
                fakes[at] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*fakes)
    return fakes, mode


@contextlib.contextmanager
def _writing_only() -> Iterator[list[str]]:
    """Inductor writes wrappers, which are added to the list, and does not load them."""
    from torch._inductor.graph import GraphLowering

    written: list[str] = []
    with tempfile.TemporaryDirectory() as folder:

        def compile_to_module(lowering: Any) -> Any:
            written.append(lowering.codegen()[0].value)
            path = Path(folder) / "wrapper.py"
            path.write_text(written[-1])
            lowering.cache_key, lowering.cache_path, lowering.cache_linemap = "none", str(path), []
            return types.SimpleNamespace(call=None, runner=None, runners=[], __file__=str(path))

        # Nothing is recorded either, where CUDA graphs are asked for.
        recording = mock.patch("torch._inductor.output_code.cudagraph_partition_post_compile")
        with mock.patch.object(GraphLowering, "compile_to_module", compile_to_module), recording:
            yield written
