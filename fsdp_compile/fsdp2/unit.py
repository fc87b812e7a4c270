"""Units: who gathers the parameters of one call of FSDP2's `fully_shard` in a forward.

    forward                             who gathers           registered in the modules     classes of the modules
    traced into a graph                 the graph             DTensors                      properties: `unshard` markers
    in Python, Dynamo watches           nobody yet: DEFERRED  DTensors                      properties
      ... and Python reads a parameter  FSDP2's pre-forward   full parameters               the user's own
    in Python, Dynamo does not watch    FSDP2's pre-forward   full parameters               the user's own

Dynamo runs the hooks of the compiled root, and of a unit that is called behind a graph break, in Python, and then traces
their forwards; until it has, nobody can tell whether a graph will gather the unit. The class is what tells Dynamo who
gathers: it guards on the type of each module anyway.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from fsdp_compile._torch import fully_shard as fsdp2
from fsdp_compile._torch.autograd import after_this_backward
from fsdp_compile._torch.dynamo import call_of, is_on_stack
from fsdp_compile.fsdp2.module_class import refresh_reads, set_flat
from fsdp_compile.fsdp2.param_group import ParamGroup


class Gatherer(enum.Enum):
    """Who gathers a unit in the forward that runs."""

    GRAPH = "graph"
    DEFERRED = "deferred"
    HOOKS = "hooks"


class Model:
    """What the units of one FSDP2 model share.

    Attributes:
        root: The module of FSDP2's root state.
        units: In the order of FSDP2's states.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = weakref.ref(root)
        self.units: list[Unit] = []
        self._pending: set[ParamGroup] = set()
        self._ends_with: set[int] = set()

    @property
    def root(self) -> nn.Module:
        """The module of FSDP2's root state."""
        root = self._root()
        assert root is not None
        return root

    @property
    def groups(self) -> list[ParamGroup]:
        """The parameter groups of all units."""
        return [group for unit in self.units for group in unit.groups]

    @property
    def has_pending(self) -> bool:
        """Whether any group has gradients that are not fully reduced."""
        return bool(self._pending)

    def note_pending(self, group: ParamGroup) -> None:
        """Records that a group has gradients that are not fully reduced."""
        self._pending.add(group)

    def at_end_of_backward(self, task: int) -> None:
        """Reduces, when a backward ends that reduces gradients, those that earlier ones have left and it did not take."""
        if self._pending and task not in self._ends_with:
            self._ends_with.add(task)
            after_this_backward(lambda: self._end_backward(task))

    def _end_backward(self, task: int) -> None:
        self._ends_with.discard(task)
        for group in self.groups:  # in the order that all ranks have
            if group in self._pending:
                group.pending.reduce_rest()
                if not group.pending:
                    self._pending.discard(group)


