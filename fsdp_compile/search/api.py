"""`plan`: whether a model fits, which way to shard it is the fastest, and what to write."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fsdp_compile._torch.fully_shard import states_below
from fsdp_compile.config.choices import check_world_size
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.hardware import hardware as named_hardware
from fsdp_compile.errors import ConfigError
from fsdp_compile.explain.stand_in import planning_world
from fsdp_compile.fsdp2.module_class import user_class
from fsdp_compile.options import FSDPOptions
from fsdp_compile.search.choice import OPTIMIZERS, Allowed, Ask, Configuration
from fsdp_compile.search.fit import GIVEN, Advice, Fit
from fsdp_compile.search.search import Found, Program, Search, samples_of

RESERVE_SHARE: Final = 0.08
"""Assumed share of a device's memory that no estimate sees: its context, buffers of its libraries, gaps."""
_MORE: Final = (2, 4, 8, 16, 32, 64)
"""How many times as many devices are tried where a model does not fit."""


def plan(  # noqa: PLR0913
    model: nn.Module,
    *args: Any,
    gpus: int,
    tokens_per_step: int,
    hardware: Hardware | None = None,
    memory_gb: float | None = None,
    reserve_gb: float | None = None,
    optimizer: str = "adamw",
    allow: Collection[str] = (),
    options: Mapping[str, Any] | FSDPOptions | None = None,
    **kwargs: Any,
) -> Fit:
    """Searches for the fastest way to train a model in the memory that there is; nothing is run.

    The model is traced without values, a deep one with few of its like blocks. Estimates of time and memory are those
    of `explain`, with gradients of earlier micro-batches and optimizer state in addition.

    Args:
        model: A plain model, on any device, meta included.
        *args: What its forward is called with. Dimension 0 of every tensor is the batch, whose size is searched for.
        gpus: Ranks of the world.
        tokens_per_step: Of all ranks. The first integer tensor with two dimensions or more has the tokens of a sample;
            without one, a sample counts as one token.
        hardware: Device and links, from `fsdp_compile.cost.hardware`, which also says how many devices a host has; or
            those of a `calibrate` file. By default hosts of 8 H100 with a 400 Gb/s port each.
        memory_gb: Of one device, in 1e9 byte; by default that of the hardware.
        reserve_gb: Of that, what is left free for what no estimate sees; by default 8 %, on a CPU nothing.
        optimizer: One of "adamw", "adam", "adagrad", "sgd", "sgd-momentum", whose state counts.
        allow: What is searched, too: "cpu_offload" (shards and optimizer state in host memory) and "int8_gathers"
            (large parameters are gathered in 8 bits, which changes numbers).
        options: As for `explain`, such as `mp_policy`; without those that the search chooses.
        **kwargs: Keyword arguments of its forward.

    Raises:
        ConfigError: For an impossible number or name, or tokens that do not divide over the ranks.
        UnsupportedModelError: If the model cannot be traced, or has graph breaks.

    Example:
        >>> fit = plan(model, tokens, gpus=64, tokens_per_step=4_194_304)
        >>> print(fit.verdict)
    """
    there = hardware or named_hardware()
    checked = _options(FSDPOptions.from_dict(options))
    tokens = _tokens_of_a_sample(args, kwargs)
    check_world_size(gpus, "plan(gpus=...)")
    samples_of(tokens_per_step, gpus, tokens)
    memory_bytes = _positive("memory_gb", memory_gb, there.device.memory.value / 1e9) * 1e9
    share = 0.0 if _is_cpu(there) else RESERVE_SHARE
    reserve_bytes = memory_bytes * share if reserve_gb is None else _positive("reserve_gb", reserve_gb, 0.0) * 1e9
    allowed = _allowed(allow, there)
    state, looks_up = _known(optimizer), checked.embedding == "sharded"
    ask = Ask(gpus, there, memory_bytes, reserve_bytes, tokens_per_step, tokens, state, allowed, looks_up)
    if not isinstance(model, nn.Module) or states_below(model):
        raise ConfigError(
            "the model is sharded already" if isinstance(model, nn.Module) else f"{type(model).__name__} is no module",
            where="plan(model)",
            instead="the plain model, before fully_shard and torch.compile",
        )
    program = Program(model, args, kwargs, checked)
    search = Search(program, ask)
    found = search.run()
    advice = () if found.best else tuple(sorted(_advice(search, found), key=lambda each: each.gpu_s_per_token))
    return Fit(user_class(model).__name__, ask, found, advice, program)


