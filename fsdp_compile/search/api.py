"""`plan`: whether a model fits, which way to shard it is the fastest, and what to write."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils._pytree import tree_leaves

from fsdp_compile._torch.fully_shard import states_below
from fsdp_compile.config.choices import check_world_size
from fsdp_compile.config.policy import as_mixed_precision
from fsdp_compile.cost.hardware import DEVICES, LINKS, Hardware
from fsdp_compile.cost.hardware import hardware as named_hardware
from fsdp_compile.errors import BudgetTooSmallError, ConfigError
from fsdp_compile.explain.api import explain
from fsdp_compile.explain.stand_in import planning_world
from fsdp_compile.explain.tables import Table, as_text, page, size, time, to_plain
from fsdp_compile.fsdp2.module_class import user_class
from fsdp_compile.options import FSDPOptions
from fsdp_compile.search.choice import OPTIMIZERS, Allowed, Ask, Configuration, Form, Offload, Part
from fsdp_compile.search.search import TOLERANCE, Found, Program, Search, samples_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fsdp_compile.explain.plan import Plan

GIVEN: Final = ("lower", "prefetch", "bucket_mb", "embedding", "reduce_layout", "activations")
"""Options that a caller may give, with values that are plain."""
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
    if optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"the state of optimizer {optimizer!r} is not known",
            where="plan(optimizer=...)",
            instead=f"one of {', '.join(OPTIMIZERS)}",
        )
    looks_up = checked.embedding == "sharded"
    ask = Ask(gpus, there, memory_bytes, reserve_bytes, tokens_per_step, tokens, optimizer, allowed, looks_up)
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
    for times in _MORE:
        # More tokens, too, if those of a step do not divide over the devices.
        tokens = ask.tokens_per_step * (1 if ask.samples % times == 0 else times)
        more = dataclasses.replace(ask, gpus=ask.gpus * times, tokens_per_step=tokens)
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


def _of(change: str, arguments: Mapping[str, Any], made: Configuration, ask: Ask) -> Advice:
    return Advice(change, arguments, made, ask.gpus * made.step_us * 1e-6 / ask.tokens_per_step)


def _least(search: Search, ask: Ask) -> Configuration:
    """The configuration that takes the least memory, in the host's if that is allowed."""
    with planning_world(ask.gpus):
        return search.elsewhere(ask).smallest()


def _is_cpu(hardware: Hardware) -> bool:
    return hardware.data_sheet.name == "cpu"


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
        is_batch = isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[0]
        if is_batch and not leaf.is_floating_point() and leaf.dtype is not torch.bool:  # of masks
            return leaf.numel() // leaf.shape[0]
    return 1


def _positive(name: str, given: float | None, default: float) -> float:
    if given is not None and not 0 <= given < float("inf"):
        raise ConfigError(f"{name} cannot be {given}", where=f"plan({name}=...)", instead="a number of 1e9 byte")
    return default if given is None else given


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


