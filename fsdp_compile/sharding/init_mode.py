"""What an initialization of one module does to parameters of other modules: in full, one operator at a time.

While a module is initialized, its own parameters are plain and full. An operator on a parameter of another module, as
when a model scales all of its projections at the end, gets that parameter's full value, and every rank keeps its part
of what the operator wrote: random numbers are drawn as for a model that is not sharded.

What has a value already, as from a checkpoint, keeps it: an operator that would write it writes into a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.tensors import OpOverload, TorchDispatchMode, tree_leaves, tree_map
from fsdp_compile.comm import exchange
from fsdp_compile.errors import ConfigError
from fsdp_compile.runtime.units import FSDPParam
from fsdp_compile.sharding.blanks import Blanks, address

_aten = torch.ops.aten


class InitMode(TorchDispatchMode):
    """Runs operators of an initialization.

    Args:
        name: Of the module that is initialized.
        params: The sharded parameters of the model.
        keep: Keeps this rank's part of a full value, unless the parameter is to keep the value that it has.
        valued: Addresses of the memory of plain tensors that are to keep their values.
        blanks: What is new and without a value.

    Attributes:
        was_used: Whether there was any operator.
    """

    def __init__(
        self,
        name: str,
        params: Iterable[FSDPParam],
        keep: Callable[[FSDPParam, torch.Tensor], None],
        valued: Set[int],
        blanks: Blanks,
    ) -> None:
        super().__init__()
        self.was_used = False
        self._name = name
        self._keep = keep
        self._valued = valued
        self._blanks = blanks
        # With the tensors, which must outlive their `id`s.
        self._known: dict[int, tuple[DTensor, FSDPParam]] = {id(p.parameter): (p.dtensor, p) for p in params}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        self.was_used = True
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if func is _aten.empty_like.default:
            # `to_empty()`: what is sharded has memory already.
            return self._alias(args[0]) if id(args[0]) in self._known else self._blanks.add(func(*args, **kwargs))
        if func is _aten.detach.default and id(args[0]) in self._known:
            return self._alias(args[0])
        sharded = [value for value in tensors if isinstance(value, DTensor)]
        if any(value.is_meta for value in tensors) or any(id(value) not in self._known for value in sharded):
            raise self._refusal(func, "has no memory yet")
        return self._in_full(func, sharded, args, kwargs) if sharded else self._on_copies(func, args, kwargs)

    def _alias(self, parameter: DTensor) -> torch.Tensor:
        made = parameter.detach()
        assert isinstance(made, DTensor)
        self._known[id(made)] = (made, self._known[id(parameter)][1])
        return made

    def _in_full(self, func: OpOverload, sharded: list[DTensor], args: Any, kwargs: dict[str, Any]) -> Any:
        if any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns):
            raise self._refusal(func, "is sharded, and has no views")
        full: dict[int, torch.Tensor] = {}
        for value in sharded:
            param = self._known[id(value)][1]
            if id(value) not in full:
                full[id(value)] = exchange.gather(param.sharded_view, param.spec)
        given = tree_map(lambda value: full.get(id(value), value), (args, kwargs))
        result = self._on_copies(func, *given)
        for key in _written(func, args, kwargs) & full.keys():
            self._keep(self._known[key][1], full[key])
        original = {id(made): self._known[key][0] for key, made in full.items()}
        return tree_map(lambda value: original.get(id(value), value), result)

    def _on_copies(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an operator, which writes into copies of what is to keep its value."""
        written = _written(func, args, kwargs)
        copies = {
            id(value): (value, value.clone())
            for value in tree_leaves((args, kwargs))
            if isinstance(value, torch.Tensor) and id(value) in written and address(value) in self._valued
        }
        if func in _EMPTY:
            return self._blanks.add(func(*args, **kwargs))
        self._blanks.note_written(value for value in tree_leaves((args, kwargs)) if id(value) in written)
        if not copies:
            return func(*args, **kwargs)
        given = tree_map(lambda value: copies[id(value)][1] if id(value) in copies else value, (args, kwargs))
        result = func(*given[0], **given[1])
        originals = {id(copy): value for value, copy in copies.values()}
        return tree_map(lambda value: originals.get(id(value), value), result)

    def _refusal(self, func: OpOverload, why: str) -> ConfigError:
        return ConfigError(
            f"the initialization of this module uses a parameter or buffer that {why}, in {func}",
            where=self._name,
            instead="initialize in each module what the module itself holds: param_init_fn is called on all of them; "
            "parameters of other modules are written whole, in place (nn.init.normal_(parameter), parameter.mul_(2))",
        )


_EMPTY = (
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)
"""Operators besides `empty_like` whose result has no value."""


def _written(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> set[int]:
    """The `id`s of arguments that an operator writes into."""
    written = [
        kwargs.get(argument.name, args[position] if position < len(args) else None)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return {id(value) for value in tree_leaves(written)}