def _advice(search: Search, found: Found) -> Iterator[Advice]:
    """Changes with which some configuration keeps the memory."""
    ask = search.ask
    if Allowed.CPU_OFFLOAD not in ask.allow and not _is_cpu(ask.hardware):
        allowed = dataclasses.replace(ask, allow=(*ask.allow, Allowed.CPU_OFFLOAD))
        made = _least(search, allowed)
        if made.peak_bytes <= ask.memory_bytes:
            change = "keep shards and optimizer state in host memory"
            yield _of(change, {"allow": [name.value for name in allowed.allow]}, made, allowed)
    least_bytes = found.smallest.peak_bytes
    for more in (_more(ask, times) for times in _MORE):
        made = _least(search, more)
        if made.peak_bytes <= ask.memory_bytes:
            change = f"{more.gpus} GPUs in place of {ask.gpus}, {more.tokens_per_step} tokens per step"
            yield _of(change, {"gpus": more.gpus, "tokens_per_step": more.tokens_per_step}, made, more)
        if made.peak_bytes <= ask.memory_bytes or made.peak_bytes >= least_bytes:  # what more devices do not share
            break
        least_bytes = made.peak_bytes
    memory_gb = -(-found.smallest.peak_bytes // 1e6) / 1e3
    reserved = {"reserve_gb": ask.reserve_bytes / 1e9}
    yield _of(f"GPUs with {memory_gb:g} GB each", {"memory_gb": memory_gb, **reserved}, found.smallest, ask)


def _more(ask: Ask, times: int) -> Ask:
    """The same for so many times as many devices, and for more tokens if those of a step do not divide over them."""
    tokens = ask.tokens_per_step * (1 if ask.samples % times == 0 else times)
    return dataclasses.replace(ask, gpus=ask.gpus * times, tokens_per_step=tokens)


def _of(change: str, arguments: Mapping[str, Any], made: Configuration, ask: Ask) -> Advice:
    return Advice(change, arguments, made, ask.gpus * made.step_us * 1e-6 / ask.tokens_per_step)


def _least(search: Search, ask: Ask) -> Configuration:
    """The configuration that takes the least memory, in the host's if that is allowed."""
    with planning_world(ask.gpus):
        return search.elsewhere(ask).smallest()


def _is_cpu(hardware: Hardware) -> bool:
    return (hardware.device.name if hardware.cluster is None else hardware.cluster.device_type) == "cpu"


def _options(options: FSDPOptions) -> FSDPOptions:
    """The options, if the search leaves them as they are and the code to write has them."""
    defaults = FSDPOptions()
    for name in (field.name for field in dataclasses.fields(FSDPOptions)):
        if name not in ("mp_policy", *GIVEN) and getattr(options, name) != getattr(defaults, name):
            raise ConfigError(
                f"the search chooses {name}, or does not know of it",
                where=f"plan(options={{{name!r}: ...}})",
                instead="leave it out, or explain() for a configuration that is chosen",
            )
    if getattr(options.mp_policy, "param_dtype_override_fn", None) is not None:
        raise ConfigError(
            "a function cannot be written into the code for a configuration",
            where="plan(options={'mp_policy': MixedPrecisionPolicy(param_dtype_override_fn=...)})",
            instead="leave it out, or explain() for a configuration that is chosen",
        )
    if getattr(options.mp_policy, "gather_dtype", None) is not None:
        raise ConfigError(
            "the choice of parameters in 8 bits depends on the number of ranks, which the search varies",
            where="plan(options={'mp_policy': MixedPrecision(gather_dtype=...)})",
            instead="leave gather_dtype out and give allow=['int8_gathers'], or explain() for one configuration",
        )
    return options


def _tokens_of_a_sample(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and not leaf.is_floating_point() and leaf.shape[0]:
            return leaf.numel() // leaf.shape[0]
    return 1


def _positive(name: str, given: float | None, default: float) -> float:
    if given is not None and not 0 <= given < float("inf"):
        raise ConfigError(f"{name} cannot be {given}", where=f"plan({name}=...)", instead="a number of 1e9 byte")
    return default if given is None else given


def _known(optimizer: str) -> str:
    if optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"the state of optimizer {optimizer!r} is not known",
            where="plan(optimizer=...)",
            instead=f"one of {', '.join(OPTIMIZERS)}",
        )
    return optimizer


def _allowed(names: Collection[str], hardware: Hardware) -> tuple[Allowed, ...]:
    known = [name.value for name in Allowed]
    if Allowed.CPU_OFFLOAD in names and _is_cpu(hardware):
        raise ConfigError(
            "the memory of a CPU is that of the host",
            where=f"plan(allow={list(names)!r}) with a CPU as hardware",
            instead="without cpu_offload",
        )
    for name in names:
        if name not in known:
            raise ConfigError(f"{name!r} cannot be allowed", where="plan(allow=...)", instead=" or ".join(known))
    return tuple(map(Allowed, dict.fromkeys(names)))
