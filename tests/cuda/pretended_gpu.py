"""An H100 that is not there: what torch and Triton ask about a device is answered, and nothing is run on it.

Only code is generated and compiled. The CPU build of torch and the triton package alone are enough: no driver, no
CUDA. Everything that is replaced is listed here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What kernels are generated and compiled for."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_block_optin: int
    total_memory: int
    L2_cache_size: int
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    shared_memory_per_block: int = 49152
    gcnArchName: str = ""  # noqa: N815  the name that torch's properties have

    @property
    def capability(self) -> int:
        """As Triton spells it."""
        return 10 * self.major + self.minor


SM_80 = Architecture("NVIDIA A100-SXM4-80GB", 8, 0, 108, 166912, 80 * 2**30, 40 * 2**20)
SM_90 = Architecture("NVIDIA H100 80GB HBM3", 9, 0, 132, 232448, 80 * 2**30, 50 * 2**20)
SM_100 = Architecture("NVIDIA B200", 10, 0, 148, 232448, 180 * 2**30, 126 * 2**20)


class _Driver:
    """Triton's driver, as far as the generation of code asks it."""

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._architecture.capability, self._architecture.warp_size)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


class _NoGuard(contextlib.nullcontext[None]):
    """In place of `torch.cuda.device`."""

    def __init__(self, *_: object) -> None:
        super().__init__()


def _inverted(tensor: torch.Tensor) -> torch.Tensor:
    """A function and not the operator, since it becomes a method."""
    return torch.ops.aten.bitwise_not.default(tensor)


@contextlib.contextmanager
def pretended_gpu(architecture: Architecture = SM_90) -> Iterator[None]:
    """Lets torch and Triton believe in one GPU."""
    from torch._dynamo import device_interface
    from triton.runtime import driver

    in_both: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: architecture,
        "is_bf16_supported": lambda *_, **__: True,
        "synchronize": lambda *_: None,
        "device": _NoGuard,
    }
    in_torch = {f"torch.cuda.{name}": value for name, value in in_both.items()} | {
        "torch.cuda.get_device_capability": lambda *_: (architecture.major, architecture.minor),
        "torch.cuda.get_device_name": lambda *_: architecture.name,
        "torch.cuda.get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "torch.cuda.set_rng_state": lambda *_, **__: None,
        # The one method that asks for a guard of the device, which a CPU build has not for CUDA.
        "torch.Tensor.__invert__": _inverted,
        "torch._subclasses.fake_tensor.init_gpu_context": lambda *_: None,
    }
    not_of_a_cpu_build = {"torch._C._cuda_cudaCachingAllocator_is_enabled": lambda: True}
    interface = in_both | {
        "get_compute_capability": lambda *_: architecture.capability,
        "is_triton_capable": lambda *_: True,
        "get_raw_stream": lambda *_: 0,
    }
    workers = {
        "caching_worker_device_properties": {"cuda": [architecture]},
        "caching_worker_current_devices": {"cuda": 0},
    }
    with contextlib.ExitStack() as stack:
        for name, value in in_torch.items():
            stack.enter_context(mock.patch(name, value))
        for name, value in not_of_a_cpu_build.items():
            stack.enter_context(mock.patch(name, value, create=True))
        for name, answer in interface.items():
            value = answer if isinstance(answer, type) else staticmethod(answer)
            stack.enter_context(mock.patch.object(device_interface.CudaInterface, name, value))
        for name, entries in workers.items():
            stack.enter_context(mock.patch.dict(getattr(device_interface, name), entries))
        stack.enter_context(mock.patch.object(driver, "_active", _Driver(architecture)))
        _forget_answers()
        yield
    _forget_answers()


def _forget_answers() -> None:
    """Empties the caches of what was asked while there was another device, or none."""
    import torch._inductor.utils
    import torch.utils._triton
    from torch._inductor.runtime.hints import DeviceProperties

    modules: tuple[types.ModuleType, ...] = (torch.utils._triton, torch._inductor.utils)
    for value in [v for module in modules for v in vars(module).values()]:
        clear = getattr(value, "cache_clear", None)
        if callable(clear):
            clear()
    DeviceProperties.create.cache_clear()
