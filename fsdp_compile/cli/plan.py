"""`fsdp-compile plan`: whether a model fits, which way to shard it is the fastest, and what to write."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Final

from fsdp_compile.cli.explain import CONTRACT, link_of, load_model, save_to
from fsdp_compile.config.choices import DEVICES, DTYPES, LINKS, check_name, check_rate, check_world_size
from fsdp_compile.errors import ConfigError

NAME = "plan"
ABOUT = "Say whether a model fits, which configuration is the fastest, and what to write for it; nothing is run."

_DEVICE: Final = "h100-sxm"
_LINK: Final = "ib-400"
_ALLOWED: Final = "cpu_offload: shards in host memory; int8_gathers: large parameters gathered in 8 bits"
_COUNTS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, on which devices, and how much of it in a step."""
    parser.add_argument("model", metavar="PACKAGE.MODULE:FUNCTION", help=f"{CONTRACT}; called under device('meta')")
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="of all hosts together")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="default: as hosts of the device usually have")
    parser.add_argument(
        "--tokens-per-step",
        required=True,
        metavar="N",
        help="of all GPUs together; 4M is 4 * 2**20",
    )
    parser.add_argument("--memory", metavar="80GB", help="of a GPU, 1e9 byte (default: that of the device)")
    parser.add_argument("--reserve", metavar="6GB", help="of that, left free (default: 8 %% of a GPU's memory)")
    parser.add_argument(
        "--device", metavar="NAME", help=f"one of {', '.join(DEVICES)}; h100 is h100-sxm (default: {_DEVICE})"
    )
    parser.add_argument(
        "--link", metavar="NAME", help=f"between hosts: one of {', '.join(LINKS)}; or GB/s per rank (default: {_LINK})"
    )
    parser.add_argument("--hardware", type=Path, metavar="FILE", help="written by fsdp-compile calibrate, instead")
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help="whose state counts (default: adamw)")
    parser.add_argument("--param-dtype", choices=DTYPES, default="bfloat16", help="gathered (default: bfloat16)")
    parser.add_argument("--allow", nargs="+", default=[], metavar="WHAT", help=_ALLOWED)
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the page of explain for the first one")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Searches, and prints what was found.

    Returns:
        0 if the model fits, 1 if it does not.

    Raises:
        ConfigError: If the model cannot be found, or an option has an impossible value.
        UnsupportedModelError: If it cannot be traced.
    """
    device, link = _device(arguments.device or _DEVICE), link_of(arguments.link or _LINK)
    if isinstance(link, float):
        check_rate(link)
    else:
        check_name(link, LINKS, "link")
    check_world_size(arguments.gpus, "--gpus")
    tokens = _count(arguments.tokens_per_step)
    memory_gb, reserve_gb = (_gigabytes(f"--{name}", getattr(arguments, name)) for name in ("memory", "reserve"))
    if arguments.hardware is not None and (arguments.device or arguments.link or arguments.gpus_per_node):
        raise ConfigError(
            "the file says which device and links there are",
            where="--hardware with --device, --link or --gpus-per-node",
            instead="--hardware, or the others",
        )
    # Whatever is refused above is refused without importing torch.
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from fsdp_compile.cost.calibrated import load_hardware
    from fsdp_compile.cost.hardware import hardware
    from fsdp_compile.search.api import plan

    named = hardware(device, link, ranks_per_host=arguments.gpus_per_node)
    with torch.device("meta"):
        model, args, kwargs = load_model(arguments.model)
    fit = plan(
        model,
        *args,
        gpus=arguments.gpus,
        tokens_per_step=tokens,
        hardware=named if arguments.hardware is None else load_hardware(arguments.hardware),
        memory_gb=memory_gb,
        reserve_gb=reserve_gb,
        optimizer=arguments.optimizer,
        allow=arguments.allow,
        options={"mp_policy": MixedPrecisionPolicy(getattr(torch, arguments.param_dtype))},
        **kwargs,
    )
    print(json.dumps(fit.to_dict(), indent=2) if arguments.json else fit, end="\n" if arguments.json else "")
    if arguments.html is not None:
        save_to(arguments.html, fit.save_html)
    return 0 if fit.fits else 1


def _device(name: str) -> str:
    """A device that a command line names, SXM boards also without that."""
    full = name if name in DEVICES else f"{name}-sxm"
    check_name(full if full in DEVICES else name, DEVICES, "device")
    return full


def _count(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if found is None or not int(found[1]):
        raise ConfigError(f"{text} is no number of tokens", where="--tokens-per-step", instead="4M, or 4194304")
    return int(found[1]) * _COUNTS[found[2]]


def _gigabytes(flag: str, text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:GB)?", text, re.IGNORECASE)
    if found is None:
        raise ConfigError(f"{text} is no memory", where=flag, instead="80GB")
    return float(found[1])
