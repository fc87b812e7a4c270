"""`flat_step`: an optimizer that updates the memory of shards, not one DTensor after the other.

torch's optimizers treat each DTensor by itself, and every operator on it goes through DTensor's dispatch. Elementwise
optimizers need not know where a parameter ends: during a step they see plain tensors, one for each run of parameters
that are neighbours in memory.
"""

from __future__ import annotations

import collections
import operator
import types
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.autograd import allow_any_gradient_dtype
from fsdp_compile._torch.tensors import foreach_copy_, local_tensor, make_dtensor, memory_id
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.fsdp2.shards import is_number

State = MutableMapping[Any, Any]
ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
)
"""torch's optimizers whose update of an element depends on that element's value, gradient and state alone."""
_FLAT = "_fsdp_flat"
Chosen = TypeVar("Chosen", bound=optim.Optimizer)


def require_elementwise(optimizer: optim.Optimizer, *, where: str) -> None:
    """Raises `ConfigError` for an optimizer that is not known to update each element by itself."""
    if type(optimizer) not in ELEMENTWISE:
        raise ConfigError(
            f"{type(optimizer).__name__} is not known to update each element independently",
            where=where,
            instead=f"one of {', '.join(c.__name__ for c in ELEMENTWISE)}; or elementwise=True if you are sure",
        )


