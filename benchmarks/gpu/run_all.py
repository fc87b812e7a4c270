"""Everything that one GPU can show within ten minutes: parity, step time at 8 and 64 ranks, memory, CUDA graphs.

Each part has its own result or its own error, and the file is written after each, so that a run that is cut short
leaves what it had. `--device cpu --smoke` runs the same code with tiny sizes where there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import memory, models, step_time
from benchmarks.command import finish, parser, quiet
from benchmarks.contenders import Setup
from benchmarks.gpu import parity
from benchmarks.measure import Samples, recorded
from benchmarks.models import Task

_MAIN = ["unsharded", "fsdp2", "fsdp2_compiled_blocks", "fsdp_compile"]
_GRAPHS = {"inductor": {"triton.cudagraphs": True}}


@dataclasses.dataclass(frozen=True)
class Part:
    """One measurement.

    Attributes:
        name: In the result.
        run: Makes its result.
        needs_s: Time that must be left for it to start.
    """

    name: str
    run: Callable[[], dict[str, Any]]
    needs_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all parts."""
    arguments = _parser().parse_args(argv)
    quiet()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu.run_all: no CUDA device; --device cpu --smoke runs the same code", file=sys.stderr)
        return 2
    if arguments.smoke:
        arguments.rounds = 2
    start_s = time.monotonic()
    settings = {"limit_s": arguments.limit_s, "layers": arguments.layers, "tokens": arguments.tokens}
    results: list[dict[str, Any]] = []
    for part in parts(arguments):
        left_s = arguments.limit_s - (time.monotonic() - start_s)
        results.append(_result(part, left_s))
        print(f"{time.monotonic() - start_s:6.1f} s  {part.name}: {results[-1].get('error', 'done')}", file=sys.stderr)
        finish(arguments, settings, results)
    return 1 if all("error" in result for result in results) else 0


def parts(arguments: argparse.Namespace) -> list[Part]:
    """What is measured, the most important first."""
    task = _task(arguments)
    setup = Setup(task.block, arguments.device, torch.bfloat16)
    exact = dataclasses.replace(setup, param_dtype=None)
    small = models.llama(models.SMOKE, device=arguments.device)
    graphs = dataclasses.replace(setup, options=_GRAPHS)
    lowered = dataclasses.replace(exact, options={"lower": "eager"})
    made = [
        Part("parity, float32, operator by operator", lambda: parity.run(small, lowered, ranks=8), 10),
        Part("parity, float32, Inductor", lambda: parity.run(small, exact, ranks=8), 30),
        Part("parity, bfloat16, Inductor", lambda: parity.run(small, setup, ranks=8), 30),
    ]
    made += [
        Part(f"step time, {ranks} ranks, {ratio:g}", _timing(task, setup, arguments, ranks, ratio), 60)
        for ranks, ratio in ((8, 1.0), (64, 1.0), (8, 0.5), (8, 2.0))
    ]
    made.append(Part("memory, 8 ranks", lambda: {"rows": memory.run(task, setup, 8, _MAIN)}, 60))
    made.append(Part("CUDA graphs, 8 ranks, 1", _timing(task, graphs, arguments, 8, 1.0), 60))
    return made


def _timing(
    task: Task, setup: Setup, arguments: argparse.Namespace, ranks: int, ratio: float
) -> Callable[[], dict[str, Any]]:
    given = argparse.Namespace(
        ranks=ranks, rounds=arguments.rounds, latency_us=arguments.latency_us, contenders=_MAIN, ratios=[ratio]
    )
    return lambda: step_time.run(task, ratio, given, setup)


def _result(part: Part, left_s: float) -> dict[str, Any]:
    if left_s < part.needs_s:
        return {
            "part": part.name,
            "error": f"not started: {left_s:.0f} s were left of the {part.needs_s:.0f} s it needs",
        }
    samples = Samples()
    start_s = time.monotonic()
    result: dict[str, Any] = {}
    with recorded(samples):
        result = part.run()
    if samples.error:
        result = {"error": samples.error}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"part": part.name, "took_s": time.monotonic() - start_s, **result}


def _task(arguments: argparse.Namespace) -> Task:
    size = dataclasses.replace(models.LLAMA_3_8B, layers=arguments.layers, tokens=arguments.tokens)
    return models.llama(models.SMOKE if arguments.smoke else size, device=arguments.device)


def _parser() -> argparse.ArgumentParser:
    made = parser("gpu.run_all", "All benchmarks of one GPU: Llama-3-8B's layers on an emulated network.")
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu for a dry run (default: cuda)")
    made.add_argument("--layers", type=int, default=8, metavar="N", help="of Llama-3-8B's 32 (default: 8)")
    made.add_argument("--tokens", type=int, default=4096, metavar="N", help="per rank and step (default: 4096)")
    made.add_argument("--rounds", type=int, default=5, metavar="N", help="timed steps of each contender (default: 5)")
    made.add_argument("--latency-us", type=float, default=20.0, metavar="US", help="per collective (default: 20)")
    made.add_argument("--limit-s", type=float, default=570.0, metavar="S", help="start nothing after it (default: 570)")
    return made


if __name__ == "__main__":
    sys.exit(main())
