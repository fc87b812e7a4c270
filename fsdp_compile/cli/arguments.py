"""What several commands have: functions that make a model, the hardware to plan for, and how reports are shown."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fsdp_compile.comm.placement import DeviceKind
from fsdp_compile.config.choices import DEVICES, DTYPES, LINKS, check_name, check_rate
from fsdp_compile.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import nn

    from fsdp_compile.cost.hardware import Hardware

_DEVICE: Final = "h100-sxm"
_LINK: Final = "ib-400"
CONTRACT: Final = "a function without arguments that returns (model, args) or (model, args, kwargs)"


def add_backend(parser: argparse._ActionsContainer) -> None:
    """Declares the type of the devices that ranks run on."""
    parser.add_argument(
        "--device",
        choices=[kind.value for kind in DeviceKind],
        default=DeviceKind.AUTO.value,
        help="cpu uses gloo, cuda uses NCCL (default: cuda where every local rank has a GPU)",
    )


def add_hardware(parser: argparse.ArgumentParser, *, per_host: str) -> None:
    """Declares the device and link of a plan, the ranks of a host by a flag of this name, and what is gathered."""
    known = f"one of {', '.join(DEVICES)}; h100 is h100-sxm (default: {_DEVICE})"
    parser.add_argument("--device", type=_device, metavar="NAME", help=known)
    links = f"between hosts: one of {', '.join(LINKS)}; or GB/s per rank, for all groups (default: {_LINK})"
    parser.add_argument("--link", type=_link, metavar="NAME", help=links)
    hosts = "default: as torchrun says, else as hosts usually have"
    parser.add_argument(per_host, type=int, dest="ranks_per_host", metavar="N", help=hosts)
    parser.add_argument("--hardware", type=Path, metavar="FILE", help="written by fsdp-compile calibrate, instead")
    parser.add_argument("--param-dtype", choices=DTYPES, default="bfloat16", help="gathered (default: bfloat16)")


def _device(name: str) -> str:
    return name if name in DEVICES or f"{name}-sxm" not in DEVICES else f"{name}-sxm"


def _link(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def check_hardware(arguments: argparse.Namespace) -> None:
    """Refuses names and numbers that are impossible, before torch is imported."""
    file, link = arguments.hardware, arguments.link
    if file is not None and any(value is not None for value in (arguments.device, link, arguments.ranks_per_host)):
        raise ConfigError(
            "the file says which device and links there are",
            where="--hardware with --device, --link or the ranks of a host",
            instead="--hardware, or the others",
        )
    if file is not None and not file.is_file():
        raise ConfigError(f"there is no file {file}", where="--hardware", instead="one that exists")
    check_name(arguments.device or _DEVICE, DEVICES, "device")
    if isinstance(link, float):
        check_rate(link)
    else:
        check_name(link or _LINK, LINKS, "link")


def hardware_of(arguments: argparse.Namespace) -> Hardware:
    """The hardware that checked arguments name."""
    from fsdp_compile.cost.calibrated import load_hardware
    from fsdp_compile.cost.hardware import hardware

    if arguments.hardware is not None:
        return load_hardware(arguments.hardware)
    link = arguments.link or _LINK
    return hardware(arguments.device or _DEVICE, link, ranks_per_host=arguments.ranks_per_host)


def named_function(path: str, contract: str) -> Callable[..., Any]:
    """The function that a command line names as `package.module:function`.

    Args:
        path: What the user wrote.
        contract: What it should be, for errors.

    Raises:
        ConfigError: If there is none.
    """
    module_name, _, name = path.partition(":")
    instead = f"package.module:function, {contract}"
    if not module_name or not name:
        raise ConfigError(f"{path} does not name a module and a function", instead=instead)
    sys.path.insert(0, "")  # as `python -m` does, so that a file in the current folder is found
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"cannot find {path}: {error}", instead=instead) from error
    if not callable(function):
        raise ConfigError(f"{path} is a {type(function).__name__}", instead=instead)
    return function


def load_model(path: str) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    """Calls the function that a path names, under `torch.device("meta")`."""
    import torch
    from torch import nn

    with torch.device("meta"):
        made = named_function(path, CONTRACT)()
    match made:
        case (nn.Module() as model, tuple() as args):
            return model, args, {}
        case (nn.Module() as model, tuple() as args, Mapping() as kwargs):
            return model, args, kwargs
    raise ConfigError(f"{path} returned {type(made).__name__}", where=path, instead=CONTRACT)


def save_page(path: Path | None, save: Callable[[Path], object]) -> None:
    """Writes a page, if one is asked for; raises `ConfigError` if that is not possible."""
    if path is None:
        return
    try:
        save(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}", instead="a path in a folder that exists") from error
    print(f"wrote {path}", file=sys.stderr)


def show(report: object, parts: Iterable[RenderableType], json_text: str | None) -> None:
    """Prints a report: as JSON if there is a text, by its parts to a terminal, whose width they take, or as text."""
    from rich.console import Console

    if json_text is not None:
        print(json_text)
    elif sys.stdout.isatty():
        console = Console(highlight=False, markup=False)  # names of modules and classes may have brackets
        for part in parts:
            console.print(part)
    else:
        print(report, end="")
