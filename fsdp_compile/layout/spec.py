"""Unshard specs: what a read of a parameter needs to know, as one string constant of the graph.

Dynamo guards every Python value that a getter touches, so a read has exactly one: the text of an `UnshardSpec`. It
contains neither the unit's nor the parameter's name, so that layers of one shape share one compiled graph, and nothing
specific to a rank, so that all ranks compile the same text. (It does name units to prefetch.)
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from urllib.parse import quote, unquote

import torch

from fsdp_compile._torch.fully_shard_params import HAS_GRAD_DTYPES
from fsdp_compile.layout.hosts import GroupRanks

ROOT = "(root)"
"""Title of the unit of a model's outermost module, which has no name."""
_PREFETCH = ("forward_prefetch", "backward_prefetch")


class Reshard(enum.Enum):
    """When an unsharded parameter is freed."""

    AFTER_FORWARD = "after_forward"
    """Freed after its last use in forward and gathered again in backward (ZeRO-3)."""
    AFTER_BACKWARD = "after_backward"
    """Saved from forward to backward (ZeRO-2, FSDP1's SHARD_GRAD_OP)."""
    AUTO = "auto"
    """Saved where that fits into the memory that a plan may use, else freed (`partition/auto_reshard.py`)."""


class GradPlacement(enum.Enum):
    """Which ranks a gradient is summed over when it is made."""

    REDUCED = "reduced"
    """All of them."""
    REDUCE_SCATTERED = "reduce_scattered"
    """The shard group: each replica accumulates its own sum (FSDP2's `set_requires_all_reduce(False)`)."""
    UNREDUCED = "unreduced"
    """None: the full gradient is accumulated (`no_sync`)."""


