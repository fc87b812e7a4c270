"""Kernels and derivatives of the operators that need run-time state; `ops/` has their schemas.

Reads are traced: their derivatives are written into graphs. The kernels run where graphs have them: `update`, and the
markers of graphs whose passes were told to stop early.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdp_compile._torch.autograd import set_gradient_dtype
from fsdp_compile._torch.dynamo import skip_code
from fsdp_compile.comm.failures import explained
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.fsdp2 import edge
from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.layout.profiler_ranges import Range, profiled
from fsdp_compile.layout.spec import ROOT, GradPlacement, parse
from fsdp_compile.ops import effects  # noqa: F401  the schema of `update`
from fsdp_compile.ops.embedding import reduced_rows
from fsdp_compile.ops.unshard import reduced_gradient

_LIBRARY = torch.library.Library("fsdp_compile", "FRAGMENT")


@torch.library.impl("fsdp_compile::reduce_grad", "CompositeExplicitAutograd", lib=_LIBRARY)
@torch.compiler.disable
def _reduce_grad(
    flat: torch.Tensor,
    grad: torch.Tensor,
    spec: str,
    unsharded_accumulated_grad: torch.Tensor | None = None,
    partial_reduce_output: torch.Tensor | None = None,
) -> torch.Tensor:
    read, group = parse(spec), ParamGroup.of(flat)
    if group is not None:
        edge.mark_produced(group, [read.offset])
        if unsharded_accumulated_grad is not None:
            unsharded_accumulated_grad = group.pending.take(GradPlacement.UNREDUCED, [read.offset])
        if partial_reduce_output is not None:
            partial_reduce_output = group.pending.take(GradPlacement.REDUCE_SCATTERED, [read.offset])
    unit = ROOT if group is None else group.title
    with profiled(Range.REDUCE, [unit]), explained(f"reducing a gradient of unit {unit}"):
        return reduced_gradient(flat, grad, read, unsharded_accumulated_grad, partial_reduce_output)


@torch.library.impl("fsdp_compile::reduce_rows", "CompositeExplicitAutograd", lib=_LIBRARY)
@torch.compiler.disable
def _reduce_rows(
    flat: torch.Tensor,
    grad: torch.Tensor,
    ids: torch.Tensor,
    spec: str,
    padding_idx: int,
    scale_grad_by_freq: bool,  # noqa: FBT001
) -> torch.Tensor:
    group = ParamGroup.of(flat)
    if group is not None:
        edge.mark_produced(group, [parse(spec).offset])
    with profiled(Range.REDUCE, [] if group is None else [group.title]):
        return reduced_rows(flat, grad, ids, spec, padding_idx, scale_grad_by_freq)


@torch.library.impl("fsdp_compile::update", "CompositeExplicitAutograd", lib=_LIBRARY)
@torch.compiler.disable
def _update(flat: torch.Tensor, gradient: torch.Tensor, offsets: Sequence[int]) -> None:
    group = ParamGroup.of(flat)
    assert group is not None  # the compiled step has checked
    group.updates.receive(gradient, offsets)


def _save_read(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    # Not through save_for_backward(): saved-tensor hooks may return a copy, which has another address than the group's.
    ctx.flat, ctx.spec, _, _, ctx.accumulated, ctx.partial = inputs
    set_gradient_dtype(ctx, parse(ctx.spec).summed_dtype)


def _gradient_of_read(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the inputs of `fsdp_compile::unshard`: of the flat tensor, or of the accumulator, the fourth."""
    if grad.layout is not torch.strided:
        shape = "x".join(map(str, parse(ctx.spec).shape))
        raise UnsupportedModelError(
            "a parameter gets a sparse gradient, and gradients are reduced in full",
            where=f"the parameter of shape {shape}, in nn.Embedding(sparse=True) or nn.EmbeddingBag(sparse=True)",
            instead="sparse=False; options={'embedding': 'sharded'} keeps a large table from being gathered",
        )
    gradient = torch.ops.fsdp_compile.reduce_grad(ctx.flat, grad, ctx.spec, ctx.accumulated, ctx.partial)
    if parse(ctx.spec).grad_placement is GradPlacement.REDUCED:
        return gradient, None, None, None, None, None
    return None, None, None, gradient, None, None


def _refuse_double_backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:  # noqa: ARG001
    raise edge.double_backward("in a graph")


def _save_look_up(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    ctx.flat, ids, *ctx.settings = inputs
    ctx.save_for_backward(ids)


def _gradient_of_look_up(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    return torch.ops.fsdp_compile.reduce_rows(ctx.flat, grad, ids, *ctx.settings), None, None, None, None


for _function in (_save_read, _save_look_up):
    skip_code(_function.__code__)

torch.library.register_autograd("fsdp_compile::unshard", _gradient_of_read, setup_context=_save_read)
torch.library.register_autograd("fsdp_compile::reduce_grad", _refuse_double_backward, lib=_LIBRARY)
torch.library.register_autograd("fsdp_compile::look_up", _gradient_of_look_up, setup_context=_save_look_up)
torch.library.register_autograd("fsdp_compile::reduce_rows", _refuse_double_backward, lib=_LIBRARY)
