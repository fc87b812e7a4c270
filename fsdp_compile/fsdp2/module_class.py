"""The class of a module of a sharded model, in which `self.weight` is a property.

It is a cached subclass of the module's own, of the same name and layout. Traced, the property is the marker
`fsdp_compile.unshard` of a slot of the group's flat tensor; in Python it is what FSDP2 has registered.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile._torch.dynamo import comptime, leave_while_traced, root_translator, skip_code, traces_a_forward
from fsdp_compile._torch.fully_shard import MANAGED, class_below
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.fsdp2.buffers import CASTS
from fsdp_compile.layout.spec import GradPlacement

if TYPE_CHECKING:
    from fsdp_compile.fsdp2.param_group import ParamGroup
    from fsdp_compile.fsdp2.unit import Unit

FLAT = "_fsdp_flat_"
"""Start of the attributes of a module that are the flat tensors it reads from: with the number of a group."""
UNIT = "_fsdp_unit"
"""Attribute of a module: the unit that its parameters are in."""
ARGUMENTS = "_fsdp_arguments"
"""Attribute of a module: for parameters that graphs read in another way than by default, the marker's arguments."""
LAYOUTS = "_fsdp_layouts"
"""Attribute of a module: for parameters that are DTensors when they are gathered, their layout."""
_BASE = "_fsdp_class"
"""Attribute of a class of ours: the user's."""


@dataclasses.dataclass(frozen=True)
class ParamRead:
    """How modules of a class read one parameter.

    Attributes:
        name: Its attribute.
        flat: Number of its group.
        text: Of its `UnshardSpec`.
        is_dtensor: Whether the gathered parameter is a DTensor over further ranks.
        eval_text: The text in eval mode, if that is another one.
    """

    name: str
    flat: int
    text: str
    is_dtensor: bool = False
    eval_text: str = ""


_Key = tuple[type, tuple[ParamRead, ...], tuple[str, ...]]
_classes: weakref.WeakKeyDictionary[object, dict[_Key, type]] = weakref.WeakKeyDictionary()
"""By world: none may take what Dynamo has compiled in an earlier one."""


def class_of(base: type, reads: Sequence[ParamRead], originals: Sequence[str] = ()) -> type:
    """The class over a user's, in which some parameters, and buffers with originals for eval mode, are properties."""
    known = _classes.setdefault(dist.group.WORLD or ParamRead, {})
    key = (base, tuple(reads), tuple(originals))
    if key not in known:
        known[key] = _make(base, reads, originals)
    return known[key]


def original_class(module: nn.Module) -> type:
    """The class that the user wrote; FSDP2's over it for modules that `fully_shard` was called on."""
    return getattr(type(module), _BASE, type(module))


def user_class(module: nn.Module) -> type:
    """The class that the user wrote, below FSDP2's and ours."""
    return class_below(original_class(module))


def refresh_reads(group: ParamGroup) -> None:
    """Sets the flat tensor and the arguments with which the next graphs read the parameters of a group.

    By default no arguments. Dynamo guards on texts and on which tensors there are: graphs for unreduced gradients
    differ from those that reduce them, and from those that have never seen any pending.
    """
    # A frozen group has no gradients of its own, but may have some that wait since before.
    placement = group.grad_placement() if group.is_trainable else GradPlacement.REDUCED
    pending = group.pending
    is_reduced, known = placement is GradPlacement.REDUCED, pending.placements
    leaf = None if is_reduced else pending.leaf(placement)
    unreduced = partial = None
    if placement is not GradPlacement.UNREDUCED and GradPlacement.UNREDUCED in known:
        unreduced = pending.blank(GradPlacement.UNREDUCED)
    if is_reduced and GradPlacement.REDUCE_SCATTERED in known:
        partial = pending.blank(GradPlacement.REDUCE_SCATTERED)
    for param in group.params:
        text = dataclasses.replace(param.spec, grad_placement=placement).text
        gathered = group.gathered.get(param.spec.offset)
        is_default = leaf is None and unreduced is None and partial is None and text == param.first_text
        is_default = is_default and gathered is None
        arguments = [None if is_default else (text, gathered, leaf, unreduced, partial)]
        in_eval = group.eval_spec(param)
        if in_eval is not None:
            # What the user has gathered has the dtype of training.
            text = dataclasses.replace(in_eval, grad_placement=placement).text
            arguments.append(None if is_default else (text, None, leaf, unreduced, partial))
        for module, name in param.refs:
            every = {
                **(module.__dict__.get(ARGUMENTS) or {}),
                **dict(zip((name, _name_in_eval(name)), arguments, strict=False)),
            }
            present = {n: a for n, a in every.items() if a is not None}
            # `nn.Module.__setattr__` would register the tensor.
            object.__setattr__(module, f"{FLAT}{group.number}", group.edge)
            if present:
                object.__setattr__(module, ARGUMENTS, present)
            else:
                module.__dict__.pop(ARGUMENTS, None)


def parametrized_late(where: str) -> UnsupportedModelError:
    """The error for a parameter that was sharded, and then computed from others."""
    return UnsupportedModelError(
        "a sharded parameter was parametrized",
        where=where,
        instead="torch.nn.utils.parametrize and torch.nn.utils.parametrizations before fully_shard() or the first "
        "compiled call",
    )