class Update(enum.Enum):
    """When the optimizer updates a parameter."""

    AFTER_BACKWARD = "after_backward"
    """When the user calls its step."""
    IN_BACKWARD = "in_backward"
    """As soon as the gradient of its flat parameter is reduced (`step_in_backward`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnshardSpec:
    """Where a parameter lies in its flat parameter, and how it is gathered and reduced.

    Attributes:
        offset: Its first element in each rank's flat parameter.
        extent: Its elements in each rank's flat parameter, alignment padding included.
        shape: Of the full parameter; of this rank's part, if it was split over other ranks before it was sharded.
        dim: The dimension that is sharded; `None` for 0-d parameters, which every rank has whole.
        size: Ranks in the shard group.
        group: Alias of the shard group (`comm/groups.py`), empty if parameters are not sharded.
        replicas: Ranks in the replicate group, 1 if there is none.
        replicate_group: Alias of the replicate group, empty if there is none.
        stride: Distance of neighbours in the shard group, in ranks of the world: how times are estimated depends on it.
        replicate_stride: The same of the replicate group; 1 if there is none.
        param_dtype: Dtype of the unsharded parameter, which is sent unless `gather_format` says otherwise.
        gather_format: Name of the format that is sent (`wire_formats.py`); empty to send `param_dtype`.
        accumulate_dtype: Dtype of gradients that wait for (the rest of) their reduction; `None` for `reduce_dtype`.
        hook: Key of the user's function that reduces gradients over the group; empty for an average.
        order: Dimensions from the outermost to the innermost in the memory of the unsharded parameter (channels last,
            say); empty for a contiguous one. Flat parameters are always contiguous.
        divide: What the sum of gradients is divided by; `None` for the number of ranks.
        post_forward_size: Ranks that together save the unsharded parameter for backward, 1/k each; 1 if none do.
        post_forward_group: Alias of their group, empty if there is none.
        compute: Type of the device that computes with it, if the flat parameter is offloaded to the host; else empty.
        reduce_group: Alias of a second group of the same ranks that gradients are reduced over; empty for `group`.
        forward_prefetch: Titles of the units whose all-gathers start where this one's is complete in forward.
        backward_prefetch: The same in backward.
    """

    offset: int
    extent: int
    shape: tuple[int, ...]
    dim: int | None
    size: int
    group: str
    replicas: int = 1
    replicate_group: str = ""
    stride: int = 1
    replicate_stride: int = 1
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    reshard: Reshard = Reshard.AFTER_FORWARD
    accumulate_dtype: torch.dtype | None = None
    gather_format: str = ""
    order: tuple[int, ...] = ()
    grad_placement: GradPlacement = GradPlacement.REDUCED
    divide: float | None = None
    hook: str = ""
    post_forward_size: int = 1
    post_forward_group: str = ""
    compute: str = ""
    reduce_group: str = ""
    forward_prefetch: tuple[str, ...] = ()
    backward_prefetch: tuple[str, ...] = ()
    update: Update = Update.AFTER_BACKWARD

    @functools.cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of one rank's padded shard: dimension `dim` is `ceil(shape[dim] / size)` on every rank."""
        if self.dim is None:
            return self.shape
        shape = list(self.shape)
        shape[self.dim] = -(-shape[self.dim] // self.size)
        return tuple(shape)

    @property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return math.prod(self.shape)

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, row padding included, alignment padding not."""
        return math.prod(self.shard_shape)

    @property
    def post_forward_numel(self) -> int:
        """Elements of one rank's post-forward shard, padding included."""
        return self.size * self.extent // self.post_forward_size

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of the full parameter with dimension `dim` padded to a multiple of `size`."""
        if self.dim is None:
            return self.shape
        shape = list(self.shard_shape)
        shape[self.dim] *= self.size
        return tuple(shape)

    @property
    def shard_ranks(self) -> GroupRanks:
        """The ranks of the shard group."""
        return GroupRanks(self.size, self.stride)

    @property
    def post_forward_ranks(self) -> GroupRanks:
        """The ranks that together save the unsharded parameter for backward: neighbours in the shard group."""
        return GroupRanks(self.post_forward_size, self.stride)

    @property
    def replicate_ranks(self) -> GroupRanks:
        """The ranks of the replicate group."""
        return GroupRanks(self.replicas, self.replicate_stride)

    @property
    def scatter_group(self) -> str:
        """Alias of the group that gradients are reduce-scattered over."""
        return self.reduce_group or self.group

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype of the all-gather's message: numbers of fewer bits are sent as bytes."""
        return torch.uint8 if self.gather_format else self.param_dtype

    @property
    def unreduced_dtype(self) -> torch.dtype:
        """Dtype of gradients that wait for (the rest of) their reduction."""
        return self.accumulate_dtype or self.reduce_dtype

    @property
    def unrounded_dtype(self) -> torch.dtype:
        """Dtype of gradients that are about to be added to those which wait: where FSDP2 rounds the sum, it alone."""
        own = self.unreduced_dtype
        return own if HAS_GRAD_DTYPES else torch.promote_types(self.param_dtype, own)

    @property
    def summed_dtype(self) -> torch.dtype | None:
        """Dtype in which gradients of several uses are summed, as FSDP2 does since torch 2.15; `None` for their own."""
        own = self.unreduced_dtype
        return None if own.itemsize > self.param_dtype.itemsize else own

    @property
    def is_contiguous(self) -> bool:
        """Whether the message is the unsharded parameter's own memory, so that reading it needs no copy."""
        return self.size == 1 or (self.dim == 0 and self.extent == self.shard_numel)

    @functools.cached_property
    def text(self) -> str:
        """The canonical text, which `parse` reads back."""
        fields = {
            "offset": self.offset,
            "extent": self.extent,
            "shape": "x".join(map(str, self.shape)) or "scalar",
            "dim": "none" if self.dim is None else self.dim,
            "over": f"{self.group}/{self.size}" if self.group else "none",
        }
        if self.replicas > 1:
            fields["replicas"] = f"{self.replicate_group}/{self.replicas}"
        fields["param"] = _dtype_name(self.param_dtype)
        if self.gather_format:
            fields["gather"] = self.gather_format
        fields["reduce"] = _dtype_name(self.reduce_dtype)
        if self.accumulate_dtype is not None:
            fields["accumulate"] = _dtype_name(self.accumulate_dtype)
        if self.hook:
            fields["hook"] = self.hook
        fields["reshard"] = self.reshard.value
        if self.stride != 1:
            fields["stride"] = self.stride
        if self.replicate_stride != _usual_replicate_stride(self.size, self.stride, self.replicas):
            fields["replicate_stride"] = self.replicate_stride
        if self.order:
            fields["order"] = "x".join(map(str, self.order))
        return " ".join(f"{key}={value}" for key, value in (fields | self._set_by_calls()).items())

    def _set_by_calls(self) -> dict[str, object]:
        """The fields that calls on a sharded model have changed."""
        fields: dict[str, object] = {}
        # Defaults are left out, so that graphs of usual models are short to read.
        if self.grad_placement is not GradPlacement.REDUCED:
            fields["grads"] = self.grad_placement.value
        if self.divide is not None:
            fields["divide"] = repr(float(self.divide))
        if self.post_forward_size > 1:
            fields["post_forward"] = f"{self.post_forward_group}/{self.post_forward_size}"
        if self.compute:
            fields["compute"] = self.compute
        if self.reduce_group:
            fields["reduce_over"] = self.reduce_group
        lists = {key: ",".join(quote(name, safe=".()") for name in getattr(self, key)) for key in _PREFETCH}
        fields |= {key: names for key, names in lists.items() if names}
        if self.update is not Update.AFTER_BACKWARD:
            fields["update"] = self.update.value
        return fields


@functools.cache
def parse(text: str) -> UnshardSpec:
    """Reads the text of an `UnshardSpec` back; raises `ValueError` for any other."""
    try:
        fields = dict(item.split("=", 1) for item in text.split(" "))
        group, size = ("", "1") if fields["over"] == "none" else fields["over"].rsplit("/", 1)
        replicate_group, replicas = fields.get("replicas", "/1").rsplit("/", 1)
        post_forward_group, post_forward_size = fields.get("post_forward", "/1").rsplit("/", 1)
        shape = fields["shape"]
        stride = int(fields.get("stride", 1))
        usual = _usual_replicate_stride(int(size), stride, int(replicas))
        spec = UnshardSpec(
            offset=int(fields["offset"]),
            extent=int(fields["extent"]),
            shape=() if shape == "scalar" else tuple(map(int, shape.split("x"))),
            dim=None if fields["dim"] == "none" else int(fields["dim"]),
            size=int(size),
            group=group,
            replicas=int(replicas),
            replicate_group=replicate_group,
            stride=stride,
            replicate_stride=int(fields.get("replicate_stride", usual)),
            param_dtype=_dtype(fields["param"]),
            hook=fields.get("hook", ""),
            gather_format=fields.get("gather", ""),
            reduce_dtype=_dtype(fields["reduce"]),
            accumulate_dtype=_dtype(fields["accumulate"]) if "accumulate" in fields else None,
            reshard=Reshard(fields["reshard"]),
            order=tuple(map(int, fields["order"].split("x"))) if "order" in fields else (),
            grad_placement=GradPlacement(fields.get("grads", GradPlacement.REDUCED.value)),
            divide=float(fields["divide"]) if "divide" in fields else None,
            post_forward_size=int(post_forward_size),
            post_forward_group=post_forward_group,
            compute=fields.get("compute", ""),
            reduce_group=fields.get("reduce_over", ""),
            **{key: tuple(map(unquote, fields[key].split(","))) for key in _PREFETCH if key in fields},
            update=Update(fields.get("update", Update.AFTER_BACKWARD.value)),
        )
    except (KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"not the text of a read: {text!r}") from error
    # One spec has one text: Dynamo and caches of graphs compare texts.
    if spec.text != text or spec.offset < 0 or spec.dim not in (None, *range(len(spec.shape))):
        raise ValueError(f"not the text of a read: {text!r}")
    if spec.order and sorted(spec.order) != list(range(len(spec.shape))):
        raise ValueError(f"not the text of a read: {text!r}")
    return spec


def _usual_replicate_stride(size: int, stride: int, replicas: int) -> int:
    """In a mesh (replicate, shard): replicas are one shard group apart."""
    return size * stride if replicas > 1 else 1


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Divisions around the collectives of a reduction.

    Attributes:
        before: Divisor of each rank's message before the first collective; `None` for none.
        operation: How collectives combine ranks, "avg" or "sum".
        after: Divisor of the sum after the last collective; `None` for none.
    """

    before: float | None
    operation: str
    after: float | None


def scaling(spec: UnshardSpec) -> Scaling:
    """How a sum of a parameter's gradients becomes their average: by the collective, or by divisions around it."""
    # A hook divides by itself; replicas are averaged after it.
    if spec.hook:
        return Scaling(None, "avg", None)
    divisor = float(spec.size * spec.replicas) if spec.divide is None else spec.divide
    if spec.reduce_dtype is torch.float16:
        before = 1.0
        # float16 overflows in a sum over many ranks: a power of two near the square root of the divisor is divided out
        # before, the rest after.
        while divisor % before == 0 and divisor / before > before:
            before *= 2
        return Scaling(_unless_one(before), "sum", _unless_one(divisor / before))
    if spec.divide is None:
        return Scaling(None, "avg", None)
    return Scaling(None, "sum", _unless_one(divisor))


def _unless_one(factor: float) -> float | None:
    return None if factor == 1 else factor
