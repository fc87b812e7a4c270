"""Parameters whose shards are neighbours in memory, which an optimizer can update as one plain tensor."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.autograd import allow_any_gradient_dtype
from fsdp_compile._torch.tensors import foreach_copy_, local_tensor, make_dtensor, memory_id
from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.fsdp2.shards import is_number

State = MutableMapping[Any, Any]


class Run:
    """Sharded parameters that are updated together, as one plain tensor: the memory of their shards, with its padding.

    The optimizer's state of the run is one tensor per kind; each parameter's own state consists of views of it, as
    DTensors, and of copies of its numbers, so that state dicts look as they would without runs.

    Attributes:
        params: A run of one is this rank's part of a parameter, in its own shape.
        tensor: The plain tensor.
        state: The optimizer's state of `tensor`.
    """

    def __init__(self, params: Sequence[DTensor], known: State) -> None:
        self.params = tuple(params)
        locals_ = [local_tensor(param) for param in params]
        begin = locals_[0].storage_offset()
        self._places = [(local.storage_offset() - begin, local.numel()) for local in locals_]
        # Detached: a write that changes the version of a tensor would fail a backward that saved it.
        self.tensor = locals_[0].detach() if len(params) == 1 else _span(locals_)
        self.state: dict[Any, Any] = self._joined([known.get(param, {}) for param in params])
        self._shown: dict[Any, int] = {}
        self._given: tuple[dict[Any, Any], ...] = ()
        self._given_values: tuple[tuple[Any, ...], ...] = ()
        self._numbers: dict[Any, torch.Tensor] = {}
        self._versions: dict[Any, int] = {}
        self.show(known)

    def is_known(self, state: State) -> bool:
        """Whether the state of each parameter is what `show` made of the run's: users reset moments, or count steps."""
        if not self._given:
            return not any(state.get(param) for param in self.params)
        if any(state.get(param) is not given for param, given in zip(self.params, self._given, strict=True)):
            return False
        return all(map(_are_same, self._given, self._given_values)) and all(
            numbers._version == self._versions[key] for key, numbers in self._numbers.items()
        )

    def show(self, state: State) -> None:
        """Sets the state of each parameter to its part of the run's: views, and numbers of its own."""
        now = {key: id(value) for key, value in self.state.items()}
        if now != self._shown:
            self._shown = now
            self._numbers = {
                # One would count a step once for each parameter in an optimizer without runs.
                key: value.expand(len(self.params), *value.shape).clone()
                for key, value in self.state.items()
                if isinstance(value, torch.Tensor) and (value.shape != self.tensor.shape or is_number(key, value))
            }
            parts = {key: self._parts(key, value) for key, value in self.state.items()}
            self._given = tuple({key: each[place] for key, each in parts.items()} for place in range(len(self.params)))
            self._given_values = tuple(tuple(given.values()) for given in self._given)
            for param, given in zip(self.params, self._given, strict=True):
                state[param] = given
        for key, numbers in self._numbers.items():
            numbers.copy_(self.state[key])
            self._versions[key] = numbers._version

    def take_gradient(self) -> None:
        """Sets the gradient of the run's tensor: the memory of the parameters' own if they lie as the parameters do."""
        gradients = [local_tensor(param.grad) for param in self.params]  # type: ignore[arg-type]
        gradient = gradients[0]
        if len(gradients) > 1 and self._lie_as_parameters(gradients):
            gradient = _span(gradients)
        elif len(gradients) > 1:
            gradient = torch.zeros_like(self.tensor, dtype=gradient.dtype)
            parts = zip(self._split(gradient), gradients, strict=True)
            foreach_copy_([part.view(own.shape) for part, own in parts], gradients)
        if gradient.dtype != self.tensor.dtype:
            allow_any_gradient_dtype(self.tensor)
        self.tensor.grad = gradient

    def drop_gradient(self) -> None:
        """Clears the gradient of the run's tensor, which belongs to the parameters."""
        self.tensor.grad = None

    def _lie_as_parameters(self, gradients: Sequence[torch.Tensor]) -> bool:
        # Between them is padding then, zero in flat gradients as in flat parameters, which elementwise updates keep.
        first = gradients[0]
        begin, memory, dtype = first.storage_offset(), memory_id(first), first.dtype
        return all(
            each.storage_offset() == begin + start
            and memory_id(each) == memory
            and each.dtype == dtype
            and each.is_contiguous()
            for each, (start, _) in zip(gradients, self._places, strict=True)
        )

    def _split(self, value: torch.Tensor) -> Sequence[torch.Tensor]:
        return [value[start : start + size] for start, size in self._places]

    def _parts(self, key: Any, value: Any) -> Sequence[Any]:
        """What of a value of the run's state belongs to each parameter."""
        if key in self._numbers:
            return self._numbers[key].unbind()
        if not isinstance(value, torch.Tensor):
            return [value] * len(self.params)
        if len(self.params) == 1:
            return [make_dtensor(value, self.params[0])]
        return [
            # With a storage of its own: a DTensor cannot be copied whose storage begins before it does.
            make_dtensor(torch.from_dlpack(part.view(local_tensor(param).shape)), param)
            for part, param in zip(self._split(value), self.params, strict=True)
        ]

    def _joined(self, states: Sequence[State]) -> dict[Any, Any]:
        """The run's state out of that of its parameters."""
        joined: dict[Any, Any] = {}
        for key, value in states[0].items():
            if not isinstance(value, DTensor):
                # A clone of the step count: parameters that were in a run with these may miss the next step.
                joined[key] = value.clone() if isinstance(value, torch.Tensor) else value
            elif len(states) == 1:
                joined[key] = local_tensor(value)
            else:
                joined[key] = torch.zeros_like(self.tensor, dtype=value.dtype)
                for part, state in zip(self._split(joined[key]), states, strict=True):
                    part.copy_(local_tensor(state[key]).reshape(-1))
        return joined


