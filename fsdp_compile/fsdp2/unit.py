"""Units: who gathers the parameters of one call of FSDP2's `fully_shard` in a forward.

    forward                             who gathers           registered in the modules     classes of the modules
    traced into a graph                 the graph             DTensors                      properties: markers
    in Python, Dynamo watches           open: DEFERRED         DTensors                      properties
      ... and Python reads a parameter  FSDP2's pre-forward   full parameters               the user's own
    in Python, Dynamo does not watch    FSDP2's pre-forward   full parameters               the user's own

Dynamo runs the hooks of the compiled root, and of a unit that is called behind a graph break, in Python, and then
traces their forwards; until it has, it is open whether a graph will gather the unit. The class is what tells
Dynamo who gathers: it guards on the type of each module anyway.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile._torch import fully_shard as fsdp2
from fsdp_compile._torch import fully_shard_params as torch_params
from fsdp_compile._torch.autograd import after_outermost_backward, after_this_backward, backward_in_progress
from fsdp_compile._torch.dynamo import call_of, is_on_stack, keep_sizes_fixed
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.fsdp2.module_class import refresh_reads
from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.fsdp2.pipeline import Pipeline
from fsdp_compile.layout.spec import GradPlacement


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
        followed_in: The call of a compiled root before which all units have followed their parameters.
        pipeline: Collectives that run between its graphs.
        pending: Groups that have gradients which are not fully reduced.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = weakref.ref(root)
        self.units: list[Unit] = []
        self.followed_in: FrameType | None = None
        self.pipeline = Pipeline()
        self.pending: set[ParamGroup] = set()
        self._ends_with: dict[int, bool] = {}

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
    def is_called(self) -> bool:
        """Whether the call of a compiled root runs, before which all units have followed their parameters."""
        return self.followed_in is not None and is_on_stack(self.followed_in)

    def at_end_of_backward(self, task: int, *, reduces: bool) -> None:
        """When a backward of graphs ends: frees what the user, or an evaluation, has left gathered, as FSDP2 does.

        One that `reduces` then reduces gradients that are left of earlier ones, too.
        """
        if task not in self._ends_with:
            # A backward inside it makes gradients of a part of the model. FSDP2 ends first, wherever the backward
            # begins: to the gradients of units that its hooks have gathered it adds those that wait here.
            after_outermost_backward(lambda: after_this_backward(lambda: self._end_backward(task)))
        self._ends_with[task] = reduces or self._ends_with.get(task, False)

    def _end_backward(self, task: int) -> None:
        reduces = self._ends_with.pop(task)
        for unit in [group.unit for group in self.groups if group.gathered]:
            unit.forget_gathered()
        fsdp2.free_after_backward([unit.state for unit in self.units])
        for group in self.groups if reduces else ():  # in the order that all ranks have
            if group in self.pending:
                if group.unit.only_hooks and group.pending:
                    group.of_torch.post_backward()  # the user's hook may reduce them
                else:
                    group.pending.reduce_rest()
                if not group.pending:
                    self.pending.discard(group)
            if group.ends_backward:
                group.end_backward()


class Unit:
    """The parameters of one call of FSDP2's `fully_shard`: gathered, reduced and freed together.

    Its state is changed in this file. `fsdp2/take_over.py` sets `is_in_part`, `pre_hook` and `post_hook`,
    `explain/stand_in.py` sets `pre_hook`, and `lower/region.py` fills `compiled_regions`.

    Attributes:
        model: The model that it is a part of.
        state: FSDP2's.
        title: Names of its modules, from the root of the model, which is "(root)".
        groups: One for each FSDP2 group, dtype and trainability.
        gatherer: Who gathers it in the forward that runs.
        prefetched: Titles of the units that are to be gathered early where this one is used, in forward and backward.
        only_hooks: What has been set on it that FSDP2's hooks can do alone: they gather it in all forwards. Or empty.
        pre_hook: FSDP2's.
        post_hook: FSDP2's.
        is_in_part: Whether the last forward read it in a graph of a part of the model, whose root ran in Python.
        compiled_regions: Its compiled graphs, by the parameter groups that they read.
    """

    pre_hook: fsdp2.PreHook
    post_hook: fsdp2.PostHook

    def __init__(self, model: Model, state: fsdp2.FSDPState, title: str) -> None:
        self.model = model
        self.state = state
        self.title = title
        self.groups: list[ParamGroup] = []
        self.gatherer = Gatherer.GRAPH
        self.only_hooks = self._only_hooks()
        self.is_in_part = False
        self.compiled_regions: dict[tuple[int, ...], Any] = {}
        self._call: FrameType | None = None
        self.prefetched: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._holds_given = False
        self._is_followed = False
        self._classes: list[tuple[weakref.ref[nn.Module], type, type]] = []

    @functools.cached_property
    def inner_units(self) -> list[Unit]:
        """The units of the modules below its own."""
        modules = {id(m) for module in fsdp2.modules_of(self.state) for m in module.modules()}
        return [u for u in self.model.units if u is not self and id(fsdp2.modules_of(u.state)[0]) in modules]

    def _only_hooks(self) -> str:
        found = (self.kept_by_torch(group) or fsdp2.only_for_hooks(group) for group in fsdp2.groups_of(self.state))
        return next(filter(None, found), "")

    def kept_by_torch(self, of_torch: fsdp2.TorchGroup) -> str:
        """Why the shards of a group stay where FSDP2 has them; empty if they need not."""
        if fsdp2.has_extensions(of_torch):
            return "fsdp_pre_all_gather() of the shards' class"
        if any(map(torch_params.has_spmd_types, fsdp2.params_of(of_torch))):
            return "spmd_types of a parameter"
        # This setting of ours sets `grad_dtype` itself.
        if fsdp2.own_setting(self.state, "keep_low_precision_grads", default=False):
            return ""
        own = any(map(torch_params.has_own_grad_dtype, fsdp2.params_of(of_torch)))
        return "Tensor.grad_dtype of a parameter" if own else ""

    def make_groups(self, titles: dict[int, str]) -> None:
        """Moves the shards of FSDP2's groups into flat buffers, but for those that stay."""
        for of_torch in fsdp2.groups_of(self.state):
            fsdp2.observe(of_torch, self)
            if self.kept_by_torch(of_torch):
                continue
            kinds: dict[Any, list[torch_params.TorchParam]] = {}
            for param in fsdp2.params_of(of_torch):
                parameter = torch_params.sharded_param(param)
                dtypes = parameter.dtype, torch_params.param_dtype(param), torch_params.reduce_dtype(param)
                kinds.setdefault((*dtypes, parameter.requires_grad), []).append(param)
            self.groups += [ParamGroup(self, of_torch, members, titles) for members in kinds.values()]

    def settings_changed(self) -> None:
        """Follows settings that users have changed on FSDP2's objects."""
        self.only_hooks = self._only_hooks()
        self._swap(self.gatherer)
        self.refresh_specs()

    def refresh_specs(self) -> None:
        """Makes the next graphs read parameters as settings are now."""
        for group in self.groups:
            group.refresh_specs()
            refresh_reads(group)

    @property
    def is_converted(self) -> bool:
        """Whether its parameters have another dtype, or are on another device, since the last forward."""
        return any(group.is_converted for group in self.groups)

    def remake_groups(self, titles: dict[int, str]) -> None:
        """Moves converted shards into flat buffers of their own dtype and device.

        Raises:
            UnsupportedModelError: If gradients wait for their reduction.
        """
        for group in self.groups:
            if group.pending:
                raise UnsupportedModelError(
                    "parameters are converted while gradients of microbatches wait for their reduction",
                    where=f"unit {self.title}",
                    instead="convert the model between steps",
                )
            for param in group.params:
                if param.is_moved:
                    param.update_shard_data()
        for of_torch in fsdp2.groups_of(self.state):
            fsdp2.follow_dtypes(of_torch)
        self.groups = []
        self.make_groups(titles)

    def set_classes(self, classes: Sequence[tuple[nn.Module, type, type]]) -> None:
        """Sets, for each module that reads its parameters, the class while graphs gather, and while hooks do."""
        self._classes = [(weakref.ref(module), traced, plain) for module, traced, plain in classes]
        self._swap(Gatherer.GRAPH)

    def _swap(self, gatherer: Gatherer) -> None:
        self.gatherer = gatherer
        for reference, traced, plain in self._classes:
            module = reference()
            if module is not None:
                fsdp2.set_class(module, plain if gatherer is Gatherer.HOOKS or self.only_hooks else traced)

    def defer(self, call: FrameType | None) -> None:
        """Begins a call that Dynamo watches: a graph gathers the unit, or the first read in Python does."""
        self.gatherer, self._call = Gatherer.DEFERRED, call
        self.follow()

    def continue_forward(self) -> None:
        """After the model was taken over in the middle of a forward: leaves a call that FSDP2 has begun to graphs."""
        if fsdp2.training_state(self.state) is not fsdp2.TrainingState.FORWARD:
            return
        if 0 < len(fsdp2.modules_to_run(self.state)) < len(fsdp2.modules_of(self.state)):
            # Some have ended with parameters that FSDP2 has gathered, whose gradients it reduces.
            self._swap(Gatherer.HOOKS)
            return
        fsdp2.leave_forward(self.state)
        if self.only_hooks:
            self.begin_hooks()
            self.pre_forward(fsdp2.modules_of(self.state)[0], (), {})
        else:
            self.defer(next((call for m in fsdp2.modules_of(self.state) if (call := call_of(m)) is not None), None))

    @property
    def may_be_deferred(self) -> bool:
        """Whether a call of it began in code that Dynamo watches."""
        return self._call is not None

    @property
    def is_deferred(self) -> bool:
        """Whether such a call runs: it may have raised, or may have begun before the model was taken over."""
        if self.gatherer is Gatherer.DEFERRED and (self._call is None or not is_on_stack(self._call)):
            self.end_deferred()
        return self.gatherer is Gatherer.DEFERRED

    @property
    def is_followed(self) -> bool:
        """Whether a hook of it, or of its model, has followed parameters in Python for the graph that comes next."""
        root = self.model.units[0]
        by_hooks = Gatherer.HOOKS in (self.gatherer, root.gatherer) or self.is_deferred or root.is_deferred
        return self._is_followed and (by_hooks or self.model.is_called)

    def begin_hooks(self) -> None:
        """Makes FSDP2's hooks gather the unit from here on."""
        self._call = None
        self.follow(by_hooks=True)
        for group in self.groups:
            group.pending.refuse_partial()
            if torch.is_grad_enabled():
                group.updates.begin_forward()
        self._swap(Gatherer.HOOKS)

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs FSDP2's pre-forward; values that `functional_call` has put in the place of parameters stay.

        Raises:
            UnsupportedModelError: If such a value is sharded.
        """
        given = self.given_values()
        for reader, name, value in given:
            if isinstance(value, DTensor) and all(
                torch_params.unsharded_spec(p.of_torch) is None for g in self.groups for p in g.params
            ):
                raise UnsupportedModelError(
                    "functional_call() is given a sharded value",
                    where=f"{type(reader).__name__}.{name}",
                    instead="full values: {name: p.full_tensor() for name, p in model.named_parameters()}",
                )
        absent = [(reader, name) for reader, name, _ in given if name not in reader._parameters]
        self._holds_given, grad = bool(given), torch.is_grad_enabled()
        # Later forwards write into the memory that FSDP2 gathers into first.
        with torch.inference_mode(mode=False), torch.set_grad_enabled(grad):
            made = self.pre_hook(module, args, kwargs)
        for reader, name, value in given:
            reader._parameters[name] = value  # type: ignore[assignment]
        for reader, name in absent:  # a forward has deleted it, to put another tensor in its place
            del reader._parameters[name]
        return made

    def given_values(self) -> list[tuple[nn.Module, str, object]]:
        """What is registered for parameters of the unit in the place of what FSDP2 registers."""
        unregistered = [group for group in self.groups if not group.is_registered]
        for group in unregistered:
            group.tie_again()
            group.refuse_parametrized()
        return [
            (module, name, value)
            for group in unregistered
            for param in group.params
            for module, name in param.refs
            if not fsdp2.is_registered_by_torch(param.of_torch, value := module._parameters.get(name))
        ]

    def gather_given(self) -> None:
        """Gathers the unit by FSDP2's hooks if `functional_call` has put values in the place of its parameters."""
        if self.gatherer is not Gatherer.HOOKS and not self.only_hooks and self.given_values():
            self.begin_hooks()
            self.pre_forward(fsdp2.modules_of(self.state)[0], (), {})

    def end_given(self, output: Any) -> Any:
        """Ends a forward of which only the beginning has run FSDP2's hooks, with the output of the outermost module."""
        if self._holds_given and self.gatherer is Gatherer.HOOKS:
            output = self.post_hook(fsdp2.modules_of(self.state)[0], (), output)
            self.end_hooks()
        return output

    def end_hooks(self) -> None:
        """Ends a forward in which FSDP2's hooks have gathered the unit."""
        self._holds_given = False
        if not fsdp2.modules_to_run(self.state):
            self._swap(Gatherer.GRAPH)

    def leave_hooks(self) -> None:
        """Before a forward: leaves an earlier one in which only some modules ran, and which its backward has ended."""
        if self.gatherer is Gatherer.HOOKS and fsdp2.training_state(self.state) is fsdp2.TrainingState.IDLE:
            self._swap(Gatherer.GRAPH)

    def end_deferred(self) -> None:
        """Ends a call in which Python has read no parameter of the unit."""
        self.gatherer, self._call = Gatherer.GRAPH, None

    @torch.compiler.disable
    def gather_late(self, module: nn.Module) -> None:
        """Runs FSDP2's pre-forward for a unit that Python reads in a forward which Dynamo was to compile."""
        if self.is_deferred:
            self.begin_hooks()
            self.pre_forward(module, (), {})

    def follow_prefetch(self) -> None:
        """Makes the next graphs start all-gathers early as the user's lists of modules say."""
        forward, backward = fsdp2.prefetched(self.state)
        if not (forward or backward) and self.prefetched == ((), ()):
            return
        titles = {unit.state: unit.title for unit in self.model.units}
        now = (
            tuple(titles[state] for state in forward if state in titles),
            tuple(titles[state] for state in backward if state in titles),
        )
        if now != self.prefetched:
            self.prefetched = now
            self.refresh_specs()

    def follow(self, *, by_hooks: bool = False) -> None:
        """Before a forward: follows what users have done with parameters since the last one.

        They may have converted, replaced, frozen, thawed or gathered them.

        Args:
            by_hooks: Whether FSDP2's hooks are about to gather the unit.
        """
        self._is_followed = True
        self.follow_prefetch()
        if self.gatherer is not Gatherer.HOOKS and not self.only_hooks:
            self._follow_gathered(by_hooks=by_hooks)
            if not by_hooks:
                fsdp2.wait_for_optimizer(self.state)
                self.refuse_partial_of_torch()
        for group in self.groups:
            if group.follow_parameters():
                refresh_reads(group)

    def refuse_partial_of_torch(self) -> None:
        """Raises `UnsupportedModelError` if FSDP2 has gradients that lack their sum over replicas."""
        for group in self.groups:
            if fsdp2.has_partial_gradients(group.of_torch):
                raise group.pending.partial_refusal("an uncompiled backward", "compiled")

    def _follow_gathered(self, *, by_hooks: bool) -> None:
        for of_torch in fsdp2.groups_of(self.state):
            if not fsdp2.is_gathered_by_user(of_torch):
                # FSDP2 leaves units gathered that it does not free after forward, if no backward followed. What its
                # hooks have begun to gather ahead would be of old parameters when they use it in a later step.
                if not fsdp2.is_sharded(of_torch) or (not by_hooks and fsdp2.is_being_gathered(of_torch)):
                    fsdp2.reshard(of_torch)
            elif not by_hooks:
                taken = fsdp2.take_gathered(of_torch)
                for group in self.groups:
                    if group.of_torch is of_torch:
                        own = {p.spec.offset: taken[id(p.of_torch)] for p in group.params if id(p.of_torch) in taken}
                        self._set_gathered(group, own)
        if by_hooks:
            self.forget_gathered()

    def begin_graph(self) -> None:
        """Before a graph that gathers the unit, or has taken what the user has gathered."""
        self.forget_gathered()
        self._is_followed = False
        self.is_in_part = self.model.units[0].gatherer is Gatherer.HOOKS

    def forget_gathered(self, of_torch: fsdp2.TorchGroup | None = None) -> None:
        """Frees full parameters that the user has gathered for the forward that ran, or those of one FSDP2 group."""
        for group in self.groups:
            if group.gathered and of_torch in (None, group.of_torch):
                self._set_gathered(group, {})

    def _set_gathered(self, group: ParamGroup, full: dict[int, torch.Tensor]) -> None:
        for tensor in full.values():
            keep_sizes_fixed(tensor)
        group.gathered = full
        refresh_reads(group)

    def forget_unreduced(self, of_torch: fsdp2.TorchGroup) -> None:
        """Drops gradients of microbatches whose reduction the user has called off."""
        for group in self.groups:
            if group.of_torch is of_torch:
                group.pending.forget()

    def post_backward(self, of_torch: fsdp2.TorchGroup, run: Callable[[], None] | None) -> None:
        """Around FSDP2's post-backward, `run`: gives it the gradients that wait here, or takes those that it keeps."""
        groups = [group for group in self.groups if group.of_torch is of_torch]
        if run is None:
            for group in groups:
                group.pending.reduce_rest()
            return
        for group in groups:
            group.updates.begin_backward()
            if not fsdp2.reduces(of_torch):
                continue
            # What came since the forward: schedules of pipelines call this alone. FSDP2 also asks a unit that its hooks
            # gathered once, before the model was taken over, and whose partial sums are all here.
            is_partial = bool(group.pending.offsets(GradPlacement.REDUCE_SCATTERED)) and not self.only_hooks
            if is_partial and not any(map(torch_params.has_unreduced_grad, fsdp2.params_of(of_torch))):
                group.pending.reduce_rest()
            else:
                group.pending.give_to_torch()
        run()
        if backward_in_progress() != -1:
            # Nothing else does, where only some modules of the unit were called, around or after a graph.
            fsdp2.end_with_backward(self.state)
        for group in [] if fsdp2.reduces(of_torch) else groups:
            if group.is_trainable:
                group.pending.take_from_torch()
                refresh_reads(group)
