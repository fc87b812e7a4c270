"""The one attribute that FSDP sets on a module, and the only functions that walk modules for it.

What traced code reads are attributes of the module itself, since Dynamo guards attribute by attribute:
`_fsdp_flat_<i>` and `_fsdp_unshard_args`.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections.abc import Iterable, Iterator, Set
from typing import Any, NamedTuple, NoReturn, SupportsIndex

from torch import nn

from fsdp_compile._torch.eval_frame import Compiler
from fsdp_compile.config.casts import ForwardCasts, FullPrecision
from fsdp_compile.config.policy import MixedPrecision
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.runtime.buffers import CastBuffer
from fsdp_compile.runtime.module_refs import IgnoredParams
from fsdp_compile.runtime.units import FSDPParam, FSDPParamGroup, FSDPUnit, ModelState
from fsdp_compile.runtime.view_check import ViewCheck

_STATE = "_fsdp_state"
ParamOwner = tuple[nn.Module, str]
"""The first module that registers a parameter, and the attribute."""
ParamRef = tuple[str, nn.Module, str, nn.Parameter]
"""Name of the module, the module, the attribute, the parameter."""


class Nesting(enum.Enum):
    """Where in the sharded model a module is."""

    OUTERMOST = "outermost"
    INSIDE = "inside"


@dataclasses.dataclass
class ShardingCall:
    """What one call of `fully_shard` did.

    Attributes:
        units: In registration order of their roots.
        ignored: The ignored parameters.
        nesting: Whether a call on a module above it has followed.
        initialized: The modules that its `param_init_fn` was called on, with the attributes that had no values.
    """

    units: list[FSDPUnit]
    ignored: IgnoredParams
    precision: MixedPrecision
    nesting: Nesting = Nesting.OUTERMOST
    initialized: weakref.WeakKeyDictionary[nn.Module, Set[str]] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )


class ReadFrom(NamedTuple):
    """Where a module's parameter is gathered from: the text of its `UnshardSpec`, the parameter group, its place."""

    text: str
    group: FSDPParamGroup
    param: FSDPParam


class CompiledForward(NamedTuple):
    """What compiled a forward (it refers to the model), and whether that was the outermost one."""

    compiler: weakref.ref[Compiler]
    is_outermost: bool


@dataclasses.dataclass(eq=False)
class ModuleState:
    """What FSDP knows of one module.

    Attributes:
        model: The sharded model that it is a part of.
        call: The call of `fully_shard` on this very module.
        reads: Its sharded parameters, by attribute.
        eval_reads: For those that eval mode gathers in another way, the text of that `UnshardSpec`.
        casts: What is cast when its forward is entered and left.
        methods: The class whose methods it got on top of its own.
        no_sync_depth: How many `no_sync` blocks it is inside of.
        compiled_forward: How its last forward was compiled, if Dynamo met it as a frame of its own.
        for_torch: What torch's own functions see as its `FSDPState`; `modules` fills it.
    """

    model: ModelState | None = None
    call: ShardingCall | None = None
    reads: dict[str, ReadFrom] = dataclasses.field(default_factory=dict)
    eval_reads: dict[str, str] = dataclasses.field(default_factory=dict)
    casts: ForwardCasts | FullPrecision | None = None
    cast_buffers: dict[str, CastBuffer] = dataclasses.field(default_factory=dict)
    methods: type | None = None
    view_check: ViewCheck | None = None
    no_sync_depth: int = 0
    compiled_forward: CompiledForward | None = None
    for_torch: Any = None

    def __reduce_ex__(self, _protocol: SupportsIndex) -> NoReturn:
        """Inside of `full_params`, where a module has the class that it had: sharded ones refuse it themselves."""
        raise UnsupportedModelError(
            "a sharded module cannot be pickled or copied, also where its parameters are full",
            where="full_params()",
            instead="model.state_dict() there, which a plain model of the same class loads",
        )


