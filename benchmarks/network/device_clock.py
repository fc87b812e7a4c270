"""Time that passes on a CUDA stream, by the device's own nanoseconds: its clock cycles get longer when it saves power.

    note_time    stores the time at which a transfer begins
    wait_until   keeps one block busy until so much time has passed since then

What is queued between the two is part of the transfer, and does not make it longer.
"""

# Triton compiles the annotations, too: its kernels have none.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def note_time(begins):
    """Stores the time in `begins`, an int64 on the device."""
    tl.store(begins, globaltimer())


@triton.jit(do_not_specialize=["nanoseconds"])
def wait_until(begins, nanoseconds):
    """Ends when `nanoseconds` have passed since the time in `begins`."""
    begin = tl.load(begins)
    now = globaltimer()
    while now - begin < nanoseconds:
        now = globaltimer()
