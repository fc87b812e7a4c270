"""`fsdp-compile parity`: compares the compiled model with an eager reference, on real processes."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

from fsdp_compile.cli.named import named_function
from fsdp_compile.config.choices import DTYPES, LOWER, Accumulation, Level, Reference, check_counts
from fsdp_compile.errors import ParityError, RankFailedError

if TYPE_CHECKING:
    import torch

    from fsdp_compile.parity.compare import ParityReport

NAME = "parity"
ABOUT = "Train the compiled model beside an eager one on real processes and compare every number."

_BUILT_IN: Final = "fsdp_compile.cli.parity_model:make_model"
_CONTRACT: Final = "a function without arguments that returns a module"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the model, the reference, the ranks, and what is shown."""
    parser.add_argument(
        "model",
        nargs="?",
        default=_BUILT_IN,
        metavar="PACKAGE.MODULE:FUNCTION",
        help=f"{_CONTRACT} (default: a small Llama)",
    )
    parser.add_argument(
        "--batch",
        metavar="PACKAGE.MODULE:FUNCTION",
        help="from the number of a step to the batch of all ranks (default: make_batch of the model's module)",
    )
    parser.add_argument("--world-size", type=int, default=2, metavar="N", help="processes to start (default: 2)")
    parser.add_argument("--reference", choices=list(Reference), default=Reference.FSDP2, help="default: fsdp2")
    parser.add_argument(
        "--level", choices=list(Level), default=Level.BITWISE, help="bitwise runs without Inductor (default: bitwise)"
    )
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps (default: 3)")
    parser.add_argument("--micro-batches", type=int, default=1, metavar="N", help="backwards per step (default: 1)")
    parser.add_argument(
        "--accumulation", choices=list(Accumulation), default=Accumulation.REDUCE_EACH, help="default: reduce-each"
    )
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="ranks with the same shard (default: 1)")
    parser.add_argument("--keep", action="store_true", help="keep gathered parameters for backward (ZeRO-2)")
    parser.add_argument("--param-dtype", choices=DTYPES, help="of gathered parameters (default: their own)")
    parser.add_argument("--reduce-dtype", choices=DTYPES, help="of reduced gradients (default: as gathered)")
    parser.add_argument("--lower", choices=LOWER, help="default: as the level says")
    parser.add_argument("--bisect", action="store_true", help="name the pass that introduces a difference")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Compares; returns 0 if the two are equal, 1 if they differ or a rank failed.

    Raises:
        ConfigError: If a function cannot be found, or an option has an impossible value.
    """
    counts = {"steps": arguments.steps, "micro_batches": arguments.micro_batches}
    check_counts(arguments.world_size, arguments.replicas, **counts)
    # Whatever is refused above is refused without importing torch.
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from fsdp_compile.parity.api import check_parity

    module = arguments.model.partition(":")[0]
    try:
        report = check_parity(
            named_function(arguments.model, _CONTRACT),
            named_function(
                arguments.batch or f"{module}:make_batch", "a function from the number of a step to a batch"
            ),
            world_size=arguments.world_size,
            reference=arguments.reference,
            level=arguments.level,
            **counts,
            accumulation=arguments.accumulation,
            replicas=arguments.replicas,
            reshard_after_forward=not arguments.keep,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=_dtype(arguments.param_dtype), reduce_dtype=_dtype(arguments.reduce_dtype)
            ),
            options={"lower": arguments.lower} if arguments.lower else {},
            bisect=arguments.bisect,
        )
    except ParityError as error:
        _show(error.report, arguments)
        return 1
    except RankFailedError as error:
        print(error, file=sys.stderr)
        return 1
    _show(report, arguments)
    return 0


def _show(report: ParityReport, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(report.to_json())
    elif sys.stdout.isatty():
        from rich.console import Console

        console = Console(highlight=False, markup=False)
        for part in report.parts():
            console.print(part)
    else:
        print(report, end="")


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    return None if name is None else getattr(torch, name)
