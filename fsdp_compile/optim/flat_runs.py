"""Neighbouring parameters of a flat parameter that an optimizer can update as one plain tensor."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.autograd import allow_any_gradient_dtype
from fsdp_compile._torch.tensors import local_tensor, make_dtensor, memory_id
from fsdp_compile.runtime.replaced_params import SCALARS
from fsdp_compile.runtime.units import FSDPParam, FSDPParamGroup

State = MutableMapping[Any, Any]


class Run:
    """Neighbouring parameters of one flat parameter that are updated together, as one plain tensor.

    The optimizer's state of the run is one tensor per kind; each parameter's own state consists of views of it, as
    DTensors, so that state dicts look as they would without runs.

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
        self.show(known)

    def is_known(self, state: State) -> bool:
        """Whether no parameter was replaced, and the state of each is what `show` made of the run's."""
        if any(local_tensor(param.dtensor) is not param.sharded_view for param in self.params):
            return False
        if not self._given:
            return not any(state.get(param.parameter) for param in self.params)
        return all(state.get(s.parameter) is given for s, given in zip(self.params, self._given, strict=True))

    def show(self, state: State) -> None:
        """Sets the state of each parameter to views of the run's, if that has changed."""
        now = {key: id(value) for key, value in self.state.items()}
        if now == self._shown:
            return
        self._shown = now
        self._given = tuple({k: self._view(k, v, param) for k, v in self.state.items()} for param in self.params)
        for param, given in zip(self.params, self._given, strict=True):
            state[param.parameter] = given

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

    def _view(self, key: str, value: Any, param: FSDPParam) -> Any:
        """One parameter's part of a value of the run's state."""
        if not isinstance(value, torch.Tensor) or value.shape != self.tensor.shape or key in SCALARS:
            return value
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
        # Places in flat parameters are counted in real numbers.
        fits = run and group is before and run[-1].spec.offset + run[-1].spec.extent == param.spec.offset
        fits = fits and not param.sharded_view.is_complex()
        # A run has one count of steps.
        if fits and _same_numbers(state.get(run[-1].parameter, {}), state.get(param.parameter, {})):
            run.append(param)
            continue
        if run:
            yield run
        run, before = [param], group
    if run:
        yield run


def _same_numbers(one: State, other: State) -> bool:
    """Whether two parameters' states have the same kinds of values, and the same numbers among them."""
    return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, DTensor) or isinstance(other, DTensor):
        return isinstance(one, DTensor) and isinstance(other, DTensor) and one.dtype == other.dtype
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or (one.device == other.device and torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)
