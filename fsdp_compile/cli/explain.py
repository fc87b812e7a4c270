"""`fsdp-compile explain`: what the passes make of a model, without ranks and devices."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_compile.cli.arguments import CONTRACT, add_hardware, check_hardware, hardware_of, load_model, save_page, show
from fsdp_compile.config.choices import LOWER, REGIONS, SHORT_FORMS, check_prefetch, check_world_size
from fsdp_compile.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

NAME = "explain"
ABOUT = "Show units, collectives, time and memory of a model on any number of ranks; nothing is run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, for which ranks, and how it is shown."""
    parser.add_argument(
        "model",
        nargs="?",
        default="fsdp_compile.cli.explain:small_llama",
        metavar="PACKAGE.MODULE:FUNCTION",
        help=f"{CONTRACT}; it is called under torch.device('meta') (default: a small Llama)",
    )
    parser.add_argument("--world-size", type=int, default=8, metavar="N", help="ranks to plan for (default: 8)")
    parser.add_argument(
        "--prefetch",
        type=lambda text: int(text) if text.isdecimal() else text,
        default="auto",
        metavar="N",
        help='buckets gathered ahead, "auto" (default) for a planned schedule, or a rule of FSDP1: '
        f"{', '.join(SHORT_FORMS)}",
    )
    parser.add_argument("--lower", choices=LOWER, default="inductor", help="default: inductor")
    parser.add_argument(
        "--regions", choices=REGIONS, default="auto", help='"blocks" for a model that is compiled block by block'
    )
    add_hardware(parser, per_host="--ranks-per-host")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Explains a model.

    Raises:
        ConfigError: If the model cannot be found, or an option has an impossible value.
        UnsupportedModelError: If it cannot be traced.
    """
    check_hardware(arguments)
    check_prefetch(arguments.prefetch)
    check_world_size(arguments.world_size)
    # Whatever is refused above is refused without importing torch.
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from fsdp_compile.explain.api import explain
    from fsdp_compile.explain.tables import parts

    there = hardware_of(arguments)
    if isinstance(arguments.link, str) and arguments.world_size <= there.local_size:
        raise ConfigError(
            f"the {arguments.world_size} ranks share a host of {there.local_size} and send on its "
            f"{there.device.near.name}; {arguments.link} would be between hosts",
            where="--link",
            instead="a larger --world-size, a smaller --ranks-per-host, or a number: GB/s per rank on every link",
        )
    model, args, kwargs = load_model(arguments.model)
    options = {name: getattr(arguments, name) for name in ("lower", "prefetch", "regions")}
    options["mp_policy"] = MixedPrecisionPolicy(getattr(torch, arguments.param_dtype))
    plan = explain(model, *args, world_size=arguments.world_size, options=options, hardware=there, **kwargs)
    save_page(arguments.html, plan.save_html)
    show(plan, parts(plan), json.dumps(plan.to_dict(), indent=2) if arguments.json else None)
    return 0


def small_llama() -> tuple[nn.Module, tuple[Tensor]]:
    """The model that is explained when none is named."""
    import torch

    from fsdp_compile.training.model import Llama, ModelShape

    shape = ModelShape(width=1024, layers=8, heads=16, seq_len=2048)
    return Llama(shape), (torch.zeros(4, shape.seq_len, dtype=torch.long),)
