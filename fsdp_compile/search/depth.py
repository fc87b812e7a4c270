"""Like blocks of a deep model: it is traced and priced with few of them, and what follows is exact per block.

model      embedding, block 0 ... block 125, head
traced     embedding, block 0 ... block 3, head     and once more with 8 blocks: their difference is that of 4 blocks
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import nn

from fsdp_compile.explain.stand_in import stand_in

DEPTHS: Final = (4, 8)
"""Numbers of blocks with which a deep model is traced: the last units of forward are kept, the first ones gathered."""
_PLAIN: Final = (bool, int, float, str, type(None))


class Half(enum.Enum):
    """Which of the like blocks."""

    FIRST = "first"
    SECOND = "second"


@dataclasses.dataclass(frozen=True)
class Stack:
    """Like blocks of a model that run one after the other.

    Attributes:
        name: Path of the `ModuleList` or `Sequential` that has them.
        blocks: How many there are.
    """

    name: str
    blocks: int

    def segment(self, unit: str, blocks: int) -> tuple[str, Half | None]:
        """A unit in a model with so many blocks: its name, blocks of the second half counted from the end; its half."""
        number, _, rest = unit.removeprefix(f"{self.name}.").partition(".")
        if not unit.startswith(f"{self.name}.") or not number.isdecimal():
            return unit, None
        if int(number) < blocks / 2:
            return f"{self.name}.{number}.{rest}", Half.FIRST
        return f"{self.name}.{int(number) - blocks}.{rest}", Half.SECOND


def stack_of(model: nn.Module) -> Stack | None:
    """The longest list of like blocks in a model, if it is longer than what would be traced of it."""
    found = [
        Stack(name, len(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > max(DEPTHS) and _are_alike([*module])
    ]
    return max(found, key=lambda stack: stack.blocks, default=None)


def shortened(model: nn.Module, stack: Stack, blocks: int) -> nn.Module:
    """A copy of a model without values that has only the first blocks; the model is only read."""
    copied = stand_in(model)
    held: Any = copied.get_submodule(stack.name)
    del held[blocks:]
    return copied


def _are_alike(blocks: Sequence[nn.Module]) -> bool:
    """Whether blocks differ in their values at most, or in numbers that are their places."""
    described = [_described(block) for block in blocks]
    if any(one.keys() != described[0].keys() for one in described):
        return False
    columns = ([one[name] for one in described] for name in described[0])
    places = [*range(len(blocks))]
    return all(column == places or all(value == column[0] for value in column) for column in columns)


def _described(block: nn.Module) -> Mapping[str, Any]:
    """Classes, shapes and plain settings of all modules of a block."""
    found: dict[str, Any] = {}
    for path, module in block.named_modules():
        found[path] = type(module)
        plain = {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}
        found |= {f"{path}:{name}": value for name, value in plain.items()}
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        found[f"{name} of"] = (tensor.shape, tensor.dtype, tensor.requires_grad)
    return found
