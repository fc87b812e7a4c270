"""Loss curves of a sharded run and of one process on the same batches, over hundreds of steps.

Two runs that round differently drift apart, and training amplifies that. Other runs show by how much without any
sharding: one process again, with the rows of each batch in other orders, which changes nothing but the order of sums,
and with as many parts of each batch as there are ranks, one after the other. In float64 all of them must agree to
about nine digits more: what then remains is no matter of rounding.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.command import finish, parser
from fsdp_compile.parity.processes import run_on_ranks
from fsdp_compile.training.config import TrainConfig
from fsdp_compile.training.data import draw_batch, read_corpus
from fsdp_compile.training.model import Llama, ModelShape
from fsdp_compile.training.trainer import BETAS

_TIMEOUT_S = 600
PLOT = Path(__file__).parent.parent / "docs" / "parity_long_run.png"


@dataclasses.dataclass(frozen=True)
class LongRun:
    """What is trained.

    Attributes:
        config: Model, batches, optimizer.
        ranks: Of the sharded run.
        lower: How its graphs run, as in `FSDPOptions`.
        dtype: Of parameters and everything computed from them.
        orders: Runs of one process with the rows in another order.
    """

    config: TrainConfig
    ranks: int
    lower: str
    dtype: torch.dtype
    orders: int


def main(argv: Sequence[str] | None = None) -> int:
    """Trains several times, writes the JSON and the picture, and prints the largest differences."""
    arguments = _parser().parse_args(argv)
    run = _run_of(arguments)
    losses = {"one process": _single(run, lambda rows: rows)}
    for name, order in _orders(run):
        losses[f"one process, {name}"] = _single(run, order)
    losses[f"one process, {run.ranks} parts"] = _single(run, lambda rows: rows, parts=run.ranks)
    losses[f"{run.ranks} ranks, compiled"] = run_on_ranks(_sharded, run, run.ranks, timeout_s=_TIMEOUT_S)
    reference = losses["one process"]
    results = []
    for name, curve in losses.items():
        differences = [abs(a - b) for a, b in zip(curve, reference, strict=True)]
        results.append({"run": name, "largest_difference": max(differences), "last_loss": curve[-1], "loss": curve})
        print(f"{name:<28} last loss {curve[-1]:.4f}, largest difference {max(differences):.3g} nats per byte")
    _plot(losses, arguments.plot)
    settings = {"ranks": run.ranks, "lower": run.lower, "config": dataclasses.asdict(run.config)}
    return finish(arguments, settings, results)


def _parser() -> argparse.ArgumentParser:
    made = parser("long_run", (__doc__ or "").splitlines()[0])
    made.add_argument("--steps", type=int, default=500, metavar="N", help="optimizer steps (default: 500)")
    made.add_argument("--ranks", type=int, default=4, metavar="N", help="of the sharded run (default: 4)")
    made.add_argument("--lower", choices=["inductor", "eager"], default="inductor", help="default: inductor")
    made.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="default: float32")
    made.add_argument("--orders", type=int, default=1, metavar="N", help="runs with rows in another order (default: 1)")
    made.add_argument("--plot", type=Path, default=PLOT, metavar="FILE", help="the picture (default: in docs/)")
    return made


def _run_of(arguments: argparse.Namespace) -> LongRun:
    small: dict[str, Any] = {"width": 48, "layers": 2, "heads": 2, "seq_len": 48, "batch_size": 16}
    config = TrainConfig(steps=4 if arguments.smoke else arguments.steps, **small)
    return LongRun(config, arguments.ranks, arguments.lower, getattr(torch, arguments.dtype), arguments.orders)


def _orders(run: LongRun) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Other orders of a batch's rows, the reverse one first."""
    generator = torch.Generator().manual_seed(0)
    last = torch.arange(run.config.batch_size - 1, -1, -1)
    for index in range(run.orders):
        rows = last if index == 0 else torch.randperm(run.config.batch_size, generator=generator)
        yield ("rows reversed" if index == 0 else f"rows shuffled ({index})"), functools.partial(_rows, rows)


def _rows(chosen: Tensor, batch: Tensor) -> Tensor:
    return batch[chosen]


def _single(run: LongRun, order: Callable[[Tensor], Tensor], parts: int = 1) -> list[float]:
    model = _model(run)
    return _train(run.config, model, model, order, parts=parts).tolist()


def _sharded(run: LongRun) -> list[float]:
    torch.set_num_threads(1)
    model = _model(run)
    compiled: Any = torch.compile(model, backend="fsdp", options={"lower": run.lower})
    losses = _train(run.config, model, compiled, lambda rows: rows, rank=dist.get_rank(), ranks=run.ranks)
    dist.all_reduce(losses)
    return (losses / run.ranks).tolist()


def _model(run: LongRun) -> Llama:
    config = run.config
    torch.manual_seed(config.seed)
    shape = ModelShape(width=config.width, layers=config.layers, heads=config.heads, seq_len=config.seq_len)
    return Llama(shape).to(run.dtype)


def _train(
    config: TrainConfig,
    model: nn.Module,
    call: Callable[[Tensor], Tensor],
    order: Callable[[Tensor], Tensor],
    *,
    rank: int = 0,
    ranks: int = 1,
    parts: int = 1,
) -> Tensor:
    """The training of `fsdp-compile train`, with nothing around it; a step adds the gradients of `parts` of its rows.

    Returns:
        This rank's loss of every step, float64 `[steps]`, nats per byte.
    """
    corpus = read_corpus(config.data, config.seq_len)
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=config.weight_decay)
    losses = []
    for step in range(1, config.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_of(step)
        drawn = draw_batch(config, corpus.train, step, rank=rank, ranks=ranks)
        tokens, targets = (order(half) for half in drawn)
        optimizer.zero_grad()
        shares = []
        for part, wanted in zip(tokens.chunk(parts), targets.chunk(parts), strict=True):
            share = F.cross_entropy(call(part).flatten(0, 1), wanted.flatten()) / parts
            share.backward()
            shares.append(share.detach().double())
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        losses.append(torch.stack(shares).sum())
        if rank == 0 and step % 50 == 0:
            print(f"step {step}, {ranks} ranks: {losses[-1]:.4f}", file=sys.stderr)
    return torch.stack(losses)


def _plot(losses: dict[str, list[float]], path: Path) -> None:
    """Loss curves above, differences to the first one below."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    curves, differences = figure.subplots(2, 1, sharex=True)
    reference = next(iter(losses.values()))
    steps = range(1, len(reference) + 1)
    for index, (name, curve) in enumerate(losses.items()):
        line = "-" if curve is reference else "--" if "ranks" in name else ":"
        style: Any = {"color": f"C{index}", "linewidth": 1, "linestyle": line, "label": name}
        curves.plot(steps, curve, **style)
        if curve is not reference:
            differences.plot(steps, [abs(a - b) for a, b in zip(curve, reference, strict=True)], **style)
    curves.set_ylabel("loss (nats per byte)")
    differences.set(xlabel="step", ylabel="difference to one process", yscale="log")
    for axes in (curves, differences):
        axes.grid(visible=True, alpha=0.3)
    curves.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
