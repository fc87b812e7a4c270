"""How graph text spells operators, dtypes and names: one table each, read in both directions."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable
from typing import Any, Final

import torch

from fsdp_compile._torch.distributed import collectives
from fsdp_compile.errors import ConfigError

DTYPES: Final[dict[torch.dtype, str]] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3fn",
    torch.float8_e5m2: "f8e5m2",
    torch.complex128: "c128",
    torch.complex64: "c64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint64: "u64",
    torch.uint32: "u32",
    torch.uint16: "u16",
    torch.uint8: "u8",
    torch.bool: "bool",
}
OPERATORS: Final[dict[Any, str]] = {
    operator.getitem: "getitem",
    collectives.all_gather_into_tensor.default: "all_gather",
    collectives.all_gather_into_tensor_coalesced.default: "all_gather_coalesced",
    collectives.reduce_scatter_tensor.default: "reduce_scatter",
    collectives.reduce_scatter_tensor_coalesced.default: "reduce_scatter_coalesced",
    collectives.all_reduce.default: "all_reduce",
    collectives.all_reduce_coalesced.default: "all_reduce_coalesced",
    collectives.wait_tensor.default: "wait",
}
"""Operators with a name of their own; all others go by their qualified name, `aten.mm` or `aten.slice.Tensor`."""
_FUNCTION_MODULES: Final = {"operator": operator, "math": math, "torch": torch}
"""Where the functions live that compute with sizes; of torch's, only `torch.sym_*`."""
_BARE_NAME: Final = re.compile(r"[\w.\-/]+|\(root\)")
_WORDS: Final[dict[str, Any]] = {
    "None": None,
    "True": True,
    "False": False,
    "nan": float("nan"),
    **{text: dtype for dtype, text in DTYPES.items()},
    **{
        str(value).removeprefix("torch."): value
        for kind in (torch.memory_format, torch.layout, torch.dtype)
        for value in vars(torch).values()
        if isinstance(value, kind) and value not in DTYPES
    },
}


def spell_dtype(dtype: torch.dtype) -> str:
    """`bf16`; torch's own name where the table has none."""
    return DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


def spell_word(value: object) -> str | None:
    """A constant that is written as one word (a dtype, device type, memory format or layout), else `None`."""
    if isinstance(value, torch.dtype):
        return spell_dtype(value)
    if isinstance(value, torch.device):
        # Without its index, which differs between ranks.
        return value.type
    if isinstance(value, (torch.memory_format, torch.layout)):
        return str(value).removeprefix("torch.")
    return None


def read_word(word: str) -> Any:
    """The constant that a word stands for.

    Raises:
        ValueError: If there is none.
    """
    if word in _WORDS:
        return _WORDS[word]
    try:
        return torch.device(word)
    except RuntimeError:
        raise ValueError(f"{word!r} is not a constant") from None


def spell_operator(target: Any) -> str:
    """`aten.mm`, `aten.slice.Tensor`, `all_gather`, `operator.mul`: how a node's target is written."""
    if target in OPERATORS:
        return OPERATORS[target]
    if isinstance(target, type(torch.ops.aten.mm.default)):
        return str(target).removesuffix(".default")
    if getattr(target, "namespace", None) == "higher_order":
        return f"higher_order.{target}"
    module = getattr(target, "__module__", type(target).__module__)
    return f"{'operator' if module == '_operator' else module}.{getattr(target, '__name__', type(target).__name__)}"


def read_operator(name: str) -> Callable[..., Any]:
    """The target that a name stands for.

    Raises:
        ConfigError: If there is no such operator; suggests a similar one.
    """
    for target, text in OPERATORS.items():
        if text == name:
            return target
    namespace, _, rest = name.partition(".")
    if namespace in ("operator", "math") or name.startswith("torch.sym_"):
        found = getattr(_FUNCTION_MODULES[namespace], rest, None)
        if callable(found):
            return found
    return _read_torch_operator(name, namespace, rest)


def _read_torch_operator(name: str, namespace: str, rest: str) -> Callable[..., Any]:
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), base, None) if base else None
    if packet is None:
        near = difflib.get_close_matches(name, OPERATORS.values(), n=1)
        instead = near[0] if near else "an operator of torch.ops such as aten.mm or aten.slice.Tensor"
        raise ConfigError(f"there is no operator {name}", instead=instead)
    if namespace == "higher_order":
        return packet
    if (overload or "default") not in packet.overloads():
        spelled = [f"{namespace}.{base}.{known}".removesuffix(".default") for known in packet.overloads()]
        raise ConfigError(f"{namespace}.{base} has no overload {overload or 'default'}", instead=" or ".join(spelled))
    return getattr(packet, overload or "default")


def spell_name(name: str) -> str:
    """The name of a unit or parameter, in quotes if it has characters that mean something else."""
    return name if _BARE_NAME.fullmatch(name) else repr(name)


def spell_parameter(name: str, unit: str) -> str:
    """A parameter's name below its unit: `.attention.weight` in unit `layers.0`."""
    return spell_name(name.removeprefix(unit) if name.startswith(unit + ".") else name)


def read_parameter(text: str, unit: str) -> str:
    """The fully qualified name that `spell_parameter` shortened."""
    return unit + text if text.startswith(".") else text