def neighbours(params: Sequence[DTensor], state: State) -> Iterator[Sequence[DTensor]]:
    """Splits parameters that have gradients into runs, those of one memory together.

    Args:
        params: In the optimizer's order.
        state: The optimizer's state by parameter.
    """
    first: dict[int, int] = {}
    for param in params:
        first.setdefault(memory_id(param), len(first))
    run: list[DTensor] = []
    for param in sorted(params, key=lambda p: (first[memory_id(p)], local_tensor(p).storage_offset())):
        if run and _fit(run[-1], param, state):
            run.append(param)
            continue
        if run:
            yield run
        run = [param]
    if run:
        yield run


def _fit(one: DTensor, other: DTensor, state: State) -> bool:
    assert one.grad is not None
    assert other.grad is not None
    follows = _follows(local_tensor(one), local_tensor(other)) and one.grad.dtype == other.grad.dtype
    # A run has one count of steps.
    return follows and _same_numbers(state.get(one, {}), state.get(other, {}))


def _follows(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the memory of a tensor begins where that of another one ends, or where its padding does."""
    end, begin = int(one.storage_offset()) + one.numel(), int(other.storage_offset())
    return (
        memory_id(one) == memory_id(other)
        and one.dtype == other.dtype
        and one.is_contiguous()
        and other.is_contiguous()
        and (end == begin or ParamGroup.has_padding_between(one, end, begin))
    )


def _span(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The memory from the first of tensors to the end of the last one, as one vector."""
    first, last = tensors[0], tensors[-1]
    size = last.storage_offset() + last.numel() - first.storage_offset()
    return first.detach().as_strided((size,), (1,), first.storage_offset())


def _are_same(given: Mapping[Any, Any], values: Sequence[Any]) -> bool:
    """Whether a dict has the very values that were put into it."""
    return len(given) == len(values) and all(map(operator.is_, given.values(), values))


def _same_numbers(one: State, other: State) -> bool:
    """Whether two parameters' states have the same kinds of values, and the same numbers among them."""
    return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, DTensor) or isinstance(other, DTensor):
        return isinstance(one, DTensor) and isinstance(other, DTensor) and one.dtype == other.dtype
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or (one.device == other.device and torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)
