"""What a wrapper that Inductor wrote for a GPU does: launches, messages, copies, memory. Read from its text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from itertools import pairwise

_NAME = re.compile(r"\b(?:buf\d+|[a-z]\w*)\b")
_MAKES = re.compile(r"^(\w+) = (.*)$")
_RUN = re.compile(r"^(triton_\w+)\.run\((.*), stream=\w+\)")
_EXTERN = re.compile(r"^extern_kernels\.(\w+)\((.*), out=(\w+)\)")
_OP = re.compile(r"^(?:(\w+) = )?torch\.ops\.(\w+\.\w+)\.\w+\((.*)\)")
_GATHER = "_c10d_functional.all_gather_into_tensor"
REDUCE_SCATTER = "_c10d_functional.reduce_scatter_tensor"
SYNCHRONIZES = re.compile(
    r"\.item\(|\.cpu\(|\.tolist\(|synchronize|_local_scalar_dense|nonzero|\.to\(|copy_\(|device='cpu'|empty_strided_cpu"
)
"""What makes the host wait for the device, or may."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel of Inductor's own."""

    kernel: str
    arguments: tuple[str, ...]
    numel: int
    """Elements that it runs over."""


class Wrapper:
    """The statements of a wrapper's `call`, without comments and checks."""

    def __init__(self, code: str) -> None:
        body = code[code.index("def call(") :]
        lines = (line.strip() for line in body[: body.index("\n        return (")].splitlines())
        skipped = ("#", "assert_", "raw_stream", "with ", "def ")
        statements = (part for line in lines if not line.startswith(skipped) for part in line.split("; "))
        self.statements = [re.sub(r"\s+#.*$", "", s) for s in statements if s]

    def launches(self) -> Iterator[tuple[int, Launch]]:
        """Launches of Inductor's kernels, each with the number of its statement."""
        for at, statement in enumerate(self.statements):
            if found := _RUN.match(statement):
                arguments = found[2].split(", ")
                numel = math.prod(int(a) for a in arguments if a.isdigit())
                yield at, Launch(found[1], tuple(a for a in arguments if not a.isdigit()), numel)

    def launches_per_layer(self) -> list[int]:
        """Launches from the attention of one layer to that of the next."""
        at = [number for number, _ in self.launches()]
        operator = "= torch.ops.aten._scaled_dot_product_flash_attention"
        attention = [number for number, statement in enumerate(self.statements) if operator in statement]
        return [sum(a < number < b for number in at) for a, b in pairwise(attention)]

    def starts(self, operator: str) -> Iterator[tuple[int, str, list[str]]]:
        """Calls of a collective: number of the statement, name of what it makes, names of its messages."""
        for at, statement in enumerate(self.statements):
            found = _OP.match(statement)
            if found and found[2].startswith(operator):
                messages = found[3].partition("]")[0]
                yield at, found[1], [n for n in _NAME.findall(messages) if n != "reinterpret_tensor"]

    def gathered(self) -> list[str]:
        """The names of the messages that all-gathers make."""
        return self.items(_GATHER)

    def items(self, operator: str) -> list[str]:
        """The names of the messages that calls of a collective make."""
        made = {name for _, name, _ in self.starts(operator)}
        items = (_MAKES.match(s) for s in self.statements)
        return [m[1] for m in items if m and re.fullmatch(r"(\w+)\[\d+\]", m[2]) and m[2].partition("[")[0] in made]

    def reduced(self) -> list[str]:
        """The names of the messages that reduce-scatters send."""
        return [name for _, _, messages in self.starts(REDUCE_SCATTER) for name in messages]

    def matmul_outputs(self) -> set[str]:
        """What matmuls write to."""
        return {found[3] for s in self.statements if (found := _EXTERN.match(s))}

    def kernel_reads(self, name: str) -> list[Launch]:
        """Launches of Inductor's own kernels that touch a buffer."""
        return [launch for _, launch in self.launches() if name in launch.arguments]

    def frees(self, name: str) -> int:
        """How often a buffer is given back."""
        return self.statements.count(f"del {name}")

    def synchronizes(self) -> list[str]:
        """Statements that make the host wait."""
        return [s for s in self.statements if SYNCHRONIZES.search(s)]
