"""`poison`, which fills memory with NaN that is about to be freed, and `check_message`, which finds NaN."""

from __future__ import annotations

import torch

from fsdp_compile.errors import PoisonError

_LIBRARY = torch.library.Library("fsdp_compile", "FRAGMENT")
# Both say that they write: compilers then keep them, behind what was read before them and before what is read after.
_LIBRARY.define("poison(Tensor(a!) message) -> ()")
# The host reads what it finds: not in a CUDA graph.
_LIBRARY.define("check_message(Tensor(a!) message, str what) -> ()", tags=(torch.Tag.cudagraph_unsafe,))


def poison(message: torch.Tensor) -> None:
    """Fills `message`, contiguous, of any dtype, with bytes 255: NaN in every floating point dtype that is sent."""
    message.view(torch.uint8).fill_(255)


def check_message(message: torch.Tensor, what: str) -> None:
    """Raises `PoisonError` if a floating point `message` has a NaN; the host waits for the device to know."""
    if not message.is_floating_point():
        return
    found = int(message.isnan().sum())
    if found:
        raise PoisonError(
            f"{what} has NaN in {found} of {message.numel()} elements: the values that were sent are NaN, or "
            "memory was read after it was freed, or before it was written",
            where="options={'poison': True}",
            instead="leave it out if losses are NaN without it, too; otherwise it is a bug of this package",
        )


_LIBRARY.impl("poison", poison, "CompositeExplicitAutograd")
_LIBRARY.impl("check_message", check_message, "CompositeExplicitAutograd")


@torch.library.register_fake("fsdp_compile::poison", lib=_LIBRARY)
def _(message: torch.Tensor) -> None:
    """Changes no shape."""


@torch.library.register_fake("fsdp_compile::check_message", lib=_LIBRARY)
def _(message: torch.Tensor, what: str) -> None:
    """Changes no shape."""


POISON = torch.ops.fsdp_compile.poison.default
CHECK_MESSAGE = torch.ops.fsdp_compile.check_message.default
