"""A loss over chunks of the logits, each under checkpointing: gathers of the head, bytes and step time beside FSDP2."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from benchmarks import contenders, models
from benchmarks.bound import Held
from benchmarks.command import Columns, finish, ms, parser, quiet, table
from benchmarks.contenders import FSDP2, OURS, UNSHARDED, Contender, Setup
from benchmarks.hardware import timed, told
from benchmarks.measure import alternate
from benchmarks.models import Task
from benchmarks.network.emulated import Network, emulated_world
from benchmarks.network.traffic import Kind
from benchmarks.network.wire import Link
from benchmarks.step_time import add_network_arguments
from benchmarks.steps import prepare


class ChunkedLoss(nn.Module):
    """A language model that never holds more than a chunk's logits: they are computed again in backward."""

    def __init__(self, language_model: Any, chunks: int) -> None:
        super().__init__()
        self.body: nn.Module = language_model.model
        self.head: nn.Module = language_model.lm_head
        self.chunks = chunks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of predicting each token, (B, T) to ()."""
        hidden = self.body(input_ids=tokens, use_cache=False).last_hidden_state
        parts = zip(hidden.chunk(self.chunks, 1), tokens.roll(-1, 1).chunk(self.chunks, 1), strict=True)
        losses = [checkpoint(self._loss, part, wanted, use_reentrant=False) for part, wanted in parts]
        return torch.stack(losses).sum() / tokens.numel()

    def _loss(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.head(hidden).flatten(0, 1), wanted.flatten(), reduction="sum")


def chunked(size: models.LlamaSize, chunks: int, device: str = "cpu") -> Task:
    """The same Llama as `models.llama` trains, with its loss in chunks."""
    whole = models.llama(size, device=device)
    tokens = whole.inputs[1]["input_ids"]
    return Task(
        lambda: ChunkedLoss(whole.make(), chunks),
        whole.block,
        lambda model: model(tokens),
        lambda loss: loss,
        ((tokens,), {}),
    )


def _head_apart(model: nn.Module, setup: Setup) -> Any:
    assert isinstance(model, ChunkedLoss)
    torch_fully_shard(model.head, mesh=contenders.mesh_of(setup), mp_policy=setup.policy)
    return contenders.fsdp2(model, setup)


CONTENDERS: tuple[Contender, ...] = (
    UNSHARDED,
    dataclasses.replace(FSDP2, about="torch's fully_shard, eager; the head in the root unit, which stays gathered"),
    Contender("fsdp2_head_apart", "the same, the head a unit of its own", _head_apart, Held.TWO),
    OURS,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = _parser().parse_args(argv)
    quiet()
    torch.set_num_threads(arguments.threads)
    if arguments.smoke:
        arguments.rounds = 2
    task = chunked(models.SMOKE if arguments.smoke else models.TWO_CORES, arguments.chunks)
    rows = run(task, arguments, Setup(task.block, options=arguments.fsdp_options))
    columns: Columns = {
        "contender": str,
        "all_gathers": str,
        "gathered_bytes": _mb,
        "total_sent_bytes": _mb,
        "median_s": ms,
    }
    table(f"a step, the loss in {arguments.chunks} chunks, {arguments.gb_per_s:g} GB/s", rows, columns)
    settings = {key: value for key, value in vars(arguments).items() if key != "out"}
    return finish(arguments, settings, rows)


def run(task: Task, arguments: argparse.Namespace, setup: Setup) -> list[dict[str, Any]]:
    """Counts what each contender sends in a step, and times it."""
    names = arguments.contenders
    wanted = [one for one in CONTENDERS if names is None or one.name in names]
    bytes_per_s = arguments.gb_per_s * 1e9
    with emulated_world(arguments.ranks, Network(Link(bytes_per_s, arguments.latency_us * 1e-6))) as world:
        informed = timed(task, told(setup, bytes_per_s, arguments.latency_us), arguments.ranks)
        ready, failed = prepare(wanted, task, informed)
        rows: dict[str, dict[str, Any]] = {name: {"contender": name, **one.to_dict()} for name, one in failed.items()}
        for name, prepared in ready.items():
            world.reset()
            prepared.step()
            traffic = world.traffic
            rows[name] = {
                "contender": name,
                "all_gathers": traffic.calls.get(Kind.ALL_GATHER, 0),
                "gathered_bytes": traffic.sent.get(Kind.ALL_GATHER, 0.0),
                **traffic.to_dict(),
            }
        steps = alternate({name: prepared.step for name, prepared in ready.items()}, rounds=arguments.rounds)
    for name, samples in steps.items():
        rows[name] |= samples.to_dict()
    return [rows[one.name] for one in wanted]


def _mb(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


def _parser() -> argparse.ArgumentParser:
    made = parser("chunked_loss", "Gathers of the head, bytes and step time with a loss in chunks, beside FSDP2.")
    add_network_arguments(made, CONTENDERS)
    made.add_argument("--chunks", type=int, default=4, metavar="N", help="of the loss (default: 4)")
    made.add_argument("--gb-per-s", type=float, default=0.28, metavar="X", help="link of each rank (default: 0.28)")
    made.add_argument("--threads", type=int, default=1, metavar="N", help="that compute on a CPU (default: 1)")
    return made


if __name__ == "__main__":
    sys.exit(main())
