"""What holds for every wrapper, on any device and whatever the options."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from torch import fx

from fsdp_compile.ir.graph import Phase, Role
from fsdp_compile.lower.written_order import compare, planned_calls
from tests.cuda.generate import Code
from tests.cuda.kernels import Kernel, compile_kernels
from tests.cuda.pretended_gpu import Architecture
from tests.cuda.wrapper import REDUCE_SCATTER, Wrapper


def all_hold(code: Code, *, read_in_place: bool = True, embeddings: int | None = 1) -> None:
    """What holds of all code; `embeddings` is `None` if gradients are added, cast or joined before they are sent."""
    order_is_planned(code)
    host_goes_on(code)
    gathered_memory_is_freed_once(code)
    if read_in_place:
        no_gathered_matrix_is_copied(code)
    if code.planned.phase is Phase.BACKWARD and embeddings is not None:
        no_gradient_is_copied(code, embeddings=embeddings)


def order_is_planned(code: Code) -> None:
    """Starts and waits, matmuls and attention are in the order of the graph; all of them were compared."""
    planned = planned_calls(code.planned.graph)
    compared = compare(planned, code.wrapper, code.planned.phase.value)
    missing = {call.operator for call in planned} - set(compared)
    assert not missing, f"not compared: {missing}"


def no_gathered_matrix_is_copied(code: Code) -> None:
    """Matmuls read gathered messages in place: no kernel runs over as many elements as one of them has."""
    wrapper = Wrapper(code.wrapper)
    sizes = [node.meta["val"].numel() for node in code.planned.nodes(Role.GATHER_ITEM)]
    names = wrapper.gathered()
    assert len(names) == len(sizes)
    large = [(name, size) for name, size in zip(names, sizes, strict=True) if size > 10**5]
    assert large
    for name, size in large:
        copies = [launch for launch in wrapper.kernel_reads(name) if launch.numel >= size]
        assert not copies, f"{name} of {size} elements is read by {copies}"


def no_gradient_is_copied(code: Code, *, embeddings: int = 1) -> None:
    """Matmuls write gradients into messages; only those of embeddings are made, and cast, by kernels."""
    wrapper = Wrapper(code.wrapper)
    written = wrapper.matmul_outputs()
    sizes = [prod(m.meta["val"].shape) for start in code.planned.nodes(Role.REDUCE) for m in _messages(start)]
    names = wrapper.reduced()
    assert len(names) == len(sizes)
    copied = [name for name, size in zip(names, sizes, strict=True) if size > 10**5 and name not in written]
    assert len(copied) == embeddings, f"not written by a matmul: {copied}"


def replicas_are_summed_in_place(code: Code) -> None:
    """All-reduces over replicas work in the memory that reduce-scatters have made."""
    wrapper = Wrapper(code.wrapper)
    made = wrapper.items(REDUCE_SCATTER)
    summed = [name for _, _, names in wrapper.starts("_c10d_functional.all_reduce") for name in names]
    assert summed
    assert summed == made, f"{summed} are not {made}"
    assert not [start for start in wrapper.statements if "all_reduce_coalesced.default" in start]


def _messages(start: fx.Node) -> list[fx.Node]:
    messages: Any = start.args[0]
    return list(messages) if isinstance(messages, list | tuple) else [messages]


def host_goes_on(code: Code) -> None:
    """Nothing makes the host wait for the device."""
    assert not Wrapper(code.wrapper).synchronizes()


def gathered_memory_is_freed_once(code: Code) -> None:
    """Every gathered message is taken once and given back once."""
    wrapper = Wrapper(code.wrapper)
    frees = {name: wrapper.frees(name) for name in wrapper.gathered()}
    assert set(frees.values()) == {1}, frees


def kernels_compile(code: Code, architecture: Architecture, folder: Path) -> list[Kernel]:
    """Triton and ptxas take every kernel."""
    kernels = compile_kernels(code.wrapper, architecture, folder)
    assert kernels
    assert all(kernel.cubin_bytes > 0 for kernel in kernels)
    return kernels
