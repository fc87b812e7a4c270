"""Neighbouring parameters of a flat parameter that an optimizer can update as one plain tensor."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.autograd import allow_any_gradient_dtype
from fsdp_compile._torch.tensors import local_tensor, make_dtensor, memory_id
from fsdp_compile.runtime.replaced_params import is_number
from fsdp_compile.runtime.units import FSDPParam, FSDPParamGroup

State = MutableMapping[Any, Any]


class Run:
    """Neighbouring parameters of one flat parameter that are updated together, as one plain tensor.

    The optimizer's state of the run is one tensor per kind; each parameter's own state consists of views of it, as
    DTensors, and of copies of its numbers, so that state dicts look as they would without runs.

    Attributes:
        params: A single one may be updated by any contiguous gradient.
        tensor: The plain tensor, in the memory of the flat parameter.
        state: The optimizer's state of `tensor`.
    """

    def __init__(self, params: Sequence[FSDPParam], known: State) -> None:
        self.params = tuple(params)
        first, last = self.params[0].spec, self.params[-1].spec
        self._begin, self._end = first.offset, last.offset + last.extent
        # Detached from the group's `flat_param`: a write that changes its version would fail a backward that saved it.
        self.tensor = self.params[0].sharded_view.detach()
        if len(self.params) > 1:
            self.tensor = self._span_of(self.tensor)
        self.state: dict[Any, Any] = self._joined([known.get(s.parameter, {}) for s in self.params])
        self._shown: dict[Any, int] = {}
        self._given: tuple[dict[Any, Any], ...] = ()
        self._given_values: tuple[tuple[Any, ...], ...] = ()
        self._numbers: dict[Any, torch.Tensor] = {}
        self._versions: dict[Any, int] = {}
        self.show(known)

    def is_known(self, state: State) -> bool:
        """Whether no parameter was replaced, and the state of each is what `show` made of the run's."""
        if any(local_tensor(param.dtensor) is not param.sharded_view for param in self.params):
            return False
        if not self._given:
            return not any(state.get(param.parameter) for param in self.params)
        if any(state.get(s.parameter) is not given for s, given in zip(self.params, self._given, strict=True)):
            return False
        # Users reset moments, or write into counts of steps.
        return all(map(_are_same, self._given, self._given_values)) and all(
            numbers._version == self._versions[key] for key, numbers in self._numbers.items()
        )

    def show(self, state: State) -> None:
        """Sets the state of each parameter to its part of the run's: views, and numbers of its own."""
        now = {key: id(value) for key, value in self.state.items()}
        if now != self._shown:
            self._shown = now
            self._numbers = {key: self._number_each(v) for key, v in self.state.items() if self._is_number(key, v)}
            self._given = tuple(
                {k: self._part(k, v, i) for k, v in self.state.items()} for i in range(len(self.params))
            )
            self._given_values = tuple(tuple(given.values()) for given in self._given)
            for param, given in zip(self.params, self._given, strict=True):
                state[param.parameter] = given
        for key, numbers in self._numbers.items():
            numbers.copy_(self.state[key])
            self._versions[key] = numbers._version

    def take_gradient(self) -> bool:
        """Sets the gradient of the run's tensor, if those of the parameters lie in memory as the parameters do."""
        gradients = [local_tensor(param.parameter.grad) for param in self.params]  # type: ignore[arg-type]
        first = gradients[0]
        if len(self.params) == 1:
            if first.dtype != self.tensor.dtype:
                allow_any_gradient_dtype(self.tensor)
            self.tensor.grad = first
            return True
        start, storage = first.storage_offset() - self._begin, memory_id(first)
        for param, gradient in zip(self.params, gradients, strict=True):
            if (
                gradient.storage_offset() - param.spec.offset != start
                or not gradient.is_contiguous()
                or gradient.dtype != self.tensor.dtype
                or memory_id(gradient) != storage
            ):
                return False
        if (start + self._end) * first.element_size() > first.untyped_storage().nbytes():
            return False
        self.tensor.grad = self._span_of(first)
        return True

    def drop_gradient(self) -> None:
        """Clears the gradient of the run's tensor, which belongs to the parameters."""
        self.tensor.grad = None

    def _span_of(self, first: torch.Tensor) -> torch.Tensor:
        """All elements from the first parameter's first to the last parameter's end."""
        # Padding included: it is zero, as is its gradient, and elementwise updates do not change that.
        return first.as_strided((self._end - self._begin,), (1,), first.storage_offset())

    def _is_number(self, key: Any, value: Any) -> bool:
        """Whether a value of the run's state is a tensor that says the same of all of its elements."""
        return isinstance(value, torch.Tensor) and (value.shape != self.tensor.shape or is_number(key, value.shape))

    def _number_each(self, value: torch.Tensor) -> torch.Tensor:
        """Memory for a number of each parameter: one would count a step once for each in an optimizer without runs."""
        return value.expand(len(self.params), *value.shape).clone()

    def _part(self, key: Any, value: Any, place: int) -> Any:
        """The part of a value of the run's state that belongs to the parameter at `place`."""
        if key in self._numbers:
            return self._numbers[key][place]
        if not isinstance(value, torch.Tensor):
            return value
        param = self.params[place]
        if len(self.params) > 1:
            start = param.spec.offset - self._begin
            # With a storage of its own: a DTensor cannot be copied whose storage begins before it does.
            value = torch.from_dlpack(value[start : start + param.sharded_view.numel()].view(param.sharded_size))
        return make_dtensor(value, param.dtensor)

    def _joined(self, states: Sequence[State]) -> dict[Any, Any]:
        """The run's state out of that of its parameters."""
        joined: dict[Any, Any] = {}
        for key, value in states[0].items():
            if not isinstance(value, DTensor):
                # A clone of the step count: parameters that were in a run with these may miss the next step.
                joined[key] = value.clone() if isinstance(value, torch.Tensor) else value
            elif len(self.params) == 1:
                joined[key] = local_tensor(value)
            else:
                whole = torch.zeros_like(self.tensor, dtype=value.dtype)
                for param, state in zip(self.params, states, strict=True):
                    start = param.spec.offset - self._begin
                    whole[start : start + param.sharded_view.numel()] = local_tensor(state[key]).reshape(-1)
                joined[key] = whole
        return joined


def neighbours(params: Sequence[tuple[FSDPParamGroup, FSDPParam]], state: State) -> Iterator[Sequence[FSDPParam]]:
    """Splits parameters into runs.

    Args:
        params: With their parameter groups, by group and offset.
        state: The optimizer's state by parameter.
    """
    run: list[FSDPParam] = []
    before: FSDPParamGroup | None = None
    for group, param in params:
        fits = run and group is before and run[-1].spec.offset + run[-1].spec.extent == param.spec.offset
        # A run has one count of steps.
        if fits and _same_numbers(state.get(run[-1].parameter, {}), state.get(param.parameter, {})):
            run.append(param)
            continue
        if run:
            yield run
        run, before = [param], group
    if run:
        yield run


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
