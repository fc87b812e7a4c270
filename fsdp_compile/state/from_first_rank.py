"""What the first rank alone makes, on every rank, or its error on every rank: others would wait for it."""

from __future__ import annotations

import json
from collections.abc import Callable

from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile.comm import exchange
from fsdp_compile.errors import ConfigError

_MADE, _FAILED = b"1", b"0"


def from_first_rank(make: Callable[[], bytes], mesh: DeviceMesh, *, where: str, instead: str) -> bytes:
    """What `make` gives on the first rank of a mesh; it is not called on others.

    Args:
        make: What to call.
        mesh: The ranks that get it.
        where: In an error that `make` does not say more about.
        instead: In that error.

    Raises:
        ConfigError: On all ranks, if `make` fails with any error.
    """
    sent, cause = b"", None
    if exchange.is_first(mesh):
        try:
            sent = _MADE + make()
        except Exception as error:  # whatever it is: the others wait for the message
            sent, cause = _FAILED + json.dumps(_described(error, where, instead)).encode(), error
    received = exchange.share_bytes(sent, mesh)
    if received.startswith(_MADE):
        return received.removeprefix(_MADE)
    what, place, other = json.loads(received.removeprefix(_FAILED))
    raise ConfigError(what, where=place, instead=other) from cause


def _described(error: Exception, where: str, instead: str) -> tuple[str, str | None, str | None]:
    """What an error says, where, and what to do instead."""
    if isinstance(error, ConfigError):
        return error.what, error.where, error.instead
    return f"the first rank cannot send the state dict: {type(error).__name__}: {error}", where, instead
