"""Parameters that `fully_shard` is told to leave alone: neither sharded, nor gathered, nor reduced."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import nn

from fsdp_compile.errors import ConfigError
from fsdp_compile.parameters.reads import READS

_OPTION = "fully_shard(ignored_params=...)"


@dataclasses.dataclass(frozen=True)
class Ignored:
    """What one call leaves alone.

    Attributes:
        ids: `id`s of parameters, wherever in the model they are.
        modules: Modules that were listed.
    """

    ids: set[int] = dataclasses.field(default_factory=set)
    modules: list[nn.Module] = dataclasses.field(default_factory=list)


def ignored_in(root: nn.Module, listed: object) -> Ignored:
    """What one call leaves alone.

    Args:
        root: The module that is about to be sharded.
        listed: What the user gave: `None`, or parameters and modules, which stand for all parameters in them.

    Raises:
        ConfigError: If something else is listed, a listed module is sharded already, or is `root` itself.
    """
    expected = "an iterable of parameters and modules of the model"
    if listed is None:
        return Ignored()
    if not isinstance(listed, Iterable) or isinstance(listed, str):
        raise ConfigError(f"ignored_params is {listed!r}", where=_OPTION, instead=expected)
    ignored = Ignored()
    for each in listed:
        if isinstance(each, nn.Module):
            ignored.ids.update(_parameters_of(each, root))
            ignored.modules.append(each)
        elif isinstance(each, nn.Parameter):
            ignored.ids.add(id(each))
        else:
            raise ConfigError(f"it contains {each!r}, a {type(each).__name__}", where=_OPTION, instead=expected)
    return ignored


def _parameters_of(module: nn.Module, root: nn.Module) -> set[int]:
    where = f"{_OPTION}, {type(module).__name__}"
    if module is root:
        raise ConfigError(
            "the module to shard is ignored itself, so nothing is left of it",
            where=where,
            instead="leave the call out, or ignore modules in it",
        )
    if any(READS in part.__dict__ for part in module.modules()):
        raise ConfigError(
            "a module to ignore is sharded already",
            where=where,
            instead="ignore it in the first call of fully_shard(), or do not list it",
        )
    return {id(parameter) for parameter in module.parameters()}
