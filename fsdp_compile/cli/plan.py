"""`fsdp-compile plan`: whether a model fits, which way to shard it is the fastest, and what to write."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Final

from fsdp_compile.cli.arguments import CONTRACT, add_hardware, check_hardware, hardware_of, load_model, save_page
from fsdp_compile.errors import ConfigError

NAME = "plan"
ABOUT = "Say whether a model fits, which configuration is the fastest, and what to write for it; nothing is run."

_ALLOWED: Final = "cpu_offload: shards in host memory; int8_gathers: large parameters gathered in 8 bits"
_COUNTS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, on which devices, and how much of it in a step."""
    parser.add_argument("model", metavar="PACKAGE.MODULE:FUNCTION", help=f"{CONTRACT}; called under device('meta')")
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="of all hosts together")
    parser.add_argument("--tokens-per-step", required=True, metavar="N", help="of all GPUs together; 4M is 4 * 2**20")
    parser.add_argument("--memory", metavar="80GB", help="of a GPU, 1e9 byte (default: that of the device)")
    parser.add_argument("--reserve", metavar="6GB", help="of that, left free (default: 8 %% of a GPU's memory)")
    add_hardware(parser, per_host="--gpus-per-node")
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help="whose state counts (default: adamw)")
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
    check_hardware(arguments)
    tokens = _count(arguments.tokens_per_step)
    memory_gb, reserve_gb = (_gigabytes(f"--{name}", getattr(arguments, name)) for name in ("memory", "reserve"))
    # Whatever is refused above is refused without importing torch.
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from fsdp_compile.search.api import plan

    there = hardware_of(arguments)
    model, args, kwargs = load_model(arguments.model)
    fit = plan(
        model,
        *args,
        gpus=arguments.gpus,
        tokens_per_step=tokens,
        hardware=there,
        memory_gb=memory_gb,
        reserve_gb=reserve_gb,
        optimizer=arguments.optimizer,
        allow=arguments.allow,
        options={"mp_policy": MixedPrecisionPolicy(getattr(torch, arguments.param_dtype))},
        **kwargs,
    )
    print(f"{json.dumps(fit.to_dict(), indent=2)}\n" if arguments.json else fit, end="")
    save_page(arguments.html, fit.save_html)
    return 0 if fit.fits else 1


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
