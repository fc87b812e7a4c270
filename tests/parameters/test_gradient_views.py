"""Gradients that are given again: nobody can tell them from new ones, and who holds old ones keeps them."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_compile
from fsdp_compile.parameters.together import Together
from tests.fake_world import fake_world

STEPS = 4


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale + x


@dataclasses.dataclass
class _Training:
    """A model of two units, of which a step is trained at a time.

    Attributes:
        model: The model.
        compiled: The same, compiled.
        seen: What a scenario has seen, in order.
    """

    model: nn.Sequential
    compiled: Any
    seen: list[torch.Tensor | bool] = dataclasses.field(default_factory=list)

    @staticmethod
    def start() -> _Training:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(_Scaled(), _Scaled())
        fsdp_compile.fully_shard(model)
        return _Training(model, torch.compile(model, backend="fsdp", options={"lower": "eager"}))

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def gradients(self) -> list[DTensor]:
        found = [p.grad for p in self.parameters]
        assert all(isinstance(gradient, DTensor) for gradient in found)
        return found  # type: ignore[return-value]

    @property
    def locals(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [gradient.to_local() for gradient in self.gradients]

    def loss(self, step: int) -> torch.Tensor:
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
        loss: torch.Tensor = self.compiled(x).square().sum()
        return loss

    def backward(self, step: int) -> None:
        self.loss(step).backward()
        self.look()

    def look(self) -> None:
        """Sees all that there is to be seen of gradients."""
        for gradient in self.gradients:
            local = gradient._local_tensor
            self.seen += [local.detach().clone(), gradient.full_tensor().detach().clone()]
            self.seen += [gradient.requires_grad, local.requires_grad, bool(vars(gradient)), bool(vars(local))]
            self.seen += [gradient.shape == local.shape, gradient._spec.ndim == local.dim()]
            self.seen += [gradient.stride() == local.stride(), local.is_contiguous()]


Scenario = Callable[[_Training], None]
SCENARIOS: dict[str, Scenario] = {}


def _scenario(run: Scenario) -> Scenario:
    SCENARIOS[run.__name__.removeprefix("_")] = run
    return run


def _holding(name: str, hold: Callable[[_Training], Any], values: Callable[[Any], list[torch.Tensor]]) -> None:
    """Someone who keeps something of a step's gradients over later steps."""

    def run(training: _Training) -> None:
        held = []
        for step in range(STEPS):
            training.backward(step)
            held.append(hold(training))
            training.model.zero_grad()
        training.seen += [value.detach().clone() for each in held for value in values(each)]

    SCENARIOS[name] = run


def _to_locals(held: list[DTensor]) -> list[torch.Tensor]:
    return [gradient.to_local() for gradient in held]


_holding("holds_gradients", lambda training: training.gradients, _to_locals)
_holding("holds_one_gradient", lambda training: training.gradients[1:2], _to_locals)
_holding("holds_to_local", lambda training: [g.to_local() for g in training.gradients], list)
_holding("holds_one_local", lambda training: training.locals[-1:], list)
_holding("holds_detached", lambda training: [g.detach() for g in training.gradients], _to_locals)
_holding("holds_full_tensors", lambda training: [g.full_tensor() for g in training.gradients], list)
_holding("holds_views", lambda training: [g[0] for g in training.locals], list)
_holding(
    "holds_numpy",
    lambda training: [g.numpy() for g in training.locals[:1]],
    lambda held: [torch.tensor(a) for a in held],
)
_holding(
    "holds_storage",
    lambda training: (
        training.locals[0].shape,
        training.locals[0].storage_offset(),
        training.locals[0].untyped_storage(),
    ),
    lambda held: [torch.empty(0).set_(held[2], held[1], held[0], torch.empty(held[0]).stride())],
)
_holding(
    "holds_dlpack", lambda training: torch.utils.dlpack.to_dlpack(training.locals[0]), lambda c: [torch.from_dlpack(c)]
)


@_scenario
def _holds_an_autograd_graph(training: _Training) -> None:
    w = torch.ones(3, 3, requires_grad=True)
    products = []
    for step in range(STEPS):
        training.backward(step)
        products.append((w * training.locals[0]).sum())
        training.model.zero_grad()
    for product in products:
        (gradient,) = torch.autograd.grad(product, w)
        training.seen.append(gradient)


@_scenario
def _holds_nothing(training: _Training) -> None:
    optimizer = torch.optim.SGD(training.parameters, lr=0.1, momentum=0.9)
    for step in range(STEPS):
        training.backward(step)
        optimizer.step()
        optimizer.zero_grad()


