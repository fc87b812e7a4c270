"""What the emulated network queues on a GPU: streams and launches that are not there, and kernels that are compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="pip install -e '.[cuda-code]' brings Triton, which compiles the kernels")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.network import device_clock
from benchmarks.network.carrier import CudaCarrier
from benchmarks.network.wire import Link, Wire


@dataclasses.dataclass
class _Queue:
    """Notes what is queued on which stream."""

    queued: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    current: str = "compute"

    def stream_of(self, name: str) -> mock.Mock:
        stream = mock.Mock(label=name)
        stream.wait_stream = lambda other: self.queued.append((name, f"wait for {other.label}"))
        stream.wait_event = lambda event: self.queued.append((name, f"wait for {event}"))
        stream.record_event = lambda: "the end"
        return stream

    @contextlib.contextmanager
    def on(self, stream: mock.Mock) -> Iterator[None]:
        before, self.current = self.current, stream.label
        yield
        self.current = before

    def kernel(self, name: str) -> Any:
        def launch(*arguments: Any, num_warps: int) -> None:
            assert num_warps == 1
            times = [a for a in arguments if isinstance(a, int)]
            self.queued.append((self.current, " ".join([name, *map(str, times)])))

        return {(1,): launch}


def test_a_collective_holds_what_it_reads_until_it_is_waited_for() -> None:
    queue = _Queue()
    kernels = {name: queue.kernel(name) for name in ("note_time", "wait_until")}
    with (
        mock.patch.object(torch.cuda, "Stream", return_value=queue.stream_of("network")),
        mock.patch.object(torch.cuda, "stream", queue.on),
        mock.patch.object(torch.cuda, "current_stream", side_effect=lambda _: queue.stream_of(queue.current)),
        mock.patch.multiple(device_clock, **kernels),
    ):
        carrier = CudaCarrier(torch.device("cpu"))
        own, output = torch.ones(4), torch.zeros(4)
        reads = weakref.ref(own)

        def fill(own: torch.Tensor = own) -> None:
            queue.queued.append((queue.current, "fill"))
            output.copy_(own)

        work = carrier.start(Wire(Link(bytes_per_s=1e9, latency_s=1e-6)), "", 1000, fill, [output])
        del own, fill
        gc.collect()
        assert reads() is not None, "a later kernel could be given its memory"
        work.wait()
        gc.collect()
        assert reads() is None
    assert queue.queued == [
        ("network", "wait for compute"),
        ("network", "note_time"),
        ("network", "fill"),
        ("network", "wait_until 2000"),  # 1 us, and 1000 bytes at 1 GB/s, from the beginning of the transfer
        ("compute", "wait for the end"),
    ]


@pytest.mark.parametrize(
    ("kernel", "signature"),
    [
        (device_clock.note_time, {"begins": "*i64"}),
        (device_clock.wait_until, {"begins": "*i64", "nanoseconds": "i64"}),
        (device_clock.wait_until, {"begins": "*i64", "nanoseconds": "i32"}),
    ],
)
@pytest.mark.parametrize("capability", [90])
def test_kernels_read_the_clock_that_does_not_stretch(kernel: Any, signature: dict[str, str], capability: int) -> None:
    made = triton.compile(ASTSource(kernel, signature, {}), GPUTarget("cuda", capability, 32), {"num_warps": 1})
    assert len(made.asm["cubin"]) > 0
    ptx = made.asm["ptx"]
    assert "%globaltimer" in ptx
    assert "%clock" not in ptx
    if kernel is device_clock.wait_until:  # read again in the loop, and not once before it
        loop = ptx[ptx.index("$L__BB0_") :]
        assert "%globaltimer" in loop
        assert "bra" in loop
