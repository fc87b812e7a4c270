"""Compiles the Triton kernels of a wrapper to machine code, with the ptxas that the triton package brings."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any
from unittest import mock

from tests.cuda.pretended_gpu import Architecture, pretended_gpu

_KERNEL = re.compile(r"^\w+ = async_compile\.triton\('(\w+)', '''\n(.*?)''', device_str='cuda'\)", re.S | re.M)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel, compiled with the first of the configurations that Inductor would try."""

    name: str
    cubin_bytes: int  # of its machine code
    spills: int  # registers of a thread that do not fit and go to memory


def compile_kernels(code: str, architecture: Architecture, folder: Path) -> list[Kernel]:
    """Compiles every kernel of a wrapper; an error of Triton or ptxas ends it.

    Args:
        code: The wrapper.
        architecture: What the wrapper was written for.
        folder: For the kernels' sources, which Triton reads from files.
    """
    with (
        pretended_gpu(architecture),
        mock.patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu"),
        mock.patch("torch._inductor.runtime.triton_heuristics.StaticTritonCompileResult.can_statically_launch"),
    ):
        return [_compile(name, source, folder / f"{name}.py") for name, source in _KERNEL.findall(code)]


def _compile(name: str, source: str, path: Path) -> Kernel:
    path.write_text(source)
    space: dict[str, Any] = {"__name__": name, "__file__": str(path)}
    exec(compile(source, str(path), "exec"), space)
    kernel = space[name]
    compiled: list[Any] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        compiled.append(real(*args, **kwargs))
        return compiled[-1]

    import triton

    real = triton.compile
    with mock.patch("triton.compile", note):
        kernel._precompile_config(kernel.configs[0])
    (made,) = compiled
    return Kernel(name, len(made.asm["cubin"]), made.asm["ptx"].count("st.local"))