def _make(base: type, reads: Sequence[ParamRead], originals: Sequence[str]) -> type:
    for read in reads:
        if isinstance(getattr(base, read.name, None), property):  # since FSDP2's initialization
            raise parametrized_late(f"{base.__qualname__}.{read.name}")
    members: dict[str, Any] = {
        **{read.name: _property(read) for read in reads},
        **{name: _original_in_eval(name) for name in originals},
        ARGUMENTS: None,
        UNIT: None,
        MANAGED: _Unseen(_is_managed),
        _BASE: base,
        "named_parameters": _named_parameters,
        "__slots__": (),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    try:
        made: type = type(base)(base.__name__, (base,), members)
    except TypeError as error:
        raise UnsupportedModelError(
            f"a class of a sharded module cannot be derived from: {error}",
            where=base.__qualname__,
            instead="an __init_subclass__ without required arguments",
        ) from error
    return made


def _property(read: ParamRead) -> property:
    name, flat, text = read.name, f"{FLAT}{read.flat}", read.text

    name_in_eval, eval_text = _name_in_eval(name), read.eval_text

    def get(module: nn.Module) -> torch.Tensor | None:
        if torch.compiler.is_compiling():
            if eval_text and not module.training:
                return _marker(module, name_in_eval, flat, eval_text)
            return _marker(module, name, flat, text)
        unit: Unit | None = getattr(module, UNIT)
        if unit is not None:
            _gather_deferred(unit, module)
        if name not in module._parameters:
            raise AttributeError(name)  # then Python asks `nn.Module.__getattr__`
        return module._parameters[name]

    def get_dtensor(module: nn.Module) -> torch.Tensor | None:
        value = get(module)
        if torch.compiler.is_compiling():
            return getattr(module, LAYOUTS)[name].gathered(value)
        return value

    def put(module: nn.Module, value: object) -> None:
        _replace(module, name, value)

    # One code object for all parameters: as graphs of their own they would recompile for each.
    for function in (get, get_dtensor, put):
        skip_code(function.__code__)
    return property(get_dtensor if read.is_dtensor else get, put)


def _replace(module: nn.Module, name: str, value: object) -> None:
    """Assigns what is no parameter: in Python, where FSDP2's hooks gather."""
    if torch.compiler.is_compiling():
        comptime(leave_while_traced)
    elif (unit := getattr(module, UNIT)) is not None:
        _gather_deferred(unit, module)
        if not isinstance(getattr(type(module), name, None), property):
            setattr(module, name, value)
            return
    raise UnsupportedModelError(
        "a sharded parameter is replaced by an attribute of another kind",
        where=f"{type(module).__name__}.{name}",
        instead="do it (torch.nn.utils.weight_norm(), say) before fully_shard() or the first compiled call",
    )


def _original_in_eval(name: str) -> property:
    def get(module: nn.Module) -> torch.Tensor | None:
        buffer = module._buffers[name]
        if torch.compiler.is_compiling() and not module.training:
            known = getattr(module, CASTS)[name]
            if buffer is known.cast:  # else the forward, or the user, has replaced it
                original: torch.Tensor = known.original
                return original
        return buffer

    skip_code(get.__code__)
    return property(get)


def _name_in_eval(name: str) -> str:
    """By which a module's arguments have those in eval mode; no attribute is called so."""
    return f"{name} in eval"


def _marker(module: nn.Module, name: str, flat: str, text: str) -> torch.Tensor:
    arguments = getattr(module, ARGUMENTS)
    if arguments is None or name not in arguments:
        given: tuple[Any, ...] = (text,)
    elif torch.is_grad_enabled():
        given = arguments[name]
    else:  # nothing accumulates: evaluations need no graph for each state
        given = (text, arguments[name][1])
    read: torch.Tensor = torch.ops.fsdp_compile.unshard(getattr(module, flat), *given)
    return read


def _gather_deferred(unit: Unit, module: nn.Module) -> None:
    """Gathers a unit by FSDP2's hooks if its call is in Python, where Dynamo was expected to trace it."""
    if unit.may_be_deferred:
        unit.gather_late(module)


class _Unseen(property):
    """A property that is false itself: from torch 2.15 on Dynamo asks the class's attribute, and does not read it."""

    def __bool__(self) -> bool:
        return False


def _is_managed(_: nn.Module) -> bool:
    """FSDP2's mark, for code that asks for it. Not for Dynamo, which guards marked modules in its own way."""
    return True if torch.compiler.is_dynamo_compiling() else root_translator() is None


def _named_parameters(
    self: Any,
    prefix: str = "",
    recurse: bool = True,  # noqa: FBT001, FBT002  torch's
    remove_duplicate: bool = True,  # noqa: FBT001, FBT002  torch's
) -> Iterator[tuple[str, nn.Parameter]]:
    """`named_parameters()`, and with it `parameters()`: in a forward that is traced, the results of reads."""
    if not torch.compiler.is_compiling():
        for module in self.modules():
            unit = module.__dict__.get(UNIT)
            if unit is not None:
                _gather_deferred(unit, module)
    elif traces_a_forward():
        return _traced_parameters(self, prefix, recurse, remove_duplicate)
    return getattr(type(self), _BASE).named_parameters(self, prefix, recurse, remove_duplicate)


def _traced_parameters(self, prefix, recurse, remove_duplicate):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    seen: list[object] = []
    found = []
    for path, module in self.named_modules(prefix=prefix) if recurse else [(prefix, self)]:
        for name in module._parameters:
            value = getattr(module, name)
            if value is None or (remove_duplicate and any(value is other for other in seen)):
                continue
            seen.append(value)
            found.append((f"{path}.{name}" if path else name, value))
    return iter(found)


for _function in (_marker, _replace, _gather_deferred, _named_parameters, _traced_parameters, _is_managed):
    skip_code(_function.__code__)