class Unit:
    """The parameters of one call of FSDP2's `fully_shard`: gathered, reduced and freed together.

    Attributes:
        state: FSDP2's.
        title: Names of its modules, from the root of the model.
        groups: One for each FSDP2 group, dtype and trainability.
        gatherer: Who gathers it in the forward that runs.
        pre_forward: FSDP2's hook.
    """

    pre_forward: fsdp2.PreHook

    def __init__(self, model: Model, state: fsdp2.FSDPState, title: str) -> None:
        self._model = weakref.ref(model)
        self.state = state
        self.title = title
        self.groups: list[ParamGroup] = []
        self.gatherer = Gatherer.GRAPH
        self._call: FrameType | None = None
        self._classes: list[tuple[weakref.ref[nn.Module], type, type]] = []

    @property
    def model(self) -> Model:
        """The model that it is a part of."""
        model = self._model()
        assert model is not None
        return model

    def make_groups(self, names: dict[int, str]) -> None:
        """Moves the shards of FSDP2's groups into flat buffers."""
        for of_torch in fsdp2.groups_of(self.state):
            kinds: dict[Any, list[fsdp2.TorchParam]] = {}
            for param in fsdp2.params_of(of_torch):
                parameter = fsdp2.sharded_param(param)
                kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append(param)
            self.groups += [ParamGroup(self, of_torch, members, names) for members in kinds.values()]
            fsdp2.observe(of_torch, _Observer(self, of_torch))

    def set_classes(self, classes: Sequence[tuple[nn.Module, type, type]]) -> None:
        """Sets, for each module that reads its parameters, the class while graphs gather, and while hooks do."""
        self._classes = [(weakref.ref(module), traced, plain) for module, traced, plain in classes]
        self._swap(Gatherer.GRAPH)

    def _swap(self, gatherer: Gatherer) -> None:
        self.gatherer = gatherer
        for reference, traced, plain in self._classes:
            module = reference()
            if module is not None:
                fsdp2.set_class(module, plain if gatherer is Gatherer.HOOKS else traced)

    def defer(self, call: FrameType | None) -> None:
        """Begins a call that Dynamo watches: a graph gathers the unit, or the first read in Python does."""
        self.gatherer = Gatherer.DEFERRED
        self._call = call
        self.follow()

    def continue_as_deferred(self) -> None:
        """After the model was taken over in the middle of a forward: leaves a call that FSDP2's hook has begun to graphs."""
        if fsdp2.training_state(self.state) is fsdp2.TrainingState.FORWARD:
            fsdp2.leave_forward(self.state)
            self.defer(next((call for m in fsdp2.modules_of(self.state) if (call := call_of(m)) is not None), None))

    @property
    def may_be_deferred(self) -> bool:
        """Whether a call of it began in code that Dynamo watches."""
        return self._call is not None

    @property
    def is_deferred(self) -> bool:
        """Whether such a call runs: it may have raised, or may have begun before the model was taken over."""
        if self.gatherer is Gatherer.DEFERRED and (self._call is None or not is_on_stack(self._call)):
            self.gatherer, self._call = Gatherer.GRAPH, None
        return self.gatherer is Gatherer.DEFERRED

    @property
    def is_called(self) -> bool:
        """Whether a hook of it, or of its model, has run in Python for the forward that runs, and followed parameters."""
        root = self.model.units[0]
        return Gatherer.HOOKS in (self.gatherer, root.gatherer) or self.is_deferred or root.is_deferred

    def begin_hooks(self) -> None:
        """Makes FSDP2's hooks gather the unit from here on."""
        self._call = None
        self.follow()
        for group in self.groups:
            group.pending.give_to_torch()
            if torch.is_grad_enabled():
                group.updates.begin_forward()
        self._swap(Gatherer.HOOKS)

    def end_hooks(self) -> None:
        """Ends a forward in which FSDP2's hooks have gathered the unit."""
        if not fsdp2.is_partly_run(self.state):
            self._swap(Gatherer.GRAPH)

    def end_deferred(self) -> None:
        """Ends a call in which Python has read no parameter of the unit."""
        self.gatherer, self._call = Gatherer.GRAPH, None

    def gather_late(self, module: nn.Module) -> None:
        """Runs FSDP2's pre-forward for a unit of which Python reads a parameter in a forward that Dynamo was to compile."""
        if self.is_deferred:
            self.begin_hooks()
            self.pre_forward(module, (), {})

    def follow(self) -> None:
        """Before a forward: follows parameters that were converted, replaced, frozen or thawed since the last one."""
        for group in self.groups:
            # FSDP2 leaves units that it does not free after forward gathered, if no backward followed (an evaluation).
            if self.gatherer is not Gatherer.HOOKS and not fsdp2.is_sharded(group.of_torch):
                fsdp2.reshard(group.of_torch)
            if group.follow_parameters():
                set_flat(group)
                refresh_reads(group)


class _Observer:
    """Follows what users change on one of FSDP2's groups, and takes its unreduced gradients back."""

    def __init__(self, unit: Unit, of_torch: fsdp2.TorchGroup) -> None:
        self._unit = weakref.ref(unit)
        self._of_torch = weakref.ref(of_torch)

    def _groups(self) -> list[ParamGroup]:
        unit, of_torch = self._unit(), self._of_torch()
        return [] if unit is None else [group for group in unit.groups if group.of_torch is of_torch]

    def settings_changed(self) -> None:
        for group in self._groups():
            group.refresh_specs()
            refresh_reads(group)

    def post_backward(self, run: Any) -> None:
        for group in self._groups():
            group.updates.begin_backward()
        run()
        of_torch = self._of_torch()
        if of_torch is not None and not fsdp2.reduces(of_torch):
            for group in self._groups():
                if group.is_trainable:
                    group.pending.take_from_torch()
                    refresh_reads(group)
