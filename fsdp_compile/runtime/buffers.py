"""A buffer in another dtype than it was made in: cast once, saved and (if asked) evaluated as it was.

The original value stays with the cast one. A buffer that was not written to since comes back exactly; one that was
comes back in its original dtype with the values that training left.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass
class CastBuffer:
    """One buffer of a module.

    Attributes:
        dtype: What it is cast to.
        original: Its value in its own dtype, when it was cast last.
        in_eval: Whether eval mode sees it in its own dtype.
    """

    dtype: torch.dtype
    original: torch.Tensor
    in_eval: bool

    def restored(self, current: torch.Tensor) -> torch.Tensor:
        """The buffer in its own dtype, given what the module holds now."""
        if current.dtype == self.original.dtype or current.device.type == "meta":
            return current.to(self.original.dtype)
        if self.original.shape == current.shape and self.original.device == current.device:
            untouched = torch.equal(self.original.to(current.dtype), current)
            if untouched:
                return self.original
        return current.to(self.original.dtype)
