"""Whether all ranks of a mesh say the same, before they do something together that needs it."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile.comm import exchange
from fsdp_compile.errors import RankMismatchError


def require(described: Mapping[str, str], mesh: DeviceMesh, *, what: str, where: str, instead: str) -> None:
    """Compares short texts over the ranks of a mesh, which call it together.

    Args:
        described: Texts by name: what this rank has.
        mesh: Whose ranks compare.
        what: What they are about, in the error.
        where: The call, in the error.
        instead: What to do, in the error.

    Raises:
        RankMismatchError: On all ranks, if some rank has other names or texts; a rank names those in which it differs
            from the first one.
    """
    text = json.dumps(described, sort_keys=True)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")  # its negative fits into an int64, too
    # One reduction finds the largest and the smallest.
    bounds = torch.tensor([number, -number], device=exchange.wire_of(mesh))
    exchange.all_reduce_max(bounds, mesh)
    if bounds[0].item() == -bounds[1].item():
        return
    first: dict[str, str] = json.loads(exchange.share_text(text, mesh))
    differ = [name for name in sorted({*first, *described}) if first.get(name) != described.get(name)]
    shown = "; ".join(
        f"{name} is {described.get(name, 'missing')}, and on the first rank {first.get(name, 'missing')}"
        for name in differ[:5]
    )
    raise RankMismatchError(
        f"ranks have different {what}: {shown or 'another rank than this one differs from the first'}",
        where=where,
        instead=instead,
    )


def digest(value: torch.Tensor) -> str:
    """A short text that two tensors have in common if their elements are the same, bit for bit."""
    held = exchange.as_bytes(value.detach().cpu().contiguous())
    # Without a copy, and without NumPy, which need not be installed.
    data = (ctypes.c_char * held.numel()).from_address(held.data_ptr()) if held.numel() else b""
    return hashlib.sha256(data).hexdigest()[:16]
