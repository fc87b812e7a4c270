"""Reads one line of graph text from left to right: names, values and types."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import torch
from torch import fx

from fsdp_compile.errors import ConfigError
from fsdp_compile.ir.text.spelling import WORDS, Size, read_sizes, read_word

T = TypeVar("T")
_NODE: Final = re.compile(r"%([A-Za-z_]\w*)")
_STRING: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_NUMBER: Final = re.compile(r"-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|inf)(?![\w.])")
_WORD: Final = re.compile(r"[A-Za-z_]\w*")
_NAME: Final = re.compile(r"[\w.\-/]+|\(root\)")
_UNSHOWN: Final = re.compile(r"<[^>]*>|\?")
_LITERAL: Final = re.compile(r"(int|float|bool|str)\(")


class Line:
    """A line, and how far it has been read."""

    def __init__(self, number: int, text: str) -> None:
        self.number = number
        self.text = text
        self.position = 0

    def error(self, what: str, *, instead: str | None = None) -> ConfigError:
        """The error for wrong text at this place: says the line, the column and the text there."""
        place = f"line {self.number}, column {self.position + 1}"
        return ConfigError(f"{place}: {what}", where=self.text.strip(), instead=instead)

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Reads what `pattern` matches here, after blanks; `None` if it does not."""
        self._skip_blanks()
        match = pattern.match(self.text, self.position)
        if match is not None:
            self.position = match.end()
        return match

    def takes(self, literal: str) -> bool:
        """Reads `literal`, after blanks; `False` if it is not there."""
        self._skip_blanks()
        found = self.text.startswith(literal, self.position)
        self.position += len(literal) * found
        return found

    def expect(self, literal: str) -> None:
        """Reads `literal` or fails."""
        if not self.takes(literal):
            raise self.error(f"expected {literal!r}")

    def end(self) -> None:
        """Fails unless everything has been read."""
        self._skip_blanks()
        if self.position < len(self.text):
            raise self.error(f"expected the end of the line, not {self.text[self.position :]!r}")

    def rest(self) -> str:
        """Reads all that is left, without blanks at its ends."""
        text, self.position = self.text[self.position :], len(self.text)
        return text.strip()

    def until_closed(self) -> str:
        """Reads the rest of a bracket that is already open; returns it without the closing one."""
        start, depth = self.position, 1
        while self.position < len(self.text):
            depth += (self.text[self.position] in "([") - (self.text[self.position] in ")]")
            self.position += 1
            if depth == 0:
                return self.text[start : self.position - 1]
        raise self.error("a bracket is not closed")

    def items(self, closing: str, read: Callable[[], T]) -> list[T]:
        """Reads comma-separated items up to a closing bracket; a comma may follow the last one."""
        found: list[T] = []
        while not self.takes(closing):
            found.append(read())
            if not self.takes(","):
                self.expect(closing)
                break
        return found

    def _skip_blanks(self) -> None:
        while self.text.startswith(" ", self.position):
            self.position += 1


def read_node_name(line: Line) -> str:
    """A node's name, `%view_1`, without its sign."""
    match = line.take(_NODE)
    if match is None:
        raise line.error("expected a node such as %view_1")
    return match[1]


def read_name(line: Line) -> str:
    """The name of a unit or parameter, quoted or not."""
    if quoted := line.take(_STRING):
        return ast.literal_eval(quoted[0])
    if bare := line.take(_NAME):
        return bare[0]
    raise line.error(
        "expected a name such as layers.0, in quotes if it has other characters than letters, digits and . - / _"
    )


def read_value(line: Line, nodes: Mapping[str, fx.Node], symbols: Mapping[str, torch.SymInt]) -> Any:
    """An argument: a node, number, string, word, list or tuple."""

    def item() -> Any:
        return read_value(line, nodes, symbols)

    if line.takes("["):
        return line.items("]", item)
    if line.takes("("):
        return tuple(line.items(")", item))
    if line.text.startswith("%", line.position):
        start, name = line.position, read_node_name(line)
        if name not in nodes:
            line.position = start
            raise line.error(f"%{name} is used before it is made")
        return nodes[name]
    if literal := line.take(_STRING):
        return ast.literal_eval(literal[0])
    # Before words, of which `inf` would be one.
    if literal := line.take(_NUMBER):
        return float(literal[0]) if literal[0].endswith("inf") else ast.literal_eval(literal[0])
    return _read_word(line, symbols)


def _read_word(line: Line, symbols: Mapping[str, torch.SymInt]) -> Any:
    if shown := line.take(_UNSHOWN):
        raise line.error(f"{shown[0]} stands for a value that text cannot hold", instead="a graph without it")
    if line.takes("sym("):
        return _sizes(line, line.until_closed(), symbols)[0]
    start, word = line.position, line.take(_WORD)
    try:
        return read_word(word[0] if word else line.text[start:])
    except ValueError:
        line.position = start
        raise line.error(
            f"expected a value, not {word[0] if word else line.text[start:]!r}",
            instead="%node, 1, 2.5, 'text', bf16, cuda, contiguous_format, None, [...] or (...)",
        ) from None


def read_type(line: Line, device: str, symbols: Mapping[str, torch.SymInt]) -> Any:
    """A type, as a value of it: under a fake mode, a fake tensor.

    `device` is that of tensors whose type does not say.
    """

    def item() -> Any:
        return read_type(line, device, symbols)

    if line.takes("["):
        return line.items("]", item)
    if line.takes("("):
        return tuple(line.items(")", item))
    if line.takes("none"):
        return None
    if line.takes("sym("):
        return _sizes(line, line.until_closed(), symbols)[0]
    if line.take(_LITERAL):
        return ast.literal_eval(line.until_closed())
    if shown := line.take(_UNSHOWN):
        raise line.error(f"{shown[0]} stands for a type that text cannot hold", instead="a graph without it")
    return _read_tensor(line, device, symbols)


def _read_tensor(line: Line, device: str, symbols: Mapping[str, torch.SymInt]) -> torch.Tensor:
    start, word = line.position, line.take(_WORD)
    dtype = WORDS.get(word[0]) if word else None
    if not isinstance(dtype, torch.dtype) or not line.takes("["):
        line.position = start
        raise line.error(
            "expected a type", instead="f32[4, 8], f32[4, 8] strides [1, 4], sym(s0), [f32[8], f32[8]] or none"
        )
    shape = _sizes(line, line.until_closed(), symbols)
    strides = _sizes(line, line.until_closed(), symbols) if line.takes("strides [") else None
    if line.takes("on "):
        device = read_name(line)
    if strides is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if len(strides) != len(shape):
        raise line.error(f"{len(shape)} sizes have {len(strides)} strides")
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _sizes(line: Line, text: str, symbols: Mapping[str, torch.SymInt]) -> list[Size]:
    try:
        return read_sizes(text, symbols)
    except ValueError as error:
        raise line.error(str(error)) from None
