"""What eager forwards read: gathered parameters, which must not be written to, or values put in their place.

A gathered parameter is a copy, so what a forward writes into it would be lost. Each read is checked for writes when the
next one is made, and all that are still referred to when the outermost forward ends.

Two reads one after the other are one object. A parameter that is a key of a dict or in a set, or is read by a function
that calls `id()`, is one object until the outermost forward ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.eval_frame import calls_are_compiled
from fsdp_compile._torch.tensors import is_transformed, is_wrapper, local_tensor, plain_torch_functions
from fsdp_compile._torch.tracing import is_compiling_a_frame
from fsdp_compile.comm.exchange import as_bytes
from fsdp_compile.comm.failures import refuse_lost_ranks
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.layout.profiler_ranges import Range, profiled
from fsdp_compile.modules.readers import calls_of_reader
from fsdp_compile.modules.uncounted_writes import may_write, written_by
from fsdp_compile.runtime import read_order
from fsdp_compile.runtime.module_state import reads_of
from fsdp_compile.runtime.read_order import Done
from fsdp_compile.runtime.units import FSDPParam, FSDPParamGroup
from fsdp_compile.runtime.unshard import follow_writes, version_of_param
from fsdp_compile.runtime.unshard_args import swap_in, swapped_value

reads = threading.local()
"""Gathered parameters of the outermost forward: all that were `made`; `kept` are the last, tied and identified ones.

Those that are `watched` are held until it ends.
"""


class GatheredParameter(nn.Parameter):
    """A full parameter in an eager forward: an `nn.Parameter`, as in one process, but no leaf of autograd."""

    def __hash__(self) -> int:
        """As of any tensor; what is hashed is to be found again, so later reads in this forward give it, too."""
        _keep_identified(self)
        return super().__hash__()

    @property
    def data(self) -> torch.Tensor:
        """The value without history; unlike `Tensor.data`, writes into it count as writes into the parameter."""
        return self.detach()

    @data.setter
    def data(self, _value: torch.Tensor) -> None:
        raise _refusal(f"{_title_of(self)}, by `.data = ...`")

    @property
    def grad(self) -> None:
        """None, if the sharded parameter has no gradient either."""
        of: _Sharded | None = self.__dict__.get(_GATHERED_FROM)
        if of is not None and not is_compiling_a_frame() and _has_gradient(of):  # compilers ask all inputs
            raise _refusal_of_gradient(_title_of(self))

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        of: _Sharded | None = self.__dict__.get(_GATHERED_FROM)
        if value is not None or (of is not None and _waits(of)):
            raise _refusal_of_written_gradient(_title_of(self))
        if of is not None:
            of.param.parameter.grad = None


class _Read(NamedTuple):
    """A gathered parameter, its version when it was made, and its name for errors."""

    gathered: weakref.ref[torch.Tensor]
    version: int
    name: str
    counter: torch.Tensor | None
    """Has its version and none of its memory: code may drop a parameter that it has written to before it is checked."""
    value: torch.Tensor | None
    """What it was, if its reader calls what writes into lists of tensors, which is counted nowhere."""

    def check(self) -> None:
        gathered = self.gathered()
        counter = gathered if self.counter is None else self.counter
        if counter is not None and _version(counter) != self.version:
            raise _refusal(self.name)
        if gathered is not None and self.value is not None and not torch.equal(_bytes(gathered), self.value):
            raise _refusal(self.name)


class GatheredVector(GatheredParameter):
    """One that can be a running statistic, into which batch norm writes without counting it."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls a function of torch as for any `nn.Parameter`, unless it writes into one of these."""
        kwargs = kwargs or {}
        if may_write(func):
            for written in written_by(func, args, kwargs):
                if isinstance(written, GatheredParameter):
                    raise _refusal(_title_of(written))
        with plain_torch_functions():
            return func(*args, **kwargs)


def as_parameter(gathered: torch.Tensor, module: nn.Module) -> GatheredParameter:
    """What code that is not compiled reads as a parameter of a module."""
    if isinstance(gathered, DTensor) or is_wrapper(gathered):
        gathered._is_param = True  # by which `isinstance(..., nn.Parameter)` goes; as another class it loses its parts
        return gathered  # type: ignore[return-value]
    # Statistics have one dimension and no gradient. Torch's own layers have none among their parameters, and look for
    # `__torch_function__` before they take their fast paths.
    is_statistic = gathered.dim() == 1 and not gathered.requires_grad and not calls_are_compiled()
    if is_statistic and not _original_class(module).__module__.startswith("torch.nn.modules."):
        return gathered.as_subclass(GatheredVector)
    return gathered.as_subclass(GatheredParameter)


_GATHERED_FROM = "_fsdp_gathered_from"
"""Attribute of a gathered parameter: the `_Sharded` one."""


_READ_AS = "_fsdp_read_as"
"""Attribute of a gathered parameter that a forward has read: the `_ReadAs`."""


