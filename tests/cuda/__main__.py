"""Writes the CUDA code of layers of Llama-3-8B, and prints what it does: `python -m tests.cuda --out FOLDER`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.cuda import checks
from tests.cuda.generate import BF16, Case, Code, generate
from tests.cuda.llama import Sizes
from tests.cuda.pretended_gpu import SM_90
from tests.cuda.wrapper import Wrapper


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for wrappers, graphs and kernels")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=64)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    codes = generate(Case(sizes=Sizes(layers=given.layers), ranks=given.ranks, sharding=BF16))
    for phase, code in codes.items():
        (given.out / f"{phase.value}.py").write_text(code.wrapper)
        graph = code.planned.gm.print_readable(print_output=False)
        (given.out / f"{phase.value}.graph.py").write_text(graph)
        _report(code, given.out)


def _report(code: Code, folder: Path) -> None:
    phase, wrapper = code.planned.phase, Wrapper(code.wrapper)
    checks.all_hold(code)
    per_layer = wrapper.launches_per_layer()
    kernels = checks.kernels_compile(code, SM_90, folder)
    print(f"{phase.value}: order as planned, no copy of a gathered matrix or of a gradient, the host waits for nothing")
    print(f"  {len(list(wrapper.launches()))} launches, from attention to attention {', '.join(map(str, per_layer))}")
    spilling = sum(kernel.spills > 0 for kernel in kernels)
    print(f"  {len(kernels)} kernels, all compiled for sm_90; {spilling} of them spill registers")


if __name__ == "__main__":
    main()