@dataclasses.dataclass(frozen=True)
class Advice:
    """A change with which a model fits.

    Attributes:
        change: In words.
        arguments: Of `plan`, to be changed.
        result: The configuration that takes the least memory then.
        gpu_s_per_token: What it costs: seconds of all devices for one token.
    """

    change: str
    arguments: Mapping[str, Any]
    result: Configuration
    gpu_s_per_token: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """Whether a model fits, the fastest configurations, and what to write; `print` it, or read it as data.

    Attributes:
        title: Class of the model.
        ask: What was asked for.
        found: The configurations that keep the memory, the fastest first, and the smallest of all.
        advice: If none keeps it, what would make the model fit, the cheapest first.
        program: The model and its inputs.
    """

    title: str
    ask: Ask
    found: Found
    advice: tuple[Advice, ...]
    program: Program = dataclasses.field(repr=False)

    @property
    def best(self) -> tuple[Configuration, ...]:
        """The fastest configurations that keep the memory; none if the model does not fit."""
        return self.found.best

    @property
    def fits(self) -> bool:
        """Whether some configuration keeps the memory."""
        return bool(self.best)

    @property
    def verdict(self) -> str:
        """One line."""
        memory = self.ask.memory_bytes
        if self.fits:
            return f"fits: {self.best[0].peak_bytes / 1e9:.3g} of {memory / 1e9:.3g} GB per GPU"
        short = size(self.found.smallest.peak_bytes - memory)
        return f"does not fit: short by {short} per GPU; what would make it fit, in order of cost:"

    @property
    def code(self) -> str:
        """What to write for the first configuration, ready to paste; empty if none fits."""
        if not self.fits:
            return ""
        first, choice, there = self.best[0], self.best[0].choice, self.ask.hardware
        given, imports = self.program.options, {"torch", "fsdp_compile"}
        (shape, names), device_type = choice.mesh, "cpu" if _is_cpu(there) else "cuda"
        arguments = "".join(f", {name}={_written(value, imports)}" for name, value in self._sharding.items())
        changed = {name: getattr(given, name) for name in GIVEN if getattr(given, name) != getattr(FSDPOptions, name)}
        changed["regions"] = choice.form.value
        if first.budget_gb is not None:
            changed["memory_budget_gb"] = first.budget_gb
        options = {name: _written(value, imports) for name, value in changed.items()}
        notes = [
            f"a step: {choice.accumulation} times forward and backward of {choice.micro_batch} samples on each rank"
        ]
        if choice.form is Form.WHOLE and given.prefetch == "auto":
            options["hardware"] = _named(there, imports)
            if there.cluster is not None and there.cluster.ranks != self.ask.gpus:
                notes.append(
                    f"the file is of {there.cluster.ranks} ranks: run fsdp-compile calibrate on {self.ask.gpus}"
                )
        said = ", ".join(f'"{name}": {value}' for name, value in options.items())
        lines = [
            *(f"import {name}" for name in sorted(imports)),
            "",
            f"mesh = torch.distributed.init_device_mesh({device_type!r}, {shape}, mesh_dim_names={names})",
            f"fsdp_compile.fully_shard(model, mesh=mesh{arguments})",
            f'compiled = torch.compile(model, backend="fsdp", options={{{said}}})',
            f"optimizer = {OPTIMIZERS[self.ask.optimizer].call}",
            *(f"# {note}" for note in notes),
        ]
        return "\n".join(lines) + "\n"

    @property
    def _shown(self) -> tuple[Configuration, ...]:
        return self.best or (self.found.smallest,)

    @property
    def _sharding(self) -> dict[str, Any]:
        """The arguments of `fully_shard` for the first configuration, except for its mesh."""
        choice, policy = self._shown[0].choice, self.program.options.mp_policy
        if choice.gather_format:
            policy = dataclasses.replace(as_mixed_precision(policy), gather_dtype=torch.int8)
        offload = CPUOffloadPolicy() if choice.offload is Offload.CPU else None
        made = {"reshard_after_forward": choice.reshard_after_forward, "mp_policy": policy, "offload_policy": offload}
        return {name: value for name, value in made.items() if value is not None}

    def explain(self) -> Plan:
        """The plan of the first configuration, or of the smallest if none fits, as `explain` makes it of all blocks."""
        first = self._shown[0]
        args, kwargs = self.program.with_batch(first.choice.micro_batch)
        with planning_world(self.ask.gpus):
            shape, names = first.choice.mesh
            chosen = dataclasses.replace(
                self.program.options,
                mesh=init_device_mesh("cpu", shape, mesh_dim_names=names),
                **self._sharding,
                memory_budget_gb=first.budget_gb,
                regions=first.choice.form.value,
            )
            try:
                return explain(self.program.model, *args, options=chosen, hardware=self.ask.hardware, **kwargs)
            except BudgetTooSmallError as error:  # all blocks may take more than the estimate by few of them
                enough = dataclasses.replace(chosen, memory_budget_gb=math.ceil(error.least_bytes / 1e3) / 1e6)
                return explain(self.program.model, *args, options=enough, hardware=self.ask.hardware, **kwargs)

    def save_html(self, path: str | Path) -> Path:
        """Writes the page of `explain` for the first configuration, and returns its path."""
        target = Path(path)
        target.write_text(page(self.explain(), "\n".join(self._answer())), encoding="utf-8")
        return target

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, ready for JSON; units are in the names of the fields."""
        there = self.ask.hardware
        ask = {
            "gpus": self.ask.gpus,
            "device": there.device.name,
            "links": there.links,
            "links_measured": there.measured_links,
            "memory_bytes": self.ask.memory_bytes,
            "reserve_bytes": self.ask.reserve_bytes,
            "tokens_per_step": self.ask.tokens_per_step,
            "optimizer": self.ask.optimizer,
            "allow": [name.value for name in self.ask.allow],
        }
        advice = [
            {
                "change": each.change,
                "arguments": to_plain(each.arguments),
                "gpu_s_per_token": each.gpu_s_per_token,
                **each.result.to_dict(),
            }
            for each in self.advice
        ]
        return {
            "title": self.title,
            "verdict": self.verdict,
            "fits": self.fits,
            "asked": ask,
            "best": [each.to_dict() for each in self.best],
            "smallest": self.found.smallest.to_dict(),
            "advice": advice,
            "priced": self.found.priced,
            "code": self.code,
        }

    def __str__(self) -> str:
        # The code is not wrapped.
        return as_text(self._parts(), width=110) + f"\nTo write, for the first:\n\n{self.code}" * self.fits

    def _answer(self) -> Iterator[str]:
        """The verdict, and what would make the model fit."""
        yield self.verdict
        for number, advice in enumerate(self.advice, 1):
            cost = f"{advice.gpu_s_per_token * 1e6:.3g} GPU seconds per million tokens"
            yield f"  {number}. {advice.change}: {size(advice.result.peak_bytes)} per GPU, {cost}"

    def _parts(self) -> Iterator[RenderableType]:
        yield from self._answer()
        yield ""
        yield _speed(self._shown, "the fastest" if self.fits else "the least memory").text()
        yield _memory(self._shown).text()
        yield from self._sources()

    def _sources(self) -> Iterator[str]:
        there = self.ask.hardware
        device = there.device.name + ("" if there.cluster is None else f", measured in {there.cluster.file}")
        links = f"{there.links}; measured: {' and '.join(there.measured_links) or 'none'}"
        yield f"All times and sizes are estimates; nothing was run. Device: {device}. Links: {links}."
        if self.found.stack is not None:
            yield f"The {self.found.stack.blocks} blocks of {self.found.stack.name} are alike; few of them were traced."
        if self.fits:
            share = f"{100 * TOLERANCE:.0f} %"
            yield f"{self.found.priced} configurations were priced; no other one is faster by more than {share}."


def _speed(shown: tuple[Configuration, ...], title: str) -> Table:
    columns = (
        "", "shard x replica", "reshard", "batch x steps", "recompute", "graphs", "step ", "tokens/s ", "MFU ",
    )  # fmt: skip
    rows = []
    for number, c in enumerate(shown, 1):
        choice = c.choice
        rows.append((
            str(number),
            f"{choice.shards} x {choice.replicas}",
            ", ".join((
                str(choice.reshard_after_forward),
                *(["offload"] if choice.offload is Offload.CPU else []),
                *([choice.gather_format] if choice.gather_format else []),
            )),
            f"{choice.micro_batch} x {choice.accumulation}",
            f"{c.recomputed} of {c.blocks}" if c.recomputed else "no",
            choice.form.value,
            time(c.step_us),
            f"{c.tokens_per_s:,.0f}",
            f"{100 * c.mfu:.1f} %",
        ))  # fmt: skip
    return Table(title, columns, rows)


def _memory(shown: tuple[Configuration, ...]) -> Table:
    columns = ("", "peak ", *(f"{part.value} " for part in Part))
    rows = [(str(n), size(c.peak_bytes), *(size(c.memory[part]) for part in Part)) for n, c in enumerate(shown, 1)]
    return Table("memory of a GPU at its peak", columns, rows)


def _written(value: Any, imports: set[str]) -> str:
    """Python for a value of an option; adds the modules that it takes."""
    if isinstance(value, type):
        # The outermost module that has it is the public one; a class of a function is in none.
        modules = itertools.accumulate(value.__module__.split("."), "{}.{}".format)
        names = value.__qualname__.split(".")
        of = lambda held, name: getattr(held, name, None)  # noqa: E731
        home = next((m for m in modules if functools.reduce(of, names, sys.modules.get(m)) is value), None)
        if home is None:
            return value.__name__
        imports.add(home)
        return f"{home}.{value.__qualname__}"
    if isinstance(value, enum.Enum):
        return f"{_written(type(value), imports)}.{value.name}"
    if isinstance(value, list | tuple):
        return f"({''.join(f'{_written(each, imports)}, ' for each in value).rstrip()})"
    if dataclasses.is_dataclass(value):
        values = {each.name: (getattr(value, each.name), each.default) for each in dataclasses.fields(value)}
        kept = [f"{name}={_written(of, imports)}" for name, (of, default) in values.items() if of != default]
        return f"{_written(type(value), imports)}({', '.join(kept)})"
    return repr(value)


def _named(there: Hardware, imports: set[str]) -> str:
    """An expression for hardware: the file of a calibration, names, or else the variable that the caller has."""
    if there.cluster is not None:
        return repr(there.cluster.file)
    device, ranks = there.device.name, there.ranks_per_host
    for link in (there.link.name, there.link.rate.value / 1e9):
        is_known = device in DEVICES and (link in LINKS or isinstance(link, float))
        if is_known and named_hardware(device, link, ranks_per_host=ranks) == there:
            imports.add(named_hardware.__module__)
            return f"{named_hardware.__module__}.hardware({device!r}, {link!r}, ranks_per_host={ranks})"
    return "hardware"
