"""`FSDPOptions`: what `torch.compile(..., backend="fsdp", options={...})` accepts."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Mapping
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

from fsdp_compile.config.choices import LOWER, REGIONS, bad_option, check_prefetch
from fsdp_compile.config.policy import AnyOffloadPolicy as OffloadedBy
from fsdp_compile.config.policy import AnyPrecisionPolicy, WrapPolicy
from fsdp_compile.config.prefetch import FSDPPrefetch, named_rules
from fsdp_compile.cost.calibrated import load_hardware
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.errors import ConfigError
from fsdp_compile.layout.flat_layout import ReduceLayout

SHARDING = (
    "mesh",
    "mp_policy",
    "reshard_after_forward",
    "offload_policy",
    "auto_wrap_policy",
    "sharding_strategy",
    "sync_module_states",
    "separate_reduce_group",
)
"""Options that are arguments of `fully_shard`."""
_BEFORE_COMPILING = ("param_init_fn", "device_id")
"""Arguments of `fully_shard` that are too late in a compile: tracing needs parameters on the device of the inputs."""
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "lower": LOWER,
    "regions": REGIONS,
    "reduce_layout": tuple(ReduceLayout),
    "activations": ("auto", "saved"),
    "embedding": ("gathered", "sharded"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FSDPOptions:
    """Options of one compile; the arguments of `fully_shard` among them are for a plain model.

    Attributes:
        lower: "inductor" for fused kernels; "eager" to run the transformed graphs operator by operator, the
            reference for bitwise parity.
        regions: "whole" compiles a model as few graphs; "blocks" each of its units below the root by itself, so that
            like blocks share one compile, and leaves the root's own code to Python. Graphs of units gather ahead of one
            another, in the order of the step before. "auto" takes blocks for a model with 12 like ones or more (of one
            class, with parameters of the same shapes), unless something was asked for that is of whole graphs
            (`docs/schedule.md`); functions and `model.compile()` are whole. The logger `fsdp_compile.progress` says
            which it took, and why.
        prefetch: "auto" plans by a model of `hardware` when each all-gather starts and when each reduction is waited
            for. A number fixes how many buckets ahead an all-gather starts, in forward and backward: 0 starts each
            where it is needed and waits for each reduction at once, which takes the least memory; each step more has
            one more unit unsharded. `FSDPPrefetch(...)` follows FSDP1's rules, for which torch's `BackwardPrefetch`,
            "BACKWARD_PRE", "BACKWARD_POST" and "none", each with or without "+forward_prefetch", are short forms.
        memory_budget_gb: For `prefetch="auto"`: the most memory of a device in forward or backward at any time, in
            1e9 byte, by the estimate of `explain`: shards, activations, gathered parameters and gradients.
            Optimizer state comes on top, and a graph that is trained has to be all of its model. By default gathered
            parameters and gradients get what is in use at once, and room for one more unit of each.
        activations: Under `memory_budget_gb`: "auto" computes blocks again in backward, as few as it takes, where the
            budget does not hold their activations; "saved" refuses such a budget. A block is what lies between the
            reads of two units. Programs that checkpoint by themselves are left as they are.
        hardware: For `prefetch="auto"`: device and links that times are estimated for, from
            `fsdp_compile.cost.hardware`, or the path of a file that `fsdp-compile calibrate` has written, which must
            have the same content on all ranks. By default chosen by the device that the model is on.
        inductor: Settings of Inductor for this compile, as in `torch._inductor.config`.
        artifacts: A folder into which the first rank writes each graph before and after each pass, with plan and
            difference.
        reduce_layout: "aligned" reduces gradients in the layout of parameter groups, without copies of large ones;
            "fsdp2" in the one message that FSDP2 makes of a unit, so that a backend whose order of additions depends on
            the place in a message (gloo, for three ranks or more) adds as it does there.
        bucket_mb: Units whose messages are small share their collectives with the units after them, up to this many
            1e6 byte of full parameters, or of full gradients; 0 gives every unit collectives of its own. "auto" takes
            four times what the link sends during the latency of a collective; 0 for a fixed distance or lists to
            prefetch, which count units, and under `memory_budget_gb`, since shared buckets are in memory longer. In
            FSDP2's layout reductions are never joined.
        embedding: "sharded" does not gather the tables of `torch.nn.functional.embedding`, and so of `nn.Embedding`:
            each rank sends the ids that it looks up to the ranks that have their rows, and gets the rows; in backward
            the gradients of rows go there. It saves the first gather of forward and the last reduction of backward,
            which nothing hides. Numbers are those of "gathered" where sums over ranks are made in their order (always
            with two). Steps that accumulate unreduced gradients (`no_sync`) gather.
        poison: Fill gathered parameters with NaN where they are freed, and raise `PoisonError` if a message of a
            collective has NaN: what reads freed memory then shows. The host waits for each collective.
        stop_after: Name of the last pass to run, "capture" for none: to find the pass that makes a difference.
        mesh: For a plain model: what `fully_shard(mesh=...)` takes.
        mp_policy: For a plain model: what `fully_shard(mp_policy=...)` takes.
        reshard_after_forward: For a plain model: what `fully_shard(reshard_after_forward=...)` takes.
        offload_policy: For a plain model: what `fully_shard(offload_policy=...)` takes.
        auto_wrap_policy: For a plain model: what `fully_shard(auto_wrap_policy=...)` takes.
        sharding_strategy: For a plain model: what `fully_shard(sharding_strategy=...)` takes.
        sync_module_states: For a plain model: what `fully_shard(sync_module_states=...)` takes.
        separate_reduce_group: For a plain model: what `fully_shard(separate_reduce_group=...)` takes.
    """

    lower: Literal["inductor", "eager"] = "inductor"
    regions: Literal["auto", "whole", "blocks"] = "auto"
    prefetch: int | str | FSDPPrefetch | BackwardPrefetch = "auto"
    memory_budget_gb: float | None = None
    activations: Literal["auto", "saved"] = "auto"
    hardware: Hardware | str | os.PathLike[str] | None = None
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    artifacts: str | os.PathLike[str] | None = None
    reduce_layout: Literal["aligned", "fsdp2"] = "aligned"
    bucket_mb: float | Literal["auto"] = "auto"
    embedding: Literal["gathered", "sharded"] = "gathered"
    poison: bool = False
    stop_after: str | None = None
    mesh: DeviceMesh | None = None
    mp_policy: AnyPrecisionPolicy | None = None
    reshard_after_forward: bool | int | Literal["auto"] | None = None
    offload_policy: OffloadedBy | None = None
    auto_wrap_policy: WrapPolicy | None = None
    sharding_strategy: ShardingStrategy | None = None
    sync_module_states: bool = False
    separate_reduce_group: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise bad_option(name, getattr(self, name), " or ".join(f'"{choice}"' for choice in choices))
        if not isinstance(self.poison, bool):
            raise bad_option("poison", self.poison, "True or False")
        size = self.bucket_mb
        if size != "auto" and (isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size < math.inf):
            raise bad_option("bucket_mb", size, '"auto", 0 for none, or a number of 1e6 byte')
        self._check_schedule()
        if not isinstance(self.inductor, Mapping):
            raise bad_option("inductor", self.inductor, "a dict of settings of torch._inductor.config")
        if self.artifacts is not None and not isinstance(self.artifacts, str | os.PathLike):
            raise bad_option("artifacts", self.artifacts, "the path of a folder")
        if self.mp_policy is not None and not isinstance(self.mp_policy, AnyPrecisionPolicy):
            raise bad_option("mp_policy", self.mp_policy, "a torch.distributed.fsdp.MixedPrecisionPolicy")

    def _check_schedule(self) -> None:
        planned, rules = self.prefetch == "auto", named_rules(self.prefetch)
        if rules is None:
            check_prefetch(self.prefetch)
        else:
            object.__setattr__(self, "prefetch", rules)  # a short form is replaced once it is read
        for name in ("memory_budget_gb", "hardware"):
            if getattr(self, name) is not None and not planned:
                raise ConfigError(
                    f"option {name!r} has no effect on a schedule that is not planned",
                    where=f"options={{{name!r}: ..., 'prefetch': {self.prefetch!r}}}",
                    instead="'prefetch': 'auto', or leave it out",
                )
        if isinstance(self.hardware, str | os.PathLike):
            object.__setattr__(self, "hardware", load_hardware(self.hardware))
        if self.hardware is not None and not isinstance(self.hardware, Hardware):
            raise bad_option("hardware", self.hardware, "fsdp_compile.cost.hardware.hardware(device, link), or a path")
        budget = self.memory_budget_gb
        is_number = isinstance(budget, int | float) and not isinstance(budget, bool)
        if budget is not None and not (is_number and 0 < budget < math.inf):
            raise bad_option("memory_budget_gb", budget, "a positive number of 1e9 byte")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any] | FSDPOptions | None) -> FSDPOptions:
        """Checks what `torch.compile` was given.

        Raises:
            ConfigError: For an unknown name (with the nearest known one) or a value out of range.
        """
        if isinstance(options, FSDPOptions):
            return options
        options = dict(options or {})
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name in known:
                continue
            if name in _BEFORE_COMPILING:
                what = f"{name!r} is no option of a compile: Dynamo has traced the model before a backend could use it"
                instead = f"fully_shard(model, {name}=...) before torch.compile"
            else:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
                what, instead = f"unknown option {name!r}", repr(near[0]) if near else f"one of {', '.join(known)}"
            raise ConfigError(what, where='torch.compile(..., backend="fsdp", options={...})', instead=instead)
        return cls(**options)

    @property
    def may_recompute(self) -> bool:
        """Whether blocks are recomputed where the budget does not hold their activations."""
        return self.memory_budget_gb is not None and self.activations == "auto"

    @property
    def planned_for(self) -> Hardware | None:
        """The hardware that was given, a file of measured times being read."""
        assert self.hardware is None or isinstance(self.hardware, Hardware)
        return self.hardware

    @property
    def sharding(self) -> dict[str, Any]:
        """The arguments for `fully_shard` among the options, without those left at their default."""
        given = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self) if f.name in SHARDING}
        return {name: value for name, (value, default) in given.items() if value is not default}
