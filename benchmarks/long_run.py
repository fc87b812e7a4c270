"""Loss curves of a sharded run and of one process on the same batches, over hundreds of steps.

Two runs that round differently drift apart, and training amplifies that. A third run shows by how much without any
sharding: one process again, with the rows of each batch in reverse order, which changes nothing but the order of sums.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.command import finish, parser
from fsdp_compile.parity.processes import Place, run_on_ranks
from fsdp_compile.training.batches import Batches
from fsdp_compile.training.config import TrainConfig
from fsdp_compile.training.corpus import read_corpus
from fsdp_compile.training.model import Llama, ModelShape
from fsdp_compile.training.schedule import Schedule
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
    """

    config: TrainConfig
    ranks: int
    lower: str


def main(argv: Sequence[str] | None = None) -> int:
    """Trains three times, writes the JSON and the picture, and prints the largest differences."""
    arguments = _parser().parse_args(argv)
    run = _run_of(arguments)
    losses = {
        "one process": _single(run, lambda rows: rows),
        "one process, rows reversed": _single(run, lambda rows: rows.flip(0)),
        f"{run.ranks} ranks, compiled": run_on_ranks(_sharded, run, _places(run), run.ranks),
    }
    reference = losses["one process"]
    results = []
    for name, curve in losses.items():
        differences = [abs(a - b) for a, b in zip(curve, reference, strict=True)]
        results.append({"run": name, "largest_difference": max(differences), "last_loss": curve[-1], "loss": curve})
        print(f"{name:<28} last loss {curve[-1]:.4f}, largest difference {max(differences):.3g} nats per byte")
    _plot(losses, arguments.plot)
    settings = {"ranks": run.ranks, "lower": run.lower, "config": run.config.to_dict()}
    return finish(arguments, settings, results)


def _parser() -> argparse.ArgumentParser:
    made = parser("long_run", (__doc__ or "").splitlines()[0])
    made.add_argument("--steps", type=int, default=500, metavar="N", help="optimizer steps (default: 500)")
    made.add_argument("--ranks", type=int, default=4, metavar="N", help="of the sharded run (default: 4)")
    made.add_argument("--lower", choices=["inductor", "eager"], default="inductor", help="default: inductor")
    made.add_argument("--plot", type=Path, default=PLOT, metavar="FILE", help="the picture (default: in docs/)")
    return made


def _run_of(arguments: argparse.Namespace) -> LongRun:
    small: dict[str, Any] = {"width": 48, "layers": 2, "heads": 2, "seq_len": 48, "batch_size": 16}
    config = TrainConfig(steps=4 if arguments.smoke else arguments.steps, **small)
    return LongRun(config, arguments.ranks, arguments.lower)


def _places(run: LongRun) -> Callable[[int, Path], Place]:
    return lambda rank, store: Place(rank, run.ranks, store, "cpu", _TIMEOUT_S)


def _single(run: LongRun, order: Callable[[Tensor], Tensor]) -> list[float]:
    model = _model(run.config)
    return _train(run.config, model, model, order, rank=0, ranks=1).tolist()


def _sharded(run: LongRun) -> list[float]:
    torch.set_num_threads(1)
    model = _model(run.config)
    compiled: Any = torch.compile(model, backend="fsdp", options={"lower": run.lower})
    losses = _train(run.config, model, compiled, lambda rows: rows, rank=dist.get_rank(), ranks=run.ranks)
    dist.all_reduce(losses)
    return (losses / run.ranks).tolist()


def _model(config: TrainConfig) -> Llama:
    torch.manual_seed(config.seed)
    shape = ModelShape(width=config.width, layers=config.layers, heads=config.heads, seq_len=config.seq_len)
    return Llama(shape)


def _train(
    config: TrainConfig,
    model: nn.Module,
    call: Callable[[Tensor], Tensor],
    order: Callable[[Tensor], Tensor],
    *,
    rank: int,
    ranks: int,
) -> Tensor:
    """The training of `fsdp-compile train`, with nothing around it.

    Returns:
        This rank's loss of every step, float64 `[steps]`, nats per byte.
    """
    corpus, schedule = read_corpus(config.data, config.seq_len), Schedule.of(config)
    batches = Batches(seed=config.seed, batch_size=config.batch_size, seq_len=config.seq_len, rank=rank, ranks=ranks)
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=config.weight_decay)
    losses = []
    for step in range(1, config.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        tokens, targets = (order(half) for half in batches.draw(corpus.train, step))
        loss = F.cross_entropy(call(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        losses.append(loss.detach().double())
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
        style: Any = {"color": f"C{index}", "linewidth": 1, "linestyle": ("-", ":", "--")[index], "label": name}
        curves.plot(steps, curve, **style)
        if curve is not reference:
            differences.plot(steps, [abs(a - b) for a, b in zip(curve, reference, strict=True)], **style)
    curves.set_ylabel("loss (nats per byte)")
    differences.set(xlabel="step", ylabel="difference to one process", yscale="log")
    for axes in (curves, differences):
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
