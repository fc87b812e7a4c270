"""Buffers that are cast to another dtype: state dicts, and eval mode if asked for, see them in their own."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass
class CastBuffer:
    """One buffer of a module.

    Attributes:
        original: Its value in its own dtype, when it was cast last.
        in_eval: Whether eval mode sees it in its own dtype.
    """

    dtype: torch.dtype
    original: torch.Tensor
    in_eval: bool

    def restored(self, current: torch.Tensor) -> torch.Tensor:
        """The buffer in its own dtype, given its value in the module now."""
        if current.dtype == self.original.dtype or current.device.type == "meta":
            return current.to(self.original.dtype)
        if self.original.shape == current.shape and self.original.device == current.device:
            # Not written to since: its exact value, which a cast back would not restore.
            untouched = torch.equal(self.original.to(current.dtype), current)
            if untouched:
                return self.original
        return current.to(self.original.dtype)