def state_of(module: nn.Module) -> ModuleState | None:
    """What FSDP knows of a module, if anything."""
    return module.__dict__.get(_STATE)


def ensure_state(module: nn.Module) -> ModuleState:
    """The state of a module, made if there is none."""
    state = state_of(module)
    if state is None:
        state = ModuleState()
        # Not through `__setattr__`, which classes of users may override.
        object.__setattr__(module, _STATE, state)
    return state


def reads_of(module: nn.Module) -> dict[str, ReadFrom]:
    """The sharded parameters of a module itself, by attribute."""
    state = state_of(module)
    return {} if state is None else state.reads


def call_on(module: nn.Module) -> ShardingCall | None:
    """The call of `fully_shard` on this very module, if there was one."""
    state = state_of(module)
    return None if state is None else state.call


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this very module."""
    return call_on(module) is not None


def unwrap(model: object) -> object:
    """The module that `torch.compile` wrapped, or `model` itself."""
    return getattr(model, "_orig_mod", model)


def stored_parameters(root: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that are registered in `root`, each once; its own `parameters()` gathers them in a forward."""
    # Not by hash: of values that `functional_call` has put there, that is a question of the program's own.
    stored = (p for module in _modules_below(root) for p in module._parameters.values() if p is not None)
    yield from {id(parameter): parameter for parameter in stored}.values()


def named_stored_parameters(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """The same, with the name of the first place of each."""
    known: dict[int, nn.Parameter] = {}
    for path, module in root.named_modules(prefix=prefix):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in known:
                known[id(parameter)] = parameter
                yield f"{path}.{name}" if path else name, parameter


def units(model: nn.Module) -> list[FSDPUnit]:
    """The units of a model, in registration order of their root modules; empty if nothing in it is sharded."""
    module = unwrap(model)
    assert isinstance(module, nn.Module)
    calls = (call for m in _modules_below(module) if (call := call_on(m)) is not None)
    return list(dict.fromkeys(unit for call in calls for unit in call.units))  # a call on several modules is each one's


def _modules_below(root: nn.Module) -> Iterable[nn.Module]:
    """The modules of `root.modules()`, in that order."""
    # `modules()` would make the name of every module on its way.
    found: dict[nn.Module, None] = {}
    todo: list[nn.Module | None] = [root]
    while todo:
        module = todo.pop()
        if module is not None and module not in found:
            found[module] = None
            todo.extend(reversed(module._modules.values()))
    return found


def units_of_call(module: nn.Module) -> list[FSDPUnit]:
    """The units that the call of `fully_shard` on this very module made."""
    call = call_on(module)
    return [] if call is None else list(call.units)


def units_below(module: nn.Module) -> list[FSDPUnit]:
    """Units that modules at and below `module` read from."""
    reads = (read for m in module.modules() for read in reads_of(m).values())
    return list(dict.fromkeys(read.group.unit for read in reads))


def params_in(module: nn.Module, unit: FSDPUnit) -> Iterator[FSDPParam]:
    """The parameters of a unit that modules at and below `module` have."""
    inside = set(module.modules())
    return (param for param in unit.params if any(owner in inside for owner, _ in param.module_refs))


def is_ignored(root: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether `parameter` is ignored by a call of `fully_shard` in `root`."""
    return any(id(parameter) in call.ignored for m in root.modules() if (call := call_on(m)) is not None)


def ignored_parameters() -> set[int]:
    """`id`s of the parameters that calls of `fully_shard` on models with sharded parameters ignored."""
    models = {group.unit.model for group in FSDPParamGroup.alive()}
    return {ignored for model in models for ignored in model.ignored.ids()}


def is_inside(module: nn.Module) -> bool:
    """Whether a module above `module` is sharded, too."""
    own = call_on(module)
    asked = [own] if own is not None else [call_on(m) for m in module.modules()]
    return any(call is not None and call.nesting is Nesting.INSIDE for call in asked)