def replace_step(optimizer: optim.Optimizer, mark: str, step: Callable[[optim.Optimizer], None]) -> None:
    """Makes `step` what an optimizer does in a step, after the closure, which sees the parameters.

    Args:
        optimizer: It is changed.
        mark: Attribute that tells that it was.
        step: Called with the optimizer, or with a copy of it.
    """

    @torch.compiler.disable
    def stepped(self: optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step(self)
        return loss

    for name, value in vars(optimizer.step).items():  # a schedule has marked the step that it counts
        vars(stepped).setdefault(name, value)
    setattr(optimizer, mark, True)
    # A method, since learning rate schedulers wrap `step.__func__`.
    optimizer.step = types.MethodType(stepped, optimizer)  # type: ignore[method-assign]


def flat_step(optimizer: Chosen, *, elementwise: bool = False) -> Chosen:
    """Makes `optimizer.step()` update the memory of shards: the same bits, in less time for small parameters.

    Groups keep their settings: parameters that are neighbours in memory are updated together if they are in one group
    and have gradients. Parameters, `param_groups`, `state` and state dicts do not change, with each parameter's state a
    DTensor; hooks of the optimizer's step see the plain tensors. Parameters that are not sharded are updated as before.

    Args:
        optimizer: One of torch's elementwise optimizers, of a sharded model. It is changed.
        elementwise: Asserts of any other optimizer that its update of an element depends on the value, the gradient and
            the state of that element alone.

    Returns:
        `optimizer`.

    Raises:
        ConfigError: For an optimizer that is not known to be elementwise.
    """
    if not elementwise:
        require_elementwise(optimizer, where="flat_step(optimizer)")
    if _FLAT not in vars(optimizer):
        replace_step(optimizer, _FLAT, FlatStep(optimizer.step))
    return optimizer


class FlatStep:
    """The runs of one optimizer, whose own step is `inner`."""

    def __init__(self, inner: Callable[[], Any]) -> None:
        self._inner = inner
        self._runs: dict[int, tuple[list[Any], list[_Run]]] = {}

    def __call__(self, optimizer: optim.Optimizer) -> None:
        """One step, in which the optimizer sees runs in the place of parameters."""
        groups, state = optimizer.param_groups, optimizer.state
        given: list[list[nn.Parameter]] = [group["params"] for group in groups]
        found = [self._runs_of(number, parameters, state) for number, parameters in enumerate(given)]
        runs = {run.tensor: run for each in found for run in each}
        hidden = {param for run in runs.values() for param in run.params}
        optimizer.state = collections.defaultdict(dict, {p: s for p, s in state.items() if p not in hidden})
        optimizer.state.update({tensor: run.state for tensor, run in runs.items()})
        try:
            for group, parameters, each in zip(groups, given, found, strict=True):
                whole = [p for p in parameters if p.grad is not None and p not in hidden]
                group["params"] = [*(run.tensor for run in each), *whole]
            self._inner()
        finally:
            for group, parameters in zip(groups, given, strict=True):
                group["params"] = parameters
            state.update({p: s for p, s in optimizer.state.items() if p not in runs})
            optimizer.state = state
            for run in runs.values():
                run.tensor.grad = None
                run.show(state)

    def _runs_of(self, number: int, parameters: Sequence[nn.Parameter], state: State) -> list[_Run]:
        """The runs of a group's sharded parameters that have gradients: those of the last step if nothing changed."""
        trained = [p for p in parameters if isinstance(p, DTensor) and has_plain_memory(p)]
        # Not by number: what has gone may have left its number to another one.
        key = [part for p in trained if p.grad is not None for part in (p, local_tensor(p), p.grad.dtype)]
        before, runs = self._runs.get(number, ([], []))
        if not _are_same(before, key) or not all(run.is_known(state) for run in runs):
            runs = [_Run(params, state) for params in _neighbours(trained, state)]
        for run in runs:
            run.take_gradient()
        self._runs[number] = (key, runs)
        return runs


def has_plain_memory(param: DTensor) -> bool:
    """Whether a parameter and its gradient are this rank's plain tensors: subclasses have operators of their own."""
    gradient = param.grad
    if not isinstance(gradient, DTensor) or gradient.placements != param.placements:
        return False
    return {type(local_tensor(param)), type(local_tensor(gradient))} <= {torch.Tensor}


class _Run:
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
        self._given_values: tuple[list[Any], ...] = ()
        self._numbers: dict[Any, torch.Tensor] = {}
        self._versions: dict[Any, int] = {}
        self.show(known)

    def is_known(self, state: State) -> bool:
        """Whether the state of each parameter is what `show` made of the run's: users reset moments, or count steps."""
        if not self._given:
            return not any(state.get(param) for param in self.params)
        if any(state.get(param) is not given for param, given in zip(self.params, self._given, strict=True)):
            return False
        values = zip(self._given, self._given_values, strict=True)
        return all(_are_same(list(given.values()), before) for given, before in values) and all(
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
            self._given_values = tuple(list(given.values()) for given in self._given)
            state.update(zip(self.params, self._given, strict=True))
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


def _neighbours(params: Sequence[DTensor], state: State) -> Iterator[Sequence[DTensor]]:
    """Splits parameters that have gradients, in the optimizer's order, into runs, those of one memory together."""
    first: dict[int, int] = {}
    for param in params:
        first.setdefault(memory_id(param), len(first))
    run: list[DTensor] = []
    for param in sorted(params, key=lambda p: (first[memory_id(p)], local_tensor(p).storage_offset())):
        if run and not _fit(run[-1], param, state):
            yield run
            run = []
        run.append(param)
    if run:
        yield run


def _fit(one: DTensor, other: DTensor, state: State) -> bool:
    """Whether the memory of one begins where that of the other ends, or its padding, and their numbers are the same."""
    here, there = local_tensor(one), local_tensor(other)
    assert one.grad is not None
    assert other.grad is not None
    end, begin = int(here.storage_offset()) + here.numel(), int(there.storage_offset())
    mine, theirs = state.get(one, {}), state.get(other, {})
    return (
        memory_id(here) == memory_id(there)
        and here.dtype == there.dtype
        and here.is_contiguous()
        and there.is_contiguous()
        and (end == begin or ParamGroup.has_padding_between(here, end, begin))
        and one.grad.dtype == other.grad.dtype
        # A run has one count of steps.
        and mine.keys() == theirs.keys()
        and all(_is_same(value, theirs[key]) for key, value in mine.items())
    )


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values of a state are parts of one dtype, or the same number."""
    if isinstance(one, DTensor) or isinstance(other, DTensor):
        return isinstance(one, DTensor) and isinstance(other, DTensor) and one.dtype == other.dtype
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or (one.device == other.device and torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)


def _span(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The memory from the first of tensors to the end of the last one, as one vector."""
    first, last = tensors[0], tensors[-1]
    size = last.storage_offset() + last.numel() - first.storage_offset()
    return first.detach().as_strided((size,), (1,), first.storage_offset())


def _are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether both have the very same items."""
    return len(one) == len(other) and all(map(operator.is_, one, other))
