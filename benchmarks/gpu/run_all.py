"""What one GPU can show within ten minutes, the most telling first: parity, step time, memory, more ratios.

Each part runs in a process of its own for so many seconds at most, and has its own result or its own error: a hang, a
device that has failed or a NaN in one ends no other. The file is written after each. `--device cpu --smoke` runs the
same code with tiny sizes where there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import memory, models, step_time
from benchmarks.command import finish, parser, quiet
from benchmarks.contenders import Setup
from benchmarks.gpu import parity, peaks
from benchmarks.measure import explained
from benchmarks.models import Task

CONTENDERS = (
    *("unsharded", "fsdp_compile", "fsdp2", "fsdp2_compiled_blocks"),
    *("fsdp_compile_cuda_graphs", "inductor_bucketing", "inductor_overlap"),
)
"""In the order in which they are made ready: the last ones are left out where time is short."""
_FEW = CONTENDERS[:4]
_SHARE_TO_PREPARE = 0.7
"""Of a part's time; the rest is for the steps that are timed."""
_SLOWER = 6
"""How much longer a dry run may take, in all and in each part: its machine may be busy with other things."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One measurement.

    Attributes:
        name: In the result.
        run: Makes its result.
        limit_s: After so long its process is ended.
    """

    name: str
    run: Callable[[], dict[str, Any]]
    limit_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all parts, or the one that `--only` names."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(given)
    quiet()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu.run_all: no CUDA device; --device cpu --smoke runs the same code", file=sys.stderr)
        return 2
    if arguments.smoke:
        arguments.rounds, arguments.limit_s = 2, arguments.limit_s * _SLOWER
    made = parts(arguments)
    if arguments.only is not None:
        return _run_here(next(part for part in made if part.name == arguments.only), arguments.part_out)
    start_s = time.monotonic()
    settings = {"limit_s": arguments.limit_s, "layers": arguments.layers, "tokens": arguments.tokens}
    results: list[dict[str, Any]] = []
    for part in made:
        left_s = arguments.limit_s - (time.monotonic() - start_s)
        results.append(_result(part, given, left_s))
        print(f"{time.monotonic() - start_s:6.1f} s  {part.name}: {results[-1].get('error', 'done')}", file=sys.stderr)
        finish(arguments, settings, results)
    return 1 if all("error" in result for result in results) else 0


def parts(arguments: argparse.Namespace) -> list[Part]:
    """What is measured, the most telling first; all limits together are the ten minutes."""
    task = _task(arguments)
    setup = Setup(task.block, arguments.device, torch.bfloat16)
    exact = dataclasses.replace(setup, param_dtype=None)
    small = models.llama(models.SMOKE, device=arguments.device)
    lowered = dataclasses.replace(exact, options={"lower": "eager"})
    slower = _SLOWER if arguments.smoke else 1
    worlds = peaks.WORLDS[:1] if arguments.smoke else peaks.WORLDS

    def timing(ranks: int, ratio: float, limit_s: float, contenders: Sequence[str] = _FEW) -> Part:
        given = argparse.Namespace(
            ranks=ranks,
            rounds=arguments.rounds,
            latency_us=arguments.latency_us,
            contenders=list(contenders),
            ratios=[ratio],
            prepare_s=limit_s * slower * _SHARE_TO_PREPARE,
        )
        name = f"step time, {ranks} ranks, communication {ratio:g} times compute"
        return Part(name, lambda: step_time.run(task, ratio, given, setup), limit_s)

    others = list(_FEW[2:])
    made = [
        Part("parity, bfloat16, Inductor", lambda: parity.run(small, setup, ranks=8), 50),
        timing(64, 1.0, 170, CONTENDERS),
        Part("peak memory, predicted and measured", lambda: peaks.run(task, setup, worlds), 120),
        Part("parity, float32, operator by operator", lambda: parity.run(small, lowered, ranks=8), 20),
        timing(8, 0.5, 80),
        Part("peak memory of others, 8 ranks", lambda: {"rows": memory.run(task, setup, 8, others)}, 40),
        timing(64, 2.0, 80),
        Part("parity, float32, Inductor", lambda: parity.run(small, exact, ranks=8), 20),
    ]
    return [dataclasses.replace(part, limit_s=part.limit_s * slower) for part in made]


def _result(part: Part, given: Sequence[str], left_s: float) -> dict[str, Any]:
    """Runs a part in a process of its own; its result, or why there is none."""
    limit_s = min(part.limit_s, left_s)
    if left_s < part.limit_s / 4:
        return {"part": part.name, "error": f"not started: {left_s:.0f} s were left of up to {part.limit_s:.0f} s"}
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        command = [sys.executable, "-m", "benchmarks.gpu.run_all", *given, "--only", part.name, "--part-out", str(out)]
        try:
            done = subprocess.run(command, timeout=limit_s, capture_output=True, text=True, check=False)
        except subprocess.TimeoutExpired:
            result: dict[str, Any] = {"error": f"not done within {limit_s:.0f} s"}
        else:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            ended = {"error": f"ended with status {done.returncode}: {last[:300]}"}
            result = json.loads(out.read_text()) if out.exists() else ended
    return {"part": part.name, "took_s": time.monotonic() - start_s, **result}


def _run_here(part: Part, out: Path) -> int:
    """Runs a part in this process and writes its result, or its error."""
    try:
        result = part.run()
    except Exception as error:
        result = {"error": explained(error)}
    out.write_text(json.dumps(result), encoding="utf-8")
    return 0


def _task(arguments: argparse.Namespace) -> Task:
    size = dataclasses.replace(models.LLAMA_3_8B, layers=arguments.layers, tokens=arguments.tokens)
    return models.llama(models.SMOKE if arguments.smoke else size, device=arguments.device)


def _parser() -> argparse.ArgumentParser:
    made = parser("gpu.run_all", "All benchmarks of one GPU: Llama-3-8B's layers on an emulated network.")
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu for a dry run (default: cuda)")
    made.add_argument("--layers", type=int, default=4, metavar="N", help="of Llama-3-8B's 32 (default: 4)")
    made.add_argument("--tokens", type=int, default=4096, metavar="N", help="per rank and step (default: 4096)")
    made.add_argument("--rounds", type=int, default=5, metavar="N", help="timed steps of each contender (default: 5)")
    made.add_argument("--latency-us", type=float, default=20.0, metavar="US", help="per collective (default: 20)")
    made.add_argument("--limit-s", type=float, default=580.0, metavar="S", help="end by then (default: 580)")
    made.add_argument("--only", metavar="PART", help="run one part, in this process")
    made.add_argument("--part-out", type=Path, metavar="FILE", help="where the result of --only goes")
    return made


if __name__ == "__main__":
    sys.exit(main())