@_scenario
def _steps_on_flat_shards(training: _Training) -> None:
    optimizer = fsdp_compile.flat_step(torch.optim.AdamW(training.parameters, lr=0.1))
    for step in range(STEPS):
        training.backward(step)
        optimizer.step()
        optimizer.zero_grad()


@_scenario
def _accumulates(training: _Training) -> None:
    for step in range(2 * STEPS):
        training.backward(step)
        if step % 3 == 2:
            training.model.zero_grad()


@_scenario
def _clips(training: _Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        torch.nn.utils.clip_grad_norm_(training.parameters, 0.1)
        for local in training.locals:
            local.mul_(0.5)
        del local
        training.look()
        training.model.zero_grad()


@_scenario
def _swaps(training: _Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        training.parameters[step % 3].grad = 2 * training.gradients[step % 3]
        training.look()
        if step % 2:
            training.model.zero_grad()


@_scenario
def _swaps_two(training: _Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        one, other = training.model[0].scale, training.model[1].scale
        assert isinstance(one, nn.Parameter)
        assert isinstance(other, nn.Parameter)
        one.grad, other.grad = other.grad, one.grad
        training.look()
        training.model.zero_grad()


@_scenario
def _swaps_what_gradients_hold(training: _Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        one, other = training.gradients[0], training.gradients[3]
        assert one.shape == other.shape
        if step % 2:
            one._local_tensor, other._local_tensor = other._local_tensor, one._local_tensor
        else:
            one._spec = training.gradients[2]._spec
        del one, other
        training.model.zero_grad()


@_scenario
def _zeroes(training: _Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        training.model.zero_grad(set_to_none=step == 1)


@_scenario
def _drops_one(training: _Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        training.parameters[step % 4].grad = None


@_scenario
def _changes_shapes(training: _Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        for local in training.locals:
            if step % 2:
                local.unsqueeze_(0)
            elif local.dim() == 2:
                local.t_()
        del local
        training.model.zero_grad()


@_scenario
def _changes_data(training: _Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        held = training.gradients[0].to_local() if step % 2 else None  # as many users of the memory as there were
        training.locals[1].data = torch.zeros_like(training.locals[1])
        training.look()
        training.model.zero_grad()
        training.backward(step + 1)
        del held
        training.model.zero_grad()


@_scenario
def _changes_dtypes(training: _Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        changed = training.gradients[-1]
        changed.data = changed.data.half() if step % 2 else torch.cat([changed.data, changed.data])
        del changed
        training.model.zero_grad()


@_scenario
def _wants_gradients_of_gradients(training: _Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        (training.locals[1] if step % 2 else training.gradients[0]).requires_grad_()
        training.model.zero_grad()


@_scenario
def _marks(training: _Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        marked = training.locals[-1] if step % 2 else training.gradients[0]
        marked.is_clipped = True  # type: ignore[attr-defined]
        del marked  # who holds it is seen by that alone
        training.model.zero_grad()


@_scenario
def _remembers_weakly(training: _Training) -> None:
    references: list[weakref.ref[torch.Tensor]] = []
    for step in range(STEPS):
        training.backward(step)
        alive = {id(reference()) for reference in references}
        training.seen += [id(each) in alive for each in (*training.gradients, *training.locals)]
        references.append(weakref.ref(training.locals[-1] if step % 2 else training.gradients[0]))
        training.model.zero_grad()


@_scenario
def _frees_memory(training: _Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        training.locals[0].untyped_storage().resize_(0)
        training.model.zero_grad()


@_scenario
def _replaces_parameters(training: _Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        training.model.zero_grad()
        inner = training.model[step % 2].inner
        assert isinstance(inner, nn.Linear)
        inner.weight = nn.Parameter(torch.full((3, 3), step / 10))
        training.backward(step)
        training.model.zero_grad()
        training.model[0].scale.requires_grad_(step % 2 == 1)
        training.loss(step).backward()
        training.model[0].scale.requires_grad_()
        training.model.zero_grad()


@_scenario
def _ties(training: _Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        training.model.zero_grad()
        scale = training.model[0].scale
        assert isinstance(scale, nn.Parameter)
        training.model[1].scale = scale if step % 2 == 0 else nn.Parameter(scale.full_tensor().detach().clone())  # type: ignore[attr-defined]


@_scenario
def _hooks(training: _Training) -> None:
    first, *_, last = training.parameters
    for step in range(STEPS):
        training.backward(step)
        training.model.zero_grad()
        called: list[torch.Tensor] = []
        handles = [
            first.register_hook(lambda gradient: 2 * gradient),
            last.register_post_accumulate_grad_hook(lambda p, called=called: called.append(p.grad)),
        ]
        training.backward(step)
        training.seen.append(len(called) == 1 and called[0] is last.grad)
        training.model.zero_grad()
        for handle in handles:
            handle.remove()


@_scenario
def _withholds_gradients(training: _Training) -> None:
    for step in range(STEPS):
        with fsdp_compile.no_sync(training.model):
            training.loss(step).backward()
        training.seen += [p.grad is None for p in training.parameters]
        training.backward(step + 1)
        training.model.zero_grad()


@_scenario
def _waits_for_the_last_backward(training: _Training) -> None:
    for step in range(STEPS):
        training.model.set_is_last_backward(False)  # type: ignore[operator]
        training.loss(step).backward()
        training.seen += [p.grad is None for p in training.parameters]
        torch.autograd.grad(training.loss(step), [next(iter(training.model.parameters()))], allow_unused=True)
        training.model.set_is_last_backward(True)  # type: ignore[operator]
        training.backward(step + 1)
        training.model.zero_grad()


@_scenario
def _asks_for_gradients_of_inputs(training: _Training) -> None:
    for step in range(STEPS):
        x = torch.ones(2, 3, requires_grad=True)
        training.seen += torch.autograd.grad(training.compiled(x).sum(), x)
        training.compiled(x).sum().backward(inputs=[x])
        training.seen += [p.grad is None for p in training.parameters]
        training.backward(step)
        training.model.zero_grad()


@_scenario
def _uses_a_unit_in_two_graphs(training: _Training) -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        x = training.model[0](training.model(x))
        torch._dynamo.graph_break()
        result: torch.Tensor = training.model[0](x)
        return result

    training.compiled = torch.compile(twice, backend="fsdp", options={"lower": "eager"})
    for step in range(STEPS):
        training.backward(step)
        training.model.zero_grad()


@_scenario
def _hooks_on_a_unit_in_two_graphs(training: _Training) -> None:
    _uses_a_unit_in_two_graphs(training)
    called: list[torch.Tensor] = []
    scale = training.model[0].scale
    assert isinstance(scale, nn.Parameter)
    scale.register_post_accumulate_grad_hook(lambda p: called.append(p.grad.full_tensor()))
    for step in range(STEPS):
        training.backward(step)
        training.model.zero_grad()
    assert len(called) == STEPS, "once a backward, with the sum"
    training.seen += called


@_scenario
def _fails_in_backward(training: _Training) -> None:
    def fail(_gradient: torch.Tensor) -> None:
        raise RuntimeError("in backward")

    for step in range(STEPS):
        x = torch.ones(2, 3, requires_grad=True)
        given = 2 * x
        given.register_hook(fail)
        with pytest.raises(RuntimeError, match="in backward"):
            training.compiled(given).sum().backward()
        training.model.zero_grad()
        training.backward(step)
        training.model.zero_grad()


@_scenario
def _watches_operators(training: _Training) -> None:
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    for step in range(STEPS):
        loss = training.loss(step)
        if step % 2:
            with Watch():
                loss.backward()
        else:
            loss.backward()
        training.look()
        training.model.zero_grad()


@_scenario
def _copies_and_pickles(training: _Training) -> None:
    kept = []
    for step in range(STEPS):
        training.backward(step)
        kept.append(copy.deepcopy(training.gradients[0]))
        training.model.zero_grad()
    training.seen += [gradient.to_local() for gradient in kept]


@pytest.mark.parametrize("name", SCENARIOS)
def test_everybody_sees_what_new_gradients_would_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(1):
        mine = _Training.start()
        SCENARIOS[name](mine)
        monkeypatch.setattr(Together, "may_wait", lambda _: False)
        new = _Training.start()
        SCENARIOS[name](new)
    assert len(mine.seen) == len(new.seen) > 0
    for number, (one, other) in enumerate(zip(mine.seen, new.seen, strict=True)):
        same = (
            torch.equal(one, other)
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
            else one is other
        )
        assert same, f"sight {number} of {len(mine.seen)}: {one} instead of {other}"


@pytest.mark.core
def test_gradients_that_nobody_holds_are_given_again() -> None:
    with fake_world(1):
        training = _Training.start()
        optimizer = torch.optim.SGD(training.parameters, lr=0.1)
        given = []
        for step in range(STEPS):
            training.backward(step)
            torch.nn.utils.clip_grad_norm_(training.parameters, 0.1)
            given.append(list(map(id, training.gradients)))
            optimizer.step()
            optimizer.zero_grad()
        assert given[1:] == given[:-1]


def test_old_gradients_are_freed_with_what_they_belong_to() -> None:
    with fake_world(1):
        training = _Training.start()
        training.backward(0)
        training.model.zero_grad()
        flats = [flat for unit in fsdp_compile.units(training.model) for flat in unit.flats]
        assert all(flat.together is not None for flat in flats)
        training.model.reset_iter_state()  # type: ignore[operator]
        assert all(flat.together is None for flat in flats)
