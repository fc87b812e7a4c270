"""Who lets time pass for a collective: threads beside the computing one on a CPU, a stream of its own on CUDA."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.futures import Future

from benchmarks.network.clock import Clock
from benchmarks.network.traffic import Traffic
from benchmarks.network.wire import Transfer, Wire

Fill = Callable[[], None]
"""Writes the outputs of a collective."""


class Carrier(Protocol):
    """Runs collectives on wires."""

    def start(self, wire: Wire, lane: str, size_bytes: float, fill: Fill, outputs: list[torch.Tensor]) -> dist.Work:
        """Begins a collective of which this rank sends `size_bytes`; `outputs` are what its future holds."""

    def close(self) -> None:
        """Ends what it started."""


class CpuCarrier:
    """On the CPU, a thread writes outputs while the transfer goes on, and waiting sleeps until the transfer has ended.

    The time at which a transfer ends is calculated, not observed: a thread that is late delays nobody but its waiter.
    """

    def __init__(self, clock: Clock, traffic: Traffic) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        self._traffic = traffic
        self._fills = _Thread(clock)
        self._futures = _Thread(clock)

    def start(self, wire: Wire, lane: str, size_bytes: float, fill: Fill, outputs: list[torch.Tensor]) -> dist.Work:
        """See `Carrier`."""
        with self.lock:
            transfer = wire.submit(lane, size_bytes, self.clock.now_s())
        filling = _Filling(fill)
        self._fills.put(lambda: self._fill(filling))
        return _CpuWork(self, wire, transfer, filling, outputs)

    def end_s(self, wire: Wire, transfer: Transfer) -> float:
        """When a transfer ends, as known now; one that starts later on another lane may delay it."""
        with self.lock:
            wire.advance(self.clock.now_s())
            return wire.end_s(transfer)

    def complete(self, future: Future[Any], work: _CpuWork) -> None:
        """Lets a future hold the outputs once they are there."""

        def wait_and_set() -> None:
            work.wait()
            future.set_result(work.outputs)

        self._futures.put(wait_and_set)

    def close(self) -> None:
        """Ends both threads."""
        self._fills.close()
        self._futures.close()

    def _fill(self, filling: _Filling) -> None:
        start_s = self.clock.now_s()
        try:
            filling.fill()
        except Exception as error:  # raised again by whoever waits
            filling.error = error
        self._traffic.fill_s += self.clock.now_s() - start_s
        filling.filled.set()


class _Filling:
    """The outputs of one collective, being written by another thread.

    The tensors that `fill` reads and writes are freed by whoever waits, never by the writing thread: a profiler of
    the waiting thread counts their memory, and a program may count on it after its wait.
    """

    def __init__(self, fill: Fill) -> None:
        self.fill = fill
        self.filled = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> None:
        """Returns once the outputs are written; raises what the writing thread raised."""
        self.filled.wait()
        self.fill = _done
        if self.error is not None:
            raise self.error


class _CpuWork(dist.Work):
    def __init__(
        self, carrier: CpuCarrier, wire: Wire, transfer: Transfer, filling: _Filling, outputs: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self.outputs = outputs
        self._filling = filling
        self._carrier, self._wire, self._transfer = carrier, wire, transfer

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        self._filling.wait()
        while (end_s := self._carrier.end_s(self._wire, self._transfer)) > self._carrier.clock.now_s():
            self._carrier.clock.sleep_until(end_s)
        return True

    def is_completed(self) -> bool:
        return (
            self._filling.filled.is_set()
            and self._carrier.end_s(self._wire, self._transfer) <= self._carrier.clock.now_s()
        )

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        self._carrier.complete(future, self)
        return future


def _done() -> None:
    """What a collective that is over still has to write."""


class _Thread:
    """Does things in order on a thread of its own, which has one processor; at once where the clock has no threads."""

    def __init__(self, clock: Clock) -> None:
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if clock.threads:
            self._thread = threading.Thread(target=self._run, name="emulated network", daemon=True)
            self._thread.start()

    def put(self, do: Callable[[], None]) -> None:
        if self._thread is None:
            do()
        else:
            self._todo.put(do)

    def close(self) -> None:
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread's own operators
        while (do := self._todo.get()) is not None:
            do()
            del do  # so that no output outlives its collective while the queue is empty


class CudaCarrier:
    """On CUDA, everything is queued on one stream: outputs are written, then the stream is busy until the time is over.

    All lanes of all wires share the stream, so groups take turns and total bandwidth is kept. As c10d's, a collective
    holds what it reads and writes until somebody waits for it; after that the waiter's stream is behind it.
    """

    def __init__(self, device: torch.device) -> None:
        from benchmarks.network import device_clock  # it needs Triton

        self._clock = device_clock
        self._stream: Any = torch.cuda.Stream(device, priority=-1)
        self._device = device
        self._begins = torch.zeros(1, dtype=torch.int64, device=device)

    def start(self, wire: Wire, lane: str, size_bytes: float, fill: Fill, outputs: list[torch.Tensor]) -> dist.Work:  # noqa: ARG002
        """See `Carrier`."""
        seconds = wire.link.latency_s + size_bytes / wire.link.bytes_per_s
        with self._after_compute():
            self._clock.note_time[(1,)](self._begins, num_warps=1)
            fill()
            self._clock.wait_until[(1,)](self._begins, round(seconds * 1e9), num_warps=1)
            event = self._stream.record_event()
        return _CudaWork(self._stream, event, fill, outputs, self._device)

    def close(self) -> None:
        """Waits for what is queued."""
        self._stream.synchronize()

    @contextlib.contextmanager
    def _after_compute(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield


class _CudaWork(dist.Work):
    def __init__(self, stream: Any, event: Any, fill: Fill, outputs: list[torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self._stream, self._event, self._device = stream, event, device
        self._fill = fill  # it has the inputs
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        torch.cuda.current_stream(self._device).wait_event(self._event)
        self._fill = _done
        return True

    def is_completed(self) -> bool:
        return self._event.query()

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future(devices=[self._device])
        with torch.cuda.stream(self._stream):
            future.set_result(self._outputs)
        return future
