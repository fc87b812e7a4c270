"""`fsdp-compile explain`: what the passes make of a model, without ranks and devices."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fsdp_compile.cli.named import named_function
from fsdp_compile.config.choices import (
    DEVICES,
    DTYPES,
    LINKS,
    LOWER,
    REGIONS,
    SHORT_FORMS,
    check_name,
    check_prefetch,
    check_rate,
    check_world_size,
)
from fsdp_compile.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from fsdp_compile.cost.hardware import Hardware
    from fsdp_compile.explain.plan import Plan

NAME = "explain"
ABOUT = "Show units, collectives, time and memory of a model on any number of ranks; nothing is run."

_DEVICE: Final = "h100-sxm"
_LINK: Final = "ib-400"
_RULES: Final = ", ".join(SHORT_FORMS)
_BUILT_IN: Final = {"width": 1024, "layers": 8, "heads": 16, "seq_len": 2048}
_BATCH: Final = 4
CONTRACT: Final = "a function without arguments that returns (model, args) or (model, args, kwargs)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, for which ranks, and how it is shown."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="PACKAGE.MODULE:FUNCTION",
        help=f"{CONTRACT}; it is called under torch.device('meta') (default: a small Llama)",
    )
    parser.add_argument("--world-size", type=int, default=8, metavar="N", help="ranks to plan for (default: 8)")
    parser.add_argument("--param-dtype", choices=DTYPES, default="bfloat16", help="gathered (default: bfloat16)")
    parser.add_argument(
        "--prefetch",
        type=lambda text: int(text) if text.isdecimal() else text,
        default="auto",
        metavar="N",
        help=f'buckets gathered ahead, "auto" (default) for a planned schedule, or a rule of FSDP1: {_RULES}',
    )
    parser.add_argument("--lower", choices=LOWER, default="inductor", help="default: inductor")
    parser.add_argument(
        "--regions", choices=REGIONS, default="auto", help='"blocks" for a model that is compiled block by block'
    )
    parser.add_argument("--device", metavar="NAME", help=f"one of {', '.join(DEVICES)} (default: {_DEVICE})")
    parser.add_argument(
        "--link",
        metavar="NAME",
        help=f"between hosts: one of {', '.join(LINKS)}; or GB/s per rank, for all groups (default: {_LINK})",
    )
    parser.add_argument(
        "--ranks-per-host", type=int, metavar="N", help="default: as torchrun says, else as hosts usually have"
    )
    parser.add_argument("--hardware", type=Path, metavar="FILE", help="written by fsdp-compile calibrate, instead")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="also write a trace for Perfetto")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Explains a model.

    Raises:
        ConfigError: If the model cannot be found, or an option has an impossible value.
        UnsupportedModelError: If it cannot be traced.
    """
    link = link_of(arguments.link or _LINK)
    _check(arguments, link)
    # Whatever is refused above is refused without importing torch.
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from fsdp_compile.cost.calibrated import load_hardware
    from fsdp_compile.cost.hardware import hardware
    from fsdp_compile.explain.api import explain

    named = hardware(arguments.device or _DEVICE, link, ranks_per_host=arguments.ranks_per_host)
    there = named if arguments.hardware is None else load_hardware(arguments.hardware)
    if isinstance(link, str):
        _check_link(arguments, named)

    with torch.device("meta"):
        model, args, kwargs = _built_in() if arguments.model is None else load_model(arguments.model)
    policy = MixedPrecisionPolicy(getattr(torch, arguments.param_dtype))
    plan = explain(
        model,
        *args,
        world_size=arguments.world_size,
        options={
            "lower": arguments.lower,
            "prefetch": arguments.prefetch,
            "regions": arguments.regions,
            "mp_policy": policy,
        },
        hardware=there,
        **kwargs,
    )
    _show(plan, arguments)
    return 0


def _check(arguments: argparse.Namespace, link: str | float) -> None:
    """Refuses names and numbers that are impossible, before torch is imported."""
    if arguments.hardware is not None:
        _check_file(arguments)
    if isinstance(link, float):
        check_rate(link)
    check_name(arguments.device or _DEVICE, DEVICES, "device")
    if isinstance(link, str):
        check_name(link, LINKS, "link")
    check_prefetch(arguments.prefetch)
    check_world_size(arguments.world_size)


def _check_link(arguments: argparse.Namespace, there: Hardware) -> None:
    """Refuses a network that was chosen, and that no group of ranks uses."""
    if arguments.link is not None and arguments.world_size <= there.local_size:
        raise ConfigError(
            f"the {arguments.world_size} ranks share a host of {there.local_size} and send on its "
            f"{there.device.near.name}; {arguments.link} would be between hosts",
            where="--link",
            instead="a larger --world-size, a smaller --ranks-per-host, or a number: GB/s per rank on every link",
        )


def _check_file(arguments: argparse.Namespace) -> None:
    if any(value is not None for value in (arguments.device, arguments.link, arguments.ranks_per_host)):
        raise ConfigError(
            "the file says which device and links there are",
            where="--hardware with --device, --link or --ranks-per-host",
            instead="--hardware, or the others",
        )
    if not arguments.hardware.is_file():
        raise ConfigError(f"there is no file {arguments.hardware}", where="--hardware", instead="one that exists")


def _show(plan: Plan, arguments: argparse.Namespace) -> None:
    for path, save in ((arguments.html, plan.save_html), (arguments.trace, plan.save_trace)):
        if path is not None:
            save_to(path, save)
    if arguments.json:
        print(json.dumps(plan.to_dict(), indent=2))
    elif sys.stdout.isatty():
        from rich.console import Console

        from fsdp_compile.explain.tables import parts

        console = Console(highlight=False)
        for part in parts(plan):
            console.print(part)
    else:
        print(plan, end="")


def save_to(path: Path, save: Callable[[Path], object]) -> None:
    """Writes a file; raises `ConfigError` if that is not possible."""
    try:
        save(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}", instead="a path in a folder that exists") from error
    print(f"wrote {path}", file=sys.stderr)


def _built_in() -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    import torch

    from fsdp_compile.training.model import Llama, ModelShape

    shape = ModelShape(**_BUILT_IN)
    return Llama(shape), (torch.zeros(_BATCH, shape.seq_len, dtype=torch.long),), {}


def load_model(path: str) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    """Calls the function that a path names."""
    from torch import nn

    made = named_function(path, CONTRACT)()
    match made:
        case (nn.Module() as model, tuple() as args):
            return model, args, {}
        case (nn.Module() as model, tuple() as args, Mapping() as kwargs):
            return model, args, kwargs
    raise ConfigError(f"{path} returned {type(made).__name__}", where=path, instead=CONTRACT)


def link_of(text: str) -> str | float:
    """A link that a command line names, or its rate."""
    try:
        return float(text)
    except ValueError:
        return text
