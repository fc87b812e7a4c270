"""What `plan` returns: whether a model fits, how fast it is, and what to write."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_compile.config.policy import AnyPrecisionPolicy, as_mixed_precision
from fsdp_compile.cost.hardware import DEVICES, LINKS, Hardware, hardware
from fsdp_compile.errors import BudgetTooSmallError
from fsdp_compile.explain.api import explain
from fsdp_compile.explain.stand_in import planning_world
from fsdp_compile.explain.tables import Table, as_text, page, size, time, to_plain
from fsdp_compile.options import FSDPOptions
from fsdp_compile.search.choice import OPTIMIZERS, Ask, Choice, Configuration, Form, Offload, Part
from fsdp_compile.search.search import TOLERANCE, Found, Program

GIVEN: Final = ("lower", "prefetch", "bucket_mb", "embedding", "reduce_layout", "activations")
"""Options that a caller may give, with values that are plain."""

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fsdp_compile.explain.plan import Plan


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
        """What to write for the first configuration; empty if none fits."""
        return _code(self.best[0], self.ask, self.program) if self.fits else ""

    def explain(self) -> Plan:
        """The plan of the first configuration, or of the smallest if none fits, as `explain` makes it of all blocks."""
        return _explained(self.best[0] if self.fits else self.found.smallest, self.ask, self.program)

    def save_html(self, path: str | Path) -> Path:
        """Writes the page of `explain` for the first configuration, and returns its path."""
        target = Path(path)
        target.write_text(page(self.explain(), "\n".join(self._answer())), encoding="utf-8")
        return target

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, ready for JSON; units are in the names of the fields."""
        ask = {
            "gpus": self.ask.gpus,
            "device": self.ask.hardware.device.name,
            "links": self.ask.hardware.links,
            "links_measured": self.ask.hardware.cluster is not None,
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
        shown = self.best or (self.found.smallest,)
        yield _speed(shown, "the fastest" if self.fits else "the least memory").text()
        yield _memory(shown).text()
        yield from self._sources()

    def _sources(self) -> Iterator[str]:
        ask, cluster = self.ask, self.ask.hardware.cluster
        links = f"{ask.hardware.links}, {'not measured' if cluster is None else f'measured in {cluster.file}'}"
        yield f"All times and sizes are estimates; nothing was run. Device {ask.hardware.device.name}; links: {links}."
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


def _code(first: Configuration, ask: Ask, program: Program) -> str:
    """The calls that make a configuration, ready to paste."""
    choice, device = first.choice, ask.hardware.device
    cluster = ask.hardware.cluster
    kind = cluster.device_type if cluster is not None else "cpu" if device.name == "cpu" else "cuda"
    policy = _policy(choice, program)
    imports = {"torch.distributed.device_mesh": ["init_device_mesh"], "fsdp_compile": ["fully_shard"]}
    shape = (choice.replicas, choice.shards) if choice.replicas > 1 else (choice.shards,)
    names = ("replicate", "shard") if choice.replicas > 1 else ("shard",)
    arguments = ["mesh=mesh", f"reshard_after_forward={choice.reshard_after_forward!r}"]
    if policy is not None:
        kind_of = type(policy)
        home = "fsdp_compile" if kind_of.__module__.startswith("fsdp_compile") else "torch.distributed.fsdp"
        imports.setdefault(home, []).append(kind_of.__name__)
        given = {each.name: getattr(policy, each.name) for each in dataclasses.fields(policy)}
        changed = {name: value for name, value in given.items() if value != getattr(kind_of(), name)}
        kept = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        arguments.append(f"mp_policy={kind_of.__name__}({kept})")
    if choice.offload is Offload.CPU:
        imports.setdefault("torch.distributed.fsdp", []).append("CPUOffloadPolicy")
        arguments.append("offload_policy=CPUOffloadPolicy()")
    options = {name: repr(value) for name, value in _options(first, program).items()}
    if choice.form is Form.WHOLE and program.options.prefetch == "auto":
        named = _named(ask.hardware)
        options["hardware"] = named
        if named.startswith("hardware("):
            imports["fsdp_compile.cost.hardware"] = ["hardware"]
    said = ", ".join(f'"{name}": {value}' for name, value in options.items())
    lines = ["import torch", *(f"from {name} import {', '.join(what)}" for name, what in sorted(imports.items()))]
    lines += [
        "",
        f"mesh = init_device_mesh({kind!r}, {shape}, mesh_dim_names={names})",
        f"fully_shard(model, {', '.join(arguments)})",
        f'compiled = torch.compile(model, backend="fsdp", options={{{said}}})',
        f"optimizer = {OPTIMIZERS[ask.optimizer].call}",
        f"# a step: {choice.accumulation} times forward and backward of {choice.micro_batch} samples on each rank",
    ]
    return "\n".join(lines) + "\n"


def _policy(choice: Choice, program: Program) -> AnyPrecisionPolicy:
    """The dtypes, with that of the gathers."""
    policy = program.options.mp_policy
    return dataclasses.replace(as_mixed_precision(policy), gather_dtype=torch.int8) if choice.gather_format else policy


def _options(first: Configuration, program: Program) -> dict[str, Any]:
    """Options of the compile: those that were given, and those that were chosen."""
    given = {name: getattr(program.options, name) for name in GIVEN}
    changed = {name: value for name, value in given.items() if value != getattr(FSDPOptions, name)}
    budget = {} if first.budget_gb is None else {"memory_budget_gb": first.budget_gb}
    return {**changed, "regions": first.choice.form.value, **budget}


def _named(there: Hardware) -> str:
    """An expression for hardware: the file of a calibration, names, or else the variable that the caller has."""
    if there.cluster is not None:
        return repr(there.cluster.file)
    device, ranks = there.device.name, there.ranks_per_host
    for link in (there.link.name, there.link.rate.value / 1e9):
        is_known = device in DEVICES and (link in LINKS or isinstance(link, float))
        if is_known and hardware(device, link, ranks_per_host=ranks) == there:
            return f"hardware({device!r}, {link!r}, ranks_per_host={ranks})"
    return "hardware"


def _explained(first: Configuration, ask: Ask, program: Program) -> Plan:
    choice = first.choice

    args, kwargs = program.with_batch(choice.micro_batch)
    with planning_world(ask.gpus):
        several = choice.replicas > 1
        shape = (choice.replicas, choice.shards) if several else (choice.shards,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard") if several else ("shard",))
        chosen = dataclasses.replace(
            program.options,
            mesh=mesh,
            reshard_after_forward=choice.reshard_after_forward,
            mp_policy=_policy(choice, program),
            offload_policy=CPUOffloadPolicy() if choice.offload is Offload.CPU else None,
            memory_budget_gb=first.budget_gb,
            regions=choice.form.value,
        )
        try:
            return explain(program.model, *args, options=chosen, hardware=ask.hardware, **kwargs)
        except BudgetTooSmallError as error:  # all blocks may take more than the estimate by few of them
            enough = dataclasses.replace(chosen, memory_budget_gb=math.ceil(error.least_bytes / 1e3) / 1e6)
            return explain(program.model, *args, options=enough, hardware=ask.hardware, **kwargs)
