"""The policies that users choose: dtypes, offload, units."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import MixedPrecision as FSDP1MixedPrecision
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.nn.modules.batchnorm import _BatchNorm

from fsdp_compile.errors import ConfigError
from fsdp_compile.layout.wire_formats import ASKED


@dataclasses.dataclass(frozen=True)
class MixedPrecision(MixedPrecisionPolicy):
    """FSDP2's `MixedPrecisionPolicy`, and the options that FSDP1 had beyond it.

    Its fields are inherited, with what they mean in the installed torch.

    Attributes:
        buffer_dtype: Dtype of floating-point buffers. They are cast when the module is sharded; state dicts have them
            in their original dtype. `None` leaves them.
        full_precision_classes: Parameters and buffers of modules of these classes keep their own dtype, in the
            all-gather, in computation and in the reduction. Such a module's inputs are cast to it, and its outputs back
            to the dtype of its inputs. By default batch norms, as in FSDP1.
        full_precision_in_eval: A module in eval mode reads its parameters in their own dtype, and its buffers are
            restored; inputs are not cast.
        keep_low_precision_grads: `.grad` is left in `param_dtype`. Such gradients are summed in the parameter's dtype
            and rounded after each backward. The optimizer must accept them.
        gather_dtype: `torch.int8` or `torch.float8_e4m3fn` to send large parameters in 8 bits, with one scale for each
            128 elements, or "mxfp8", with one for each 32: 1.03 bytes each instead of `param_dtype`'s. "nvfp4" sends
            0.56 bytes. Parameters whose share per rank is below 16 KiB are sent in `param_dtype`.
            `layout/wire_formats.py` has the error: at most 1/254 of the block's largest magnitude for int8, 1/28 for
            float8, 1/14 for mxfp8, and about 1/6 for nvfp4. `None` sends `param_dtype`.
        cast_root_forward_inputs: `cast_forward_inputs` for the outermost sharded module; `None` for the same as for any
            other.
    """

    buffer_dtype: torch.dtype | None = None
    full_precision_classes: tuple[type[nn.Module], ...] = (_BatchNorm,)
    full_precision_in_eval: bool = False
    keep_low_precision_grads: bool = False
    gather_dtype: torch.dtype | str | None = None
    cast_root_forward_inputs: bool | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ConfigError(
                    f"{name} is {dtype!r}",
                    where=f"MixedPrecision({name}=...)",
                    instead="a floating-point dtype such as torch.bfloat16, or None to keep the dtype",
                )
        if self.gather_dtype is not None and self.gather_dtype not in ASKED:
            raise ConfigError(
                f"gather_dtype is {self.gather_dtype!r}",
                where="MixedPrecision(gather_dtype=...)",
                instead=f"one of {', '.join(map(repr, ASKED))}, or None to send param_dtype",
            )
        classes = self.full_precision_classes
        if not isinstance(classes, tuple) or not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
            raise ConfigError(
                f"full_precision_classes is {classes!r}",
                where="MixedPrecision(full_precision_classes=...)",
                instead="a tuple of module classes, such as (torch.nn.BatchNorm2d,)",
            )


AnyPrecisionPolicy = MixedPrecisionPolicy | FSDP1MixedPrecision | None
"""Every type that `fully_shard(mp_policy=...)` takes; `None`, FSDP1's default, casts nothing."""


def as_mixed_precision(policy: AnyPrecisionPolicy) -> MixedPrecision:
    """Any of the three policies, as ours: same numbers, same casts.

    Raises:
        ConfigError: If it is none of them, or one of its dtypes is no floating-point dtype.
    """
    if isinstance(policy, MixedPrecision):
        return policy
    if policy is None:
        policy = MixedPrecisionPolicy()
    if isinstance(policy, MixedPrecisionPolicy):
        # FSDP2 excludes no module.
        return MixedPrecision(**as_dict(policy), full_precision_classes=())
    if isinstance(policy, FSDP1MixedPrecision):
        return MixedPrecision(
            policy.param_dtype,
            policy.reduce_dtype or policy.param_dtype,
            None,
            policy.cast_forward_inputs,
            buffer_dtype=policy.buffer_dtype,
            full_precision_classes=tuple(policy._module_classes_to_ignore),
            keep_low_precision_grads=policy.keep_low_precision_grads,
            cast_root_forward_inputs=policy.cast_root_forward_inputs,
        )
    raise ConfigError(
        f"mp_policy is a {type(policy).__name__}",
        where="fully_shard(mp_policy=...)",
        instead="torch.distributed.fsdp.MixedPrecisionPolicy, or fsdp_compile.MixedPrecision",
    )


def as_dict(policy: MixedPrecisionPolicy) -> dict[str, Any]:
    """What this torch's `MixedPrecisionPolicy` takes, as a policy, or one of a derived class, has it."""
    return {field.name: getattr(policy, field.name) for field in dataclasses.fields(MixedPrecisionPolicy)}


AnyOffloadPolicy = OffloadPolicy | CPUOffload | None
"""FSDP2's policies, FSDP1's `CPUOffload` or `None`."""


def as_offload(policy: object) -> OffloadPolicy:
    """Any of torch's policies, as FSDP2's. Raises `ConfigError` for others."""
    if policy is None or (isinstance(policy, CPUOffload) and not policy.offload_params):
        return OffloadPolicy()
    if isinstance(policy, CPUOffload):
        return CPUOffloadPolicy()
    if isinstance(policy, CPUOffloadPolicy) or type(policy) is OffloadPolicy:
        return policy
    raise ConfigError(
        f"offload_policy is a {type(policy).__name__}",
        where="fully_shard(offload_policy=...)",
        instead="torch.distributed.fsdp.CPUOffloadPolicy(), or leave it out: parameters stay on their device",
    )


WrapPolicy = ModuleWrapPolicy | CustomPolicy | Callable[..., bool]
