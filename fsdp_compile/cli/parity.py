"""`fsdp-compile parity`: compares the compiled model with an eager reference, on real processes."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

from fsdp_compile.cli.arguments import named_function, show
from fsdp_compile.config.choices import DTYPES, LOWER, Accumulation, Level, Reference, check_counts
from fsdp_compile.errors import ParityError, RankFailedError

if TYPE_CHECKING:
    from torch import Tensor, nn

NAME = "parity"
ABOUT = "Train the compiled model beside an eager one on real processes and compare every number."

_CONTRACT: Final = "a function without arguments that returns a module"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the model, the reference, the ranks, and what is shown."""
    parser.add_argument(
        "model",
        nargs="?",
        default="fsdp_compile.cli.parity:make_model",
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
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from fsdp_compile.parity.api import check_parity

    batch = arguments.batch or f"{arguments.model.partition(':')[0]}:make_batch"
    dtypes = {name: getattr(arguments, name) for name in ("param_dtype", "reduce_dtype")}
    status = 0
    try:
        report = check_parity(
            named_function(arguments.model, _CONTRACT),
            named_function(batch, "a function from the number of a step to a batch"),
            world_size=arguments.world_size,
            reference=arguments.reference,
            level=arguments.level,
            **counts,
            accumulation=arguments.accumulation,
            replicas=arguments.replicas,
            reshard_after_forward=not arguments.keep,
            mp_policy=MixedPrecisionPolicy(**{name: dtype and getattr(torch, dtype) for name, dtype in dtypes.items()}),
            options={"lower": arguments.lower} if arguments.lower else {},
            bisect=arguments.bisect,
        )
    except ParityError as error:
        report, status = error.report, 1
    except RankFailedError as error:
        print(error, file=sys.stderr)
        return 1
    show(report, report.parts(), report.to_json() if arguments.json else None)
    return status


_SEQUENCE: Final = 32


def make_model() -> nn.Module:
    """The model that is compared when none is named: a small Llama over bytes that returns its own loss."""
    import torch.nn.functional as F
    from torch import nn

    from fsdp_compile.training.model import Llama, ModelShape

    class LanguageModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llama = Llama(ModelShape(width=64, layers=3, heads=4, seq_len=_SEQUENCE))

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            """The mean cross-entropy of the next byte, in nats."""
            return F.cross_entropy(self.llama(tokens).flatten(0, 1).float(), targets.flatten())

    return LanguageModel()


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Random bytes and those that follow them, `[16, 32]` each."""
    import torch

    from fsdp_compile.training.model import VOCABULARY

    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, VOCABULARY, (16, _SEQUENCE + 1), generator=generator)
    return text[:, :-1], text[:, 1:]