class _Sharded(NamedTuple):
    group: FSDPParamGroup
    param: FSDPParam


def gathered_from(gathered: torch.Tensor, group: FSDPParamGroup, param: FSDPParam) -> None:
    """Notes of which parameter `gathered` is the value."""
    gathered.__dict__[_GATHERED_FROM] = _Sharded(group, param)


def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    """`register_parameter()`; of a gathered parameter that a forward puts back, the sharded one."""
    is_known = param is not None and not torch.compiler.is_compiling()
    of: _Sharded | None = param.__dict__.get(_GATHERED_FROM) if is_known else None
    _original_class(module).register_parameter(module, name, param if of is None else of.param.parameter)


def is_gathered(value: object) -> bool:
    """Whether a value is a gathered parameter, of whatever class."""
    return isinstance(value, GatheredParameter) or _GATHERED_FROM in getattr(value, "__dict__", ())


def _has_gradient(of: _Sharded) -> bool:
    return of.param.parameter.grad is not None or _waits(of)


def _waits(of: _Sharded) -> bool:
    """Whether gradients of the unit wait for the rest of their reduction."""
    return bool(of.group.grads.unsharded_accumulated_grad or of.group.grads.partial_reduce_output)


Gather = Callable[[nn.Module], torch.Tensor]


@torch.compiler.disable
def read_once(module: nn.Module, name: str, gather: Gather) -> torch.Tensor | None:
    """A sharded parameter where no forward runs: gathered, or what is registered or was assigned in its place."""
    held = registered(module, name)
    return held if _is_swapped(module, name) else _gathered(module, name, gather)[0]


@torch.compiler.disable
def read_eagerly(module: nn.Module, name: str, gather: Gather) -> torch.Tensor | None:
    """Like `read_once`, in an eager forward: two reads of a tied parameter, or one after the other, are one object."""
    held = registered(module, name)
    if _is_swapped(module, name):
        return held
    kept: dict[_Key, _Kept] = reads.__dict__.setdefault("kept", {})
    _, group, param = reads_of(module)[name]
    calls = calls_of_reader()
    key = (param, module.training, torch.is_grad_enabled(), calls.writes_lists)
    version = version_of_param(group, param)
    if key in kept and kept[key].version == version:
        kept[key].read.check()
    else:
        # Code may ask whether two reads are one object. What is kept must not depend on when Python frees memory, of
        # which ranks differ: a read gathers on all of them, or on none.
        gathered, read = _gathered(module, name, gather, is_watched=calls.writes_lists)
        gathered.__dict__[_READ_AS] = _ReadAs(key, read, version)
        for other in [other for other in kept if len(other[0].module_refs) == 1 and not kept[other].is_identified]:
            del kept[other]
        kept[key] = _Kept(gathered, read, version)
    if calls.has_id:
        kept[key] = kept[key]._replace(is_identified=True)
    return kept[key].gathered


def _keep_identified(gathered: torch.Tensor) -> None:
    """Has later reads of the outermost forward give `gathered`, which code has made a key of."""
    kept: dict[_Key, _Kept] | None = reads.__dict__.get("kept")
    read_as: _ReadAs | None = gathered.__dict__.get(_READ_AS)
    if kept is None or read_as is None:
        return
    now = kept.get(read_as.key)
    if now is not None and now.is_identified and now.gathered is not gathered and now.version == read_as.version:
        raise UnsupportedModelError(
            "a forward makes keys of two reads of a parameter, which a dict or a set takes for two parameters",
            where=_title_of(gathered),
            instead="read it once (weight = self.weight), or use its name as the key",
        )
    if now is None or not now.is_identified:
        kept[read_as.key] = _Kept(gathered, read_as.read, read_as.version, is_identified=True)


_Key = tuple[FSDPParam, bool, bool, bool]
"""A parameter, and how its module reads it: in training, with gradients, in a function that writes into lists."""


class _Kept(NamedTuple):
    """A gathered parameter, and the version of the stored one, which an optimizer may change inside of a forward."""

    gathered: torch.Tensor
    read: _Read
    version: tuple[int, ...]
    is_identified: bool = False
    """Whether code may look for this very object until the forward ends."""


class _ReadAs(NamedTuple):
    """By what a gathered parameter is found among those that are kept, without the tensor itself."""

    key: _Key
    read: _Read
    version: tuple[int, ...]


def _gathered(module: nn.Module, name: str, gather: Gather, *, is_watched: bool = False) -> tuple[torch.Tensor, _Read]:
    read = reads_of(module)[name]
    if read.group.unsharded.params is not None:
        follow_writes(read.group, read.param)  # by code of this forward that turns gradients off
    read_order.note(read.group, Done.READ, read.param.spec.offset)
    try:
        with profiled(Range.ALL_GATHER, [read.group.unit.name]):
            gathered = gather(module)
    except RuntimeError as error:
        refuse_lost_ranks(error, f"gathering {read.group.unit.parameter_name(read.param)}")
        raise
    gathered_from(gathered, read.group, read.param)
    return gathered, note_read(gathered, is_watched=is_watched)


