"""The first all-gathers of the next forward, started when an optimizer has stepped: `FSDPOptions.unshard_after_step`.

    forward, backward   the first compiled forward says which parameter groups its first all-gather is for
    optimizer.step()    its post-hook starts to gather them
    next forward        waits, and takes them as inputs of its graph; they are freed at the end of its backward

A forward without gradients (an evaluation) frees them. Values that are outdated are gathered again (`unshard.py`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_compile._torch.autograd import backward_in_progress
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.runtime import unshard
from fsdp_compile.runtime.optimizer_steps import count_optimizer_steps, parameters_of
from fsdp_compile.runtime.refused_optimizers import SEES_WHOLE
from fsdp_compile.runtime.units import FSDPParamGroup, ModelState


class NextForward:
    """What is gathered for the next forward of one model.

    Attributes:
        is_expected: Whether a forward with gradients was the last one, so that another one is expected.
    """

    def __init__(self) -> None:
        self.is_expected = False
        self._groups: tuple[weakref.ref[FSDPParamGroup], ...] = ()
        self._gathered_from: weakref.WeakKeyDictionary[FSDPParamGroup, torch.Tensor] = weakref.WeakKeyDictionary()
        self._waits: list[weakref.finalize[..., FSDPParamGroup]] = []

    @property
    def groups(self) -> list[FSDPParamGroup]:
        """The parameter groups that are gathered first; none if they are not known, or not part of a model any more."""
        return [group for reference in self._groups if (group := reference()) is not None]

    @property
    def place(self) -> tuple[str, int]:
        """Its place among those of all models, the same on every rank; "" as the name if nothing is gathered first."""
        groups = self.groups
        if not groups:
            return "", 0
        # A unit without a number shares its group with no other rank.
        return groups[0].params[0].spec.group, next(iter(groups[0].unit.numbers.values()), 0)

    def choose(self, groups: Iterable[FSDPParamGroup]) -> None:
        """Sets the parameter groups that are gathered first, unless they are known."""
        if not self.groups:
            self._groups = tuple(weakref.ref(group) for group in groups)

    def start(self) -> None:
        """Starts to gather; what an earlier optimizer's step has started is outdated by now."""
        for group in self.groups:
            self._gathered_from[group] = group.flat_param.detach().clone()
        unshard.unshard_anew(self.groups)
        self._wait_if_deleted()

    def _wait_if_deleted(self) -> None:
        """Has what runs waited for if its model is deleted first: torch keeps it in memory until then."""
        self._stop_waiting()
        for group in self.groups:
            if group.unsharded.all_gather is not None:
                wait = weakref.finalize(group, unshard.abandon, group.unsharded.all_gather)
                wait.atexit = False  # other ranks may be gone
                self._waits.append(wait)

    def _stop_waiting(self) -> None:
        for wait in self._waits:
            wait.detach()
        self._waits.clear()

    def free(self) -> None:
        """Frees what was gathered, after waiting for it."""
        unshard.free(list(self._gathered_from))
        self._gathered_from.clear()
        self._stop_waiting()

    def check(self) -> None:
        """Raises `UnsupportedModelError` if a write that torch does not count has changed what was gathered."""
        for group, before in list(self._gathered_from.items()):
            # Outdated values are gathered again, and sharded ones were freed: neither is read.
            is_read = unshard.is_current(group)
            if is_read and not torch.equal(before.view(torch.uint8), group.flat_param.detach().view(torch.uint8)):
                raise UnsupportedModelError(
                    "parameters were written to after optimizer.step() had started to gather them for the next "
                    "forward, by a write that torch does not count (through .data, or by torch._foreach_*)",
                    where=f"option 'unshard_after_step', unit {group.unit.title}",
                    instead="the write under torch.no_grad() and without .data; or reshard() of that unit after it; or "
                    "leave the option out",
                )
        self._gathered_from.clear()
        self._stop_waiting()


def expect(groups: Sequence[FSDPParamGroup], model: ModelState) -> None:
    """Notes that a forward with gradients runs, and which parameter groups it gathers first, if any."""
    known: NextForward | None = model.next_forward
    if known is None:
        known = model.next_forward = NextForward()
        _watch_optimizers()
    known.choose(groups)
    known.is_expected = True


def begin(models: Iterable[ModelState]) -> None:
    """Before a forward of some models: checks what was gathered for it, or frees it if the forward does not train.

    Raises:
        UnsupportedModelError: If parameters were written to unnoticed.
    """
    if backward_in_progress() != -1:  # activation checkpointing repeats a forward
        return
    for model in models:
        known: NextForward | None = model.next_forward
        if known is not None:
            known.is_expected = False
            if torch.is_grad_enabled():
                known.check()
            else:
                known.free()


def expect_none(models: Iterable[ModelState]) -> None:
    """Notes that no forward of some models is expected: optimizers' steps start nothing until one runs."""
    for model in models:
        if model.next_forward is not None:
            model.next_forward.is_expected = False


@functools.cache
def _watch_optimizers() -> None:
    # After it, so that what is gathered is of the version after the step.
    count_optimizer_steps()
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    # In backward, units are updated one by one; an optimizer that sees whole parameters steps once for each.
    if backward_in_progress() != -1 or SEES_WHOLE in vars(optimizer):
        return
    models = _models_of(optimizer)
    found: list[NextForward] = [model.next_forward for model in models if model.next_forward]
    # Groups are known by their memory, whose order differs between ranks; that of collectives must not.
    for each in sorted(found, key=lambda known: known.place):
        if each.is_expected:
            each.start()


def _models_of(optimizer: Optimizer) -> set[ModelState]:
    """The models that an optimizer has parameters of: others may be deleted on some ranks, and not yet on this one."""
    own = set(map(id, parameters_of(optimizer)))
    groups = [g for g in FSDPParamGroup.alive() if any(id(param.parameter) in own for param in g.params)]
    models = {group.unit.model_ref() for group in groups}
    return {model for model in models if model is not None}
