"""Parameters that cannot become shards of a flat parameter: refused by name before anything is changed.

A shard is a part of one plain tensor. A tensor subclass is more than that (several tensors, a quantized format, other
operators), and two parameters that share memory would be two values after sharding.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fsdp_compile._torch.autograd import is_saved_by_autograd
from fsdp_compile._torch.tensors import FakeTensor, local_tensor, memory_place
from fsdp_compile.comm.gather_extension import is_extended
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.runtime.gradients import refuse_hook_of_several
from fsdp_compile.runtime.replaced_params import ReplacedParameter

_CONSTRUCTION = frozenset(
    (
        *("__new__", "__init__", "__repr__", "__deepcopy__", "__reduce_ex__"),
        *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__parameters__", "__orig_bases__"),
        *("__annotations__", "__annotate_func__", "__annotations_cache__"),
        *("__static_attributes__", "__firstlineno__"),
    )
)
"""Members of a class that say how its instances are made, shown and copied, not how they behave in a forward."""


def refuse_class(name: str, parameter: torch.Tensor) -> None:
    """Raises an error for a parameter that is not one plain, dense tensor.

    A subclass of `nn.Parameter` that adds attributes of instances alone is plain: the attributes are kept, the class
    is not.

    Args:
        name: Of the parameter in the module that is sharded.
        parameter: Not sharded by this package.

    Raises:
        ConfigError: If it has no shape yet.
        UnsupportedModelError: If it is of a class that a shard would not have, or its elements are not laid out in
            memory one by one, or are complex, or with a hook that would never be called.
    """
    if isinstance(parameter, UninitializedParameter):
        raise ConfigError(
            "a parameter of a lazy module has no shape yet",
            where=name,
            instead="call the plain model once on a batch, then shard it",
        )
    if isinstance(parameter, DTensor):
        parameter = local_tensor(parameter)
    kind = type(parameter)
    if kind not in (torch.Tensor, nn.Parameter, FakeTensor) and not is_extended(parameter):
        refuse_subclass(name, kind)
    for hook in (parameter._backward_hooks or {}).values():
        refuse_hook_of_several(hook, name)
    if parameter.layout is not torch.strided or parameter.is_quantized or parameter.is_nested:
        raise UnsupportedModelError(
            f"a parameter is not dense: its layout is {parameter.layout} and its dtype {parameter.dtype}",
            where=name,
            instead="a dense parameter, or list it in ignored_params, then it is neither sharded nor averaged",
        )
    if parameter.is_complex():
        raise UnsupportedModelError(
            f"a parameter is complex ({parameter.dtype}), and gradients are averaged as real numbers",
            where=name,
            instead="its real and its imaginary part as two real parameters, or torch.view_as_complex() of a real "
            "parameter in forward",
        )


def refuse_references(name: str, parameter: torch.Tensor) -> None:
    """Raises `ConfigError` for a DTensor that cannot become a sharded one, as which it keeps its identity."""
    has_graph = is_saved_by_autograd(parameter)
    if has_graph or weakref.getweakrefcount(parameter):
        raise ConfigError(
            "a parameter that is a DTensor is saved by a graph of an earlier forward"
            if has_graph
            else "a parameter that is a DTensor has a weak reference, which torch cannot move to another one",
            where=name,
            instead="fully_shard() before the first forward, or after the loss is dropped (del loss)"
            if has_graph
            else "fully_shard() before what keeps such references (a WeakKeyDictionary, say) is made",
        )


def refuse_subclass(name: str, kind: type) -> None:
    """Raises `UnsupportedModelError` for a class of tensors that are more than their elements."""
    called = f"{kind.__module__}.{kind.__qualname__}"
    added = [member for part in kind.__mro__ if part not in nn.Parameter.__mro__ for member in vars(part)]
    behaviour = [member for member in dict.fromkeys(added) if member not in _CONSTRUCTION]
    if behaviour:
        raise UnsupportedModelError(
            f"a parameter is a {called}, which has {', '.join(behaviour)}: in a forward the gathered parameter is a "
            "plain tensor and has not",
            where=name,
            instead="nn.Parameter(parameter.data) with attributes of its own (parameter.tag = ...), which are kept, "
            "and functions in the module; or list it in ignored_params, then it is neither sharded nor averaged",
        )


@dataclasses.dataclass(frozen=True)
class _Held:
    """A tensor of a model, and the bytes from its first element to its last.

    Attributes:
        name: Its name in the model.
        memory: What `begin` counts in: two tensors with other ones share nothing.
    """

    name: str
    tensor: torch.Tensor
    memory: object
    begin: int
    end: int


def refuse_shared_memory(root: nn.Module, sharded: Collection[torch.Tensor]) -> None:
    """Raises `UnsupportedModelError` for a parameter that shares memory with another tensor of the model.

    Args:
        root: The module that is sharded.
        sharded: Those of its parameters that will be; one of the two has to be among them.
    """
    ids = {id(parameter) for parameter in sharded}
    earlier: list[_Held] = []
    for held in sorted(_held_in(root), key=lambda each: (str(each.memory), each.begin)):
        earlier = [each for each in earlier if each.memory == held.memory and each.end > held.begin]
        for other in earlier:
            if (id(held.tensor) in ids or id(other.tensor) in ids) and _overlap(held, other):
                first, second = sorted((held.name, other.name))
                raise UnsupportedModelError(
                    f"{first} and {second} share memory and are two tensors: after sharding they would be two values",
                    where=first,
                    instead="the same nn.Parameter in both places (b.weight = a.weight), or one parameter that the "
                    "forward slices and views; or memory of its own (nn.Parameter(b.weight.detach().clone()))",
                )
        earlier.append(held)


def _held_in(root: nn.Module) -> Iterator[_Held]:
    """Every plain parameter, buffer and computed attribute with elements, once."""
    registered = [*root.named_parameters(), *root.named_buffers()]
    known = {id(tensor) for _, tensor in registered}
    attributes = [(name, tensor) for name, tensor in _computed_attributes(root) if id(tensor) not in known]
    for name, tensor in [*registered, *attributes]:
        if not _has_plain_memory(tensor) or tensor.layout is not torch.strided or tensor.numel() == 0:
            continue
        memory, begin = memory_place(tensor)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        yield _Held(name, tensor, memory, begin, begin + (last + 1) * tensor.element_size())


def _computed_attributes(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The views and tensors that need gradients which modules have as plain attributes: of parameters, maybe."""
    # Others may be of code that knows about it, as torch's `spectral_norm` has `weight.data`. Their `grad_fn` is not
    # asked for: autograd raises an error for views whose base was written since.
    for name, module in root.named_modules():
        for attribute, value in vars(module).items():
            plain = isinstance(value, torch.Tensor) and _has_plain_memory(value)
            if plain and (value.requires_grad or value._is_view()):
                yield f"{name}.{attribute}".removeprefix("."), value


def _has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is not a subclass that wraps others, and was not sharded or left without a shape."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer | ReplacedParameter):
        return False
    return type(tensor) in (torch.Tensor, FakeTensor) or issubclass(type(tensor), nn.Parameter)


def _overlap(one: _Held, other: _Held) -> bool:
    """Whether two tensors whose bytes overlap have an element in common; interleaved columns, say, have none."""
    size, begin = one.tensor.element_size(), min(one.begin, other.begin)
    if size != other.tensor.element_size() or (one.begin - other.begin) % size:
        return True
    elements = torch.zeros((max(one.end, other.end) - begin) // size, dtype=torch.bool, device="cpu")
    views = [
        elements.as_strided(held.tensor.shape, held.tensor.stride(), (held.begin - begin) // size)
        for held in (one, other)
    ]
    views[0].fill_(True)  # noqa: FBT003
    return bool(views[1].any())