def registered(module: nn.Module, name: str) -> torch.Tensor | None:
    """What is registered as a module's parameter, or was assigned in its place; raises `AttributeError` if nothing."""
    if name in module._parameters:
        return module._parameters[name]
    swapped = swapped_value(module, name)
    if swapped is None:
        raise AttributeError(f"{_title(module)!r} object has no attribute {name!r}")
    return swapped


def _is_swapped(module: nn.Module, name: str) -> bool:
    return module._parameters.get(name) is not reads_of(module)[name].param.parameter


def show_values(root: nn.Module) -> list[tuple[nn.Module, str]]:
    """Makes compiled code below `root` read values that are registered in the place of sharded parameters."""
    # Dynamo guards on few attributes of a module, not on each of its parameters.
    places = [(m, name) for m in root.modules() for name in reads_of(m) if name in m._parameters]
    shown = [(m, name) for m, name in places if _is_swapped(m, name)]
    for module, name in shown:
        swap_in(module, name, module._parameters[name])
    return shown


def hide_values(shown: list[tuple[nn.Module, str]]) -> None:
    """Undoes `show_values`."""
    for module, name in shown:
        swap_in(module, name, None)


def holds_value(module: nn.Module, name: str) -> bool:
    """Whether a plain value stands in the place of a sharded parameter; a new `nn.Parameter` is to be sharded."""
    if name in module._parameters:
        held = module._parameters[name]
        return held is not None and not isinstance(held, nn.Parameter)
    return swapped_value(module, name) is not None


def holds_values(root: nn.Module) -> bool:
    """Whether `holds_value` is true for a parameter of a module in `root`."""
    return any(holds_value(module, name) for module in root.modules() for name in reads_of(module))


def note_read(gathered: torch.Tensor, *, is_watched: bool = False) -> _Read:
    """Checks the last read of this forward for writes, and makes `gathered` the one to check next.

    Args:
        gathered: The parameter that was read.
        is_watched: Whether to compare its value, too, as it may be written to without being counted.
    """
    made: list[_Read] = reads.__dict__.setdefault("made", [])
    if made:
        made[-1].check()
    value = None
    if is_watched and (isinstance(gathered, DTensor) or not is_wrapper(gathered)):
        value = _bytes(gathered).clone()
        # The list through which it is written to may be gone when it is checked.
        reads.__dict__.setdefault("watched", []).append(gathered)
    made.append(_Read(weakref.ref(gathered), _version(gathered), _title_of(gathered), _counter(gathered), value))
    return made[-1]


def _counter(gathered: torch.Tensor) -> torch.Tensor | None:
    if is_wrapper(gathered) or is_transformed(gathered) or gathered.is_inference():
        return None
    counter = gathered.detach()  # whose version is that of what it is made from
    counter.data = counter.new_empty(0)
    return counter


@torch.compiler.disable
def check_reads() -> None:
    """Raises `UnsupportedModelError` if a parameter was written to that this thread's forward has gathered."""
    for read in reads.__dict__.get("made", ()):
        read.check()


def _version(gathered: torch.Tensor) -> int:
    return 0 if gathered.is_inference() else gathered._version  # in inference mode nothing is counted


def _bytes(gathered: torch.Tensor) -> torch.Tensor:
    local = local_tensor(gathered) if isinstance(gathered, DTensor) else gathered
    return as_bytes(local.detach())


def _title(module: nn.Module) -> str:
    return _original_class(module).__name__


def _original_class(module: nn.Module) -> type[nn.Module]:
    original: type[nn.Module] = getattr(module, "_fsdp_original_class", type(module))
    return original


def _title_of(gathered: torch.Tensor) -> str:
    of: _Sharded | None = gathered.__dict__.get(_GATHERED_FROM)
    if of is None:
        return "a gathered parameter"
    module, name = of.param.module_refs[0]
    return f"parameter {name} of {_title(module)}"


def _refusal(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "a forward changes a gathered parameter in place, which would be lost",
        where=name,
        instead="do it between steps, or under torch.no_grad() on the parameter that parameters() gives",
    )


def _refusal_of_written_gradient(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "a forward assigns to the .grad of a parameter: a gathered parameter has none, but None clears that of the "
        "sharded one, unless it waits for the rest of its reduction",
        where=name,
        instead="assign between steps: outside of forwards, parameters() gives sharded parameters and their gradients",
    )


def _refusal_of_gradient(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "a forward reads the .grad of a parameter, which has a gradient: a gathered parameter has none",
        where=name,
        instead="read it between steps: outside of forwards, parameters() gives sharded parameters and their gradients",
    )
