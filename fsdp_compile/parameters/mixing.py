"""Methods that single modules get on top of those of their class."""

from __future__ import annotations

from torch import nn

_MIXIN = "_fsdp_mixin"
"""Attribute of a module: the class whose methods it was given."""
_made: dict[tuple[type[nn.Module], type], type[nn.Module]] = {}


def give_methods(module: nn.Module, mixin: type) -> None:
    """Adds the methods of `mixin` to those of one module; its class keeps its name."""
    object.__setattr__(module, _MIXIN, mixin)
    module.__class__ = with_methods(type(module), module)


def with_methods(cls: type[nn.Module], module: nn.Module) -> type[nn.Module]:
    """`cls` with the methods that `module` was given, if it was given any."""
    mixin = module.__dict__.get(_MIXIN)
    if mixin is None or issubclass(cls, mixin):
        return cls
    if (cls, mixin) not in _made:
        members = {
            "_fsdp_original_class": getattr(cls, "_fsdp_original_class", cls),
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
        }
        _made[cls, mixin] = type(cls.__name__, (mixin, cls), members)
    return _made[cls, mixin]
