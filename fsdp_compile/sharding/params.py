"""Which parameters FSDP2 can shard: others stay whole, or are refused by name before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parameter import UninitializedParameter

from fsdp_compile.errors import ConfigError, UnsupportedModelError


def is_whole(parameter: nn.Parameter) -> bool:
    """Whether FSDP2 has no way to split a parameter: 0-d, empty, or of integers."""
    return parameter.dim() == 0 or parameter.numel() == 0 or not parameter.is_floating_point()


def refuse_params(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises an error for a parameter that can be neither sharded nor replicated.

    Raises:
        ConfigError: If it has no shape yet.
        UnsupportedModelError: If it is complex.
    """
    for name, parameter in named:
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                "a parameter of a lazy module has no shape yet",
                where=name,
                instead="call the plain model once on a batch, then shard it",
            )
        if parameter.is_complex():
            raise UnsupportedModelError(
                f"a parameter is complex, of {parameter.dtype}, and FSDP2 reduces real numbers",
                where=name,
                instead="a parameter of torch.view_as_real() of it, or list it in ignored_params, then it is neither "
                "sharded nor averaged",
            )
