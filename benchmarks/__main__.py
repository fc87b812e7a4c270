"""`python -m benchmarks`: lists the benchmarks."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = (
    "step_time",
    "two_links",
    "sent_bytes",
    "memory",
    "activations",
    "cost_model",
    "fit",
    "compile_time",
    "first_step",
    "agreement",
    "overhead",
    "scaling",
    "slow_network",
    "chunked_loss",
    "accumulation",
    "matrix_optimizers",
    "checkpoints",
    "long_run",
    "soak",
    "gpu.run_all",
)


def main() -> int:
    """Prints a line for each."""
    for name in BENCHMARKS:
        about = (importlib.import_module(f"benchmarks.{name}").__doc__ or "").splitlines()[0]
        print(f"python -m benchmarks.{name:<14} {about}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
