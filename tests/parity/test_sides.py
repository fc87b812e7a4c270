"""The reference sides of a comparison, and what counts as a difference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from fsdp_compile._torch.distributed import timeout_of
from fsdp_compile.parity.compare import Extent, Quantity, compare
from fsdp_compile.parity.experiment import Experiment, Level, Reference
from fsdp_compile.parity.sides import CastParameters, _mesh
from fsdp_compile.parity.train import train_both
from tests.models.matrix import MODELS, make_batch
from tests.ranks import on_ranks, run_ranks

_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class _Reentrant(nn.Module):
    """Backward runs through the recomputed graph itself."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 3)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return checkpoint(self.second, x, use_reentrant=True) if self.recompute else self.second(x)


@pytest.mark.core
@pytest.mark.parametrize(
    "make", [MODELS["plain"], MODELS["tied"], MODELS["repeated"], _Reentrant], ids=lambda make: make.__name__
)
def test_recomputation_reads_the_same_cast_parameters(make: Callable[..., nn.Module]) -> None:
    found = []
    for recompute in (True, False):
        torch.manual_seed(0)
        model = make(recompute=recompute)
        cast = CastParameters(model, _BF16)
        for step in range(2):
            cast(make_batch(step)).float().square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    for again, kept in zip(*found, strict=True):
        assert again is not None
        assert again.dtype == torch.float32
        assert torch.equal(again, kept)


class _Pair(NamedTuple):
    x: torch.Tensor
    scale: torch.Tensor


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.layer(x.to(self.layer.weight.dtype)) * scale


def _pairs(step: int) -> _Pair:
    generator = torch.Generator().manual_seed(step)
    return _Pair(torch.randn(8, 16, generator=generator), torch.randn(8, 8, generator=generator))


def _experiment(**changes: Any) -> Experiment:
    settings: dict[str, Any] = {"make_model": _Scaled, "make_batch": _pairs, "reference": Reference.FSDP1, "steps": 2}
    return Experiment(**settings | changes)


def _shard_in_bfloat16(model: nn.Module, fully_shard: Any) -> None:
    fully_shard(model, mp_policy=_BF16)


def _drawn(_step: int) -> _Pair:
    return _Pair(torch.randn(8, 16), torch.randn(8, 8))


class _Normed(nn.Module):
    """A checkpointed batch norm, whose running statistics are updated twice in eager code and once when compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: self.layer(self.norm(y)), x, use_reentrant=False)


class _Counting(torch.optim.SGD):
    """Keeps numbers beside tensors: of the reference 1.5 in each step, of the compiled side 2.5."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moved"] = 2.5 if hasattr(parameter, "to_local") else 1.5


def _counting(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return _Counting(parameters, lr=0.1)


_LOOSE: dict[str, Any] = {"level": Level.TOLERANCE, "options": {"lower": "eager"}}
_NORMED: dict[str, Any] = {"make_model": _Normed, "make_batch": make_batch}
_BUFFERS = {f"buffer of norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
_NUMBERS = {f"optimizer state of layer.{name}.moved" for name in ("weight", "bias")}
_BF16_REDUCTION = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
_NO_CAST = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
CASES = {
    "a reduction in bfloat16": _experiment(mp_policy=_BF16_REDUCTION, steps=1),
    "inputs are not cast": _experiment(mp_policy=_NO_CAST, steps=1),
    "prepared in bfloat16": _experiment(reference=Reference.SINGLE, prepare=_shard_in_bfloat16, steps=1, **_LOOSE),
    "a batch that each rank draws": _experiment(make_batch=_drawn, reference=Reference.SINGLE, **_LOOSE),
    "buffers of FSDP2": _experiment(**_NORMED, reference=Reference.FSDP2),
    "buffers of FSDP1": _experiment(**_NORMED),
    "buffers within bounds": _experiment(**_NORMED | _LOOSE, reference=Reference.FSDP2),
    "numbers of an optimizer": _experiment(reference=Reference.SINGLE, optimizer=_counting, **_LOOSE),
}
DIFFERENT: dict[str, tuple[set[str], set[str]]] = {
    "buffers of FSDP2": (_BUFFERS, _BUFFERS),
    "buffers of FSDP1": (_BUFFERS, _BUFFERS),
    "buffers within bounds": (_BUFFERS, set()),
    "numbers of an optimizer": (_NUMBERS, _NUMBERS),
}
"""Which of the buffers and numbers of an experiment differ, and what exceeds its level, if anything does."""


@pytest.mark.parametrize("name", CASES)
def test_policies_and_batches_reach_both_sides_and_everything_is_compared(name: str) -> None:
    found = run_ranks(train_both, CASES[name])[0]
    named = [(f"{d.quantity.value} of {d.name}", d) for d in found]
    differing = {text for text, d in named if d.different} & (_BUFFERS | _NUMBERS)
    assert (differing, {text for text, d in named if d.exceeds}) == DIFFERENT.get(name, (set(), set()))


@on_ranks(world_size=4)
def test_groups_of_replicas_wait_no_longer_than_the_world() -> None:
    mesh = _mesh(_experiment(world_size=4, replicas=2))
    assert dist.group.WORLD is not None
    world, replicas, shards = [timeout_of(group) for group in (dist.group.WORLD, mesh.get_group(0), mesh.get_group(1))]
    assert world == replicas == shards


@pytest.mark.parametrize("one", [torch.tensor([1.0, math.nan]), torch.ones(2, dtype=torch.bfloat16), torch.ones(3)])
def test_what_cannot_be_compared_exceeds_every_bound(one: torch.Tensor) -> None:
    difference = compare(Quantity.LOSS, "loss", 0, one, torch.tensor([1.0, 2.0]))
    assert difference.absolute == math.inf
    assert dataclasses.replace(difference, bound=1e9).exceeds


def test_nan_on_both_sides_is_no_difference() -> None:
    both = torch.tensor([math.nan, 1.0])
    assert compare(Quantity.LOSS, "loss", 0, both, both.clone()).different == 0


def test_the_parts_of_complex_numbers_are_compared_each() -> None:
    theirs = torch.tensor([1 + 2j, 3 - 4j, complex(math.nan, 1)])
    assert compare(Quantity.GRADIENT, "w", 0, theirs.conj(), theirs.conj().resolve_conj()).different == 0
    ours = theirs + torch.tensor([0, 0.5j, 0])
    difference = compare(Quantity.GRADIENT, "w", 0, ours, theirs)
    assert (difference.different, difference.numel, difference.absolute, difference.relative) == (1, 6, 0.5, 0.125)
    assert difference.ulps == 0.5 / (4 * torch.finfo(torch.float32).eps)
    half = compare(Quantity.GRADIENT, "w", 0, theirs + torch.tensor([0, 0, 1j]), theirs)
    assert half.absolute == 1  # beside a part that is NaN on both sides


def test_the_bound_of_a_path_grows_with_the_root_of_the_steps() -> None:
    extent = Extent(depth=10, length=64, elements=1000, dtype=torch.float32)
    assert extent.path(3) == pytest.approx(2 * extent.path(0))
    assert extent.path(1) > extent.path(0) > extent.sum() > 0


def test_narrow_results_may_differ_by_their_own_rounding() -> None:
    wide, narrow = (Extent(10, 64, 1000, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert narrow.sum() > 100 * wide.sum()
