"""Models that torch's `fully_shard` has sharded train on here: the same units, parameters and optimizer, bit by bit."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_compile.runtime.group_state import ReduceGroup
from fsdp_compile.sharding.allocate import allocate_flat_params
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as TorchParamGroup
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

import fsdp_compile
from fsdp_compile import ConfigError, FSDPCompileError, ShardedModule, fully_shard, units
from fsdp_compile._torch import fsdp2 as torch_fsdp2
from fsdp_compile.layout.spec import Reshard
from tests import long
from tests.beside import compile_eagerly
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Slim, Stack
from tests.ranks import run_ranks

Call = Callable[[torch.Tensor], torch.Tensor]


class _Tied(Stack):
    """Two places of one weight, in one unit, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, 5)
        self.embedding.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.embedding(x)


def _wrap(model: Any, **settings: Any) -> nn.Module:
    for block in model.blocks:
        fsdp2(block, **settings)
    return fsdp2(model, **settings)


def _mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _head_first(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 2 == 0 else None


def _each_differently(model: Any) -> nn.Module:
    fsdp2(model.blocks[0], reshard_after_forward=False)
    fsdp2(model.blocks[1], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    return fsdp2(model)


def _with_ignored(model: Any) -> nn.Module:
    model.blocks[0].requires_grad_(requires_grad=False)
    ignored = set(model.blocks[1].parameters())
    torch.manual_seed(1)
    fsdp2(model.blocks[0])
    return fsdp2(model, ignored_params=ignored)


def _with_settings(model: Any) -> nn.Module:
    _wrap(model)
    first, last = model.blocks
    first.set_modules_to_forward_prefetch([last])
    last.set_modules_to_backward_prefetch([first])
    first.set_gradient_divide_factor(3.0)
    last.set_reshard_after_forward(False)
    first.set_force_sum_reduction_for_comms(True)  # gloo divides by no other number
    return model


def _as_one(model: Any) -> nn.Module:
    return fsdp2(model)


def _as_a_list(model: Any) -> nn.Module:
    fsdp2([model.blocks[1], model.head])
    return fsdp2(model)


@dataclasses.dataclass(frozen=True)
class _Case:
    wrap: Callable[[Any], nn.Module] = _wrap
    make: Callable[[], nn.Module] = Stack
    units: tuple[str, ...] = ("", "blocks.0", "blocks.1")


CASES = {
    "units": _Case(),
    "tied": _Case(make=_Tied),
    "one-unit": _Case(_as_one, units=("",)),
    "a-list": _Case(_as_a_list, units=("", "blocks.1+head")),
    "bf16": _Case(functools.partial(_wrap, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))),
    "kept": _Case(functools.partial(_wrap, reshard_after_forward=False)),
    "each-differently": _Case(_each_differently),
    "another-dimension": _Case(functools.partial(_wrap, shard_placement_fn=_head_first), make=Slim),
    "offload": _Case(functools.partial(_wrap, offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "ignored": _Case(_with_ignored, units=("", "blocks.0")),
    "settings": _Case(_with_settings),
}


def _batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def _backward(call: Call, step: int) -> None:
    call(_batch(step)).float().square().mean().backward()


class _Side:
    """A model under FSDP2 with its optimizer."""

    def __init__(self, case: _Case) -> None:
        torch.manual_seed(0)
        self.model = case.wrap(case.make())
        self.call: Call = self.model
        # A large eps: it must not hide differences of gradients near zero.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-3)

    def step(self, number: int) -> None:
        _backward(self.call, number)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        found: dict[str, Any] = {}
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for name, parameter in self.model.named_parameters():
            found[name] = parameter
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name} {key}"] = value
        return {name: v.full_tensor() if isinstance(v, DTensor) else v.detach() for name, v in found.items()}


def _differences(mine: _Side, theirs: _Side) -> list[str]:
    values, expected = mine.values(), theirs.values()
    assert list(values) == list(expected)
    return [name for name, value in values.items() if not torch.equal(value, expected[name])]


def _sharded(model: nn.Module) -> Call:
    assert fully_shard(model) is model
    return model


def _sharded_and_compiled(model: nn.Module) -> Call:
    return compile_eagerly(fully_shard(model))


def _in_place(model: nn.Module) -> Call:
    model.compile(backend="fsdp", options={"lower": "eager"})
    return model


def _in_a_function(model: nn.Module) -> Call:
    return compile_eagerly(lambda x: model(x))  # noqa: PLW0108  a compiled function


FORMS: dict[str, Callable[[Any], Call]] = {
    "compiled": compile_eagerly,
    "sharded": _sharded,
    "sharded-and-compiled": _sharded_and_compiled,
    "in-place": _in_place,
    "in-a-function": _in_a_function,
}


def _four_steps(name: str, form: str) -> tuple[list[str], tuple[str, ...]]:
    case = CASES[name]
    theirs, mine = _Side(case), _Side(case)
    for step in range(2):
        theirs.step(step)
        mine.step(step)
    before = list(mine.optimizer.param_groups[0]["params"])
    wrapped = [module for module in mine.model.modules() if isinstance(module, FSDPModule)]
    mine.call = FORMS[form](mine.model)
    for step in range(2, 4):
        theirs.step(step)
        mine.step(step)
    assert all(one is other for one, other in zip(before, mine.model.parameters(), strict=True))
    assert [module for module in mine.model.modules() if isinstance(module, FSDPModule)] == wrapped
    assert all(isinstance(module, ShardedModule) for module in wrapped)
    return _differences(mine, theirs), tuple(unit.name for unit in units(mine.model))


@pytest.mark.core
@long.parametrize("form", FORMS, always=["compiled"])
def test_two_steps_of_fsdp2_and_two_here_are_four_of_fsdp2(form: str) -> None:
    for different, names in run_ranks(_four_steps, "units", form):
        assert different == []
        assert names == CASES["units"].units


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CASES if name != "units"])
def test_what_a_model_was_wrapped_with_is_kept(name: str) -> None:
    for different, names in run_ranks(_four_steps, name, "compiled"):
        assert different == []
        assert names == CASES[name].units


def _hybrid(form: str) -> list[str]:
    case = _Case(functools.partial(_wrap, mesh=_mesh(2, 2), reshard_after_forward=True))
    theirs, mine = _Side(case), _Side(case)
    for step in range(2):
        theirs.step(step)
        mine.step(step)
    mine.call = FORMS[form](mine.model)
    for step in range(2, 4):
        theirs.step(step)
        mine.step(step)
    return _differences(mine, theirs)


@pytest.mark.long
@pytest.mark.core
def test_hybrid_sharding_goes_on_over_both_dimensions() -> None:
    assert run_ranks(_hybrid, "compiled", world_size=4) == [[]] * 4


def _kept_of_four() -> str:
    model = _wrap(Stack(), reshard_after_forward=2)
    compile_eagerly(model)(_batch(0)).sum().backward()
    return str({unit.policy.mesh_placement.post_forward_size for unit in units(model)})


@pytest.mark.long
def test_a_smaller_group_of_backward_is_kept() -> None:
    assert run_ranks(_kept_of_four, world_size=4) == ["{2}"] * 4


def _with_gradients(form: str) -> list[str]:
    """Accumulates over both: one backward of FSDP2, one here, then one step."""
    theirs, mine = _Side(CASES["units"]), _Side(CASES["units"])
    _backward(theirs.model, 0)
    _backward(mine.model, 0)
    mine.call = FORMS[form](mine.model)
    theirs.step(1)
    mine.step(1)
    return _differences(mine, theirs)


@long.parametrize("form", ["compiled", "sharded"], always=["sharded"])
def test_gradients_are_kept(form: str) -> None:
    assert run_ranks(_with_gradients, form) == [[], []]


def _from_meta(when: str) -> list[str]:
    """As transformers loads a model: wrapped on meta, given memory, loaded, and then compiled."""
    torch.manual_seed(0)
    values = _Tied().state_dict()
    theirs = _Side(_Case(make=_Tied))
    with torch.device("meta"):
        model = _Tied()
    _wrap(model)
    if when == "sharded-first":
        fully_shard(model)
    model.to_empty(device="cpu")
    loaded = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert isinstance(parameter, DTensor)
        loaded[name] = distribute_tensor(values[name], parameter.device_mesh, parameter.placements)
    model.load_state_dict(loaded, assign=when == "assigned")
    mine = _Side(dataclasses.replace(CASES["tied"], wrap=lambda _: model))
    mine.call = compile_eagerly(model)
    for step in range(2):
        theirs.step(step)
        mine.step(step)
    return _differences(mine, theirs)


@pytest.mark.long
@pytest.mark.parametrize("when", ["copied", "assigned", "sharded-first"])
def test_a_model_that_was_wrapped_on_meta_and_loaded(when: str) -> None:
    assert run_ranks(_from_meta, when) == [[], []]


def _state_dicts() -> tuple[bool, bool]:
    mine, theirs = _Side(CASES["units"]), _Side(CASES["units"])
    mine.call = compile_eagerly(mine.model)
    for side in (mine, theirs):
        for step in range(2):
            side.step(step)
    own, expected = mine.model.state_dict(), theirs.model.state_dict()
    same = list(own) == list(expected) and all(
        own[name].placements == value.placements and torch.equal(own[name].to_local(), value.to_local())
        for name, value in expected.items()
    )
    mine.model.load_state_dict({name: torch.zeros_like(value) for name, value in own.items()})
    return same, not any(p.full_tensor().any() for p in mine.model.parameters())  # type: ignore[attr-defined]


@pytest.mark.long
def test_state_dicts_are_those_of_fsdp2() -> None:
    assert run_ranks(_state_dicts) == [(True, True)] * 2


def _what_is_left() -> list[str]:
    """What is alive of torch's own parameter groups, and of the memory of their shards."""
    side = _Side(CASES["units"])
    side.step(0)
    states = [module._get_fsdp_state() for module in side.model.modules() if isinstance(module, FSDPModule)]
    groups = [weakref.ref(group) for state in states for group in state._fsdp_param_groups]
    memory = [weakref.ref(param) for group in groups for param in group().fsdp_params]  # type: ignore[union-attr]
    assert all(isinstance(group(), TorchParamGroup) for group in groups)
    assert groups
    assert memory
    del states
    fully_shard(side.model)
    marks = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
    left = [mark for module in side.model.modules() for mark in marks if mark in module.__dict__]
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    left += [name for module in side.model.modules() for name in hooks if getattr(module, name)]
    storages = [p.to_local().untyped_storage().data_ptr() for p in side.model.parameters()]  # type: ignore[attr-defined]
    assert len(set(storages)) == len(units(side.model))
    references: list[Any] = [*groups, *memory]
    return [*left, *(str(reference()) for reference in references if reference() is not None)]


def test_nothing_of_torchs_is_left() -> None:
    assert run_ranks(_what_is_left) == [[], []]


def _late_backward() -> str:
    model: Any = _wrap(Stack())
    loss = model(_batch(0)).sum()
    compile_eagerly(model)(_batch(1)).sum().backward()
    return _refusal(loss.backward)


@pytest.mark.long
def test_a_backward_of_a_forward_from_before_is_refused() -> None:
    for message in run_ranks(_late_backward):
        assert "the forward of this backward was one of torch.distributed.fsdp.fully_shard" in message


def _inputs_with_gradients() -> bool:
    """FSDP2's hooks see the inputs of the first call of a model that is compiled in place."""
    model = _wrap(Stack())
    call = _in_place(model)
    found = []
    for _ in range(2):
        x = _batch(0).requires_grad_()
        call(x).square().mean().backward()
        found.append(x.grad)
    assert found[0] is not None
    return torch.equal(*found)  # type: ignore[arg-type]


@pytest.mark.long
def test_inputs_of_the_first_call_get_gradients() -> None:
    assert run_ranks(_inputs_with_gradients) == [True, True]


def _buffers_differ() -> bool:
    """Running statistics are each rank's own, also when the model is taken over."""
    norm = nn.BatchNorm1d(WIDTH)
    model: Any = fsdp2(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm))
    model(_batch(0))
    assert norm.running_mean is not None
    mean = norm.running_mean.clone()
    call = compile_eagerly(model)
    for step in (1, 2):
        call(_batch(step)).sum().backward()
    return not torch.equal(norm.running_mean, mean)


@pytest.mark.long
def test_batch_norm_keeps_the_statistics_of_each_rank() -> None:
    assert run_ranks(_buffers_differ) == [True, True]


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except FSDPCompileError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class _Gather:
    """No collective that a graph could have."""

    def __call__(self, *_: object) -> None: ...

    def allocate(self, *_: object) -> None: ...


def _set(method: str, *values: Any) -> Callable[[Any], object]:
    return lambda model: getattr(model, method)(*values)


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "all-gather": (_set("set_custom_all_gather", _Gather()), "set_custom_all_gather"),
    "reduce-scatter": (_set("set_custom_reduce_scatter", _Gather()), "set_custom_reduce_scatter"),
    "all-reduce hook": (_set("set_all_reduce_hook", print), "set_all_reduce_hook"),
    "unused": (_set("set_reduce_scatter_unused_params", True), "set_reduce_scatter_unused_params(True)"),  # noqa: FBT003
    "buffers": (_set("set_reduce_scatter_max_input_buffers", 2), "set_reduce_scatter_max_input_buffers(2)"),
    "allocator": (
        _set("set_allocate_memory_from_process_group_for_comm", True),  # noqa: FBT003
        "set_allocate_memory_from_process_group_for_comm(True)",
    ),
    "last backward": (_set("set_is_last_backward", False), "take the model over after the last backward"),  # noqa: FBT003
    "prefetches itself": (lambda model: model.set_modules_to_forward_prefetch([model]), "a module prefetches itself"),
    "replaced": (
        lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(5, WIDTH))),
        "head.weight",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_taken_over_is_refused_by_name(what: str) -> None:
    change, named = REFUSED[what]
    with fake_world(2):
        model = _wrap(Stack(), mesh=_mesh(2))
        change(model)
        before = [(name, id(p), type(p)) for name, p in model.named_parameters()]
        for call in (lambda: fully_shard(model), lambda: compile_eagerly(model)(torch.ones(2, WIDTH))):
            message = _refusal(call)
            assert named in message, message
        assert [(name, id(p), type(p)) for name, p in model.named_parameters()] == before
        assert not isinstance(model, ShardedModule)


def _held_gradients() -> str:
    model: Any = _wrap(Stack())
    model.set_requires_gradient_sync(False)
    _backward(model, 0)
    return _refusal(lambda: fully_shard(model))


def test_gradients_that_wait_for_their_reduction_are_refused() -> None:
    for message in run_ranks(_held_gradients):
        assert message.startswith(f"{ConfigError.__name__}: gradients of torch.distributed.fsdp.fully_shard wait")


def test_arguments_of_a_second_call_are_refused() -> None:
    with fake_world(2):
        model = _wrap(Stack(), mesh=_mesh(2))
        message = _refusal(lambda: fully_shard(model, reshard_after_forward=False))
        assert "reshard_after_forward says how to shard" in message
        assert fully_shard(model) is model
        assert "sharded already" in _refusal(lambda: fully_shard(model))


def _parts() -> list[str]:
    whole: Any = _wrap(Stack())
    whole(_batch(0)).sum().backward()
    inside: Any = _wrap(Stack())
    inside.blocks[0].compile(backend="fsdp", options={"lower": "eager"})
    return [_refusal(lambda: fully_shard(whole.blocks[0])), _refusal(lambda: inside(_batch(0)))]


@pytest.mark.long
def test_a_part_of_a_model_is_refused() -> None:
    for alone, compiled in run_ranks(_parts):
        assert "only a part of a model that torch.distributed.fsdp.fully_shard has sharded" in alone
        assert "is in the middle of its forward" in compiled


def _decorated(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        return forward(*args, **kwargs)

    return wrapper


class Decorated(Stack):
    """Its forward names no argument, as those of transformers do."""

    forward = _decorated(Stack.forward)


def _in_its_first_call() -> None:
    model: Any = _wrap(Decorated())
    _backward(model, 0)
    expected = [p.grad.to_local().clone() for p in model.parameters()]
    model.zero_grad()
    model.compile(backend="fsdp", options={"lower": "eager"})
    _backward(model, 0)
    assert issubclass(type(model), ShardedModule)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.to_local(), gradient, rtol=0, atol=0)


def test_a_decorated_forward_is_known_as_the_one_that_starts() -> None:
    run_ranks(_in_its_first_call)


def test_nested_tensors_and_classes_that_were_replaced_are_refused() -> None:
    with fake_world(2):
        model: Any = fsdp2(Slim(), mesh=_mesh(2))
        fsdp2(embedding := nn.Sequential(nn.Embedding(7, 4, max_norm=1.0)), mesh=_mesh(2))
        assert "max_norm" in _refusal(lambda: fully_shard(embedding))
        model.__class__ = type("Other", (type(model),), {})
        message = _refusal(lambda: fully_shard(model))
    assert message.startswith(f"{ConfigError.__name__}: the class of a module was replaced")


def test_parameters_that_were_replaced_by_other_dtensors_are_refused() -> None:
    with fake_world(4):
        pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for mesh, placements in ((_mesh(4), [Shard(1)]), (pair, [Shard(0), Replicate()])):
            model = nn.Sequential(nn.Linear(4, 4, bias=False))
            fsdp2(model, mesh=_mesh(4))
            model[0].weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, placements))
            message = _refusal(lambda model=model: fully_shard(model))  # type: ignore[misc]
            assert "is not the DTensor that torch.distributed.fsdp.fully_shard has made" in message
            assert "where: 0.weight" in message


def test_wrapped_parts_of_a_plain_model_become_units_of_it() -> None:
    with fake_world(2):
        model = Stack()
        for block in model.blocks:
            fsdp2(block, mesh=_mesh(2))
        fully_shard(model)
        assert [unit.name for unit in units(model)] == ["", "blocks.0", "blocks.1"]
        assert isinstance(model, ShardedModule)


def _bytes_while_taken_over() -> tuple[int, int, int]:
    """The most bytes of old and new shards at a time, those of all shards, and those of the largest unit."""
    model: Any = _wrap(Stack(4))
    storages = [p.to_local().untyped_storage() for p in model.parameters()]
    old = [(StorageWeakRef(storage), storage.nbytes()) for storage in storages]
    del storages
    flats: list[torch.Tensor] = []
    seen = []

    def allocate(unit: Any, members: Any) -> None:
        allocate_flat_params(unit, members)
        flats.extend(group.flat_param for group in unit.param_groups)
        seen.append(sum(flat.nbytes for flat in flats) + sum(size for ref, size in old if not ref.expired()))

    with mock.patch("fsdp_compile.sharding.fully_shard.allocate_flat_params", allocate):
        fully_shard(model)
    assert len(seen) == len(units(model))
    assert all(reference.expired() for reference, _ in old)
    return max(seen), sum(flat.nbytes for flat in flats), max(flat.nbytes for flat in flats)


@pytest.mark.long
def test_no_more_than_one_unit_is_there_twice() -> None:
    for peak, shards, largest in run_ranks(_bytes_while_taken_over):
        assert largest < shards / 3
        assert peak <= shards + largest


def test_a_list_is_taken_over_together() -> None:
    with fake_world(2):
        parts: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
        fsdp2(parts, mesh=_mesh(2))
        assert "only a part of a model" in _refusal(lambda: fully_shard(parts[0]))
        assert fully_shard(parts) is parts
        (unit,) = units(parts[0])
        assert units(parts[1]) == [unit]
        assert len(unit.param_groups[0].params) == 4


def _after_a_refusal() -> list[str]:
    """A call that is refused changes nothing, and the next one goes on."""
    mine, theirs = _Side(CASES["units"]), _Side(CASES["units"])
    mine.call = compile_eagerly(mine.model)
    model: Any = mine.model
    model.set_is_last_backward(False)
    assert "announces one" in _refusal(lambda: mine.call(_batch(0)))
    model.set_is_last_backward(True)
    for side in (mine, theirs):
        for step in range(2):
            side.step(step)
    return _differences(mine, theirs)


@pytest.mark.long
def test_a_refused_call_can_be_repeated() -> None:
    assert run_ranks(_after_a_refusal) == [[], []]


def _flat() -> list[str]:
    """Optimizers that update whole flat parameters take FSDP2's state over, too."""
    theirs, mine = _Side(CASES["units"]), _Side(CASES["units"])
    for step in range(2):
        theirs.step(step)
        mine.step(step)
    fully_shard(mine.model)
    fsdp_compile.flat_step(mine.optimizer)
    for step in range(2, 4):
        theirs.step(step)
        mine.step(step)
    return _differences(mine, theirs)


@pytest.mark.long
def test_flat_steps_go_on_with_the_state() -> None:
    assert run_ranks(_flat) == [[], []]


def _after_an_evaluation(form: str) -> list[str]:
    """FSDP2 leaves the root unsharded after a forward without backward."""
    theirs, mine = _Side(CASES["units"]), _Side(CASES["units"])
    for side in (theirs, mine):
        with torch.no_grad():
            side.model(_batch(0))
    assert not isinstance(mine.model.head.weight, DTensor)  # type: ignore[union-attr]
    mine.call = FORMS[form](mine.model)
    theirs.step(1)
    mine.step(1)
    return _differences(mine, theirs)


@pytest.mark.long
@pytest.mark.parametrize("form", ["compiled", "sharded"])
def test_a_model_that_fsdp2_has_left_unsharded(form: str) -> None:
    assert run_ranks(_after_an_evaluation, form) == [[], []]


def test_what_methods_have_set_is_set_for_the_same_units() -> None:
    with fake_world(2):
        model: Any = _wrap(Stack(), mesh=_mesh(2))
        first, last = model.blocks
        first.set_modules_to_forward_prefetch([last])
        last.set_modules_to_backward_prefetch([first])
        first.set_gradient_divide_factor(3.0)
        last.set_reshard_after_backward(False)
        last.set_reshard_after_forward(False, recurse=False)
        model.set_force_sum_reduction_for_comms(True)
        first.set_requires_gradient_sync(False)
        last.set_requires_all_reduce(False)
        model.set_separate_reduce_scatter_group(recurse=False)
        model.set_post_optim_event(event := torch.Event("cpu"))
        fully_shard(model)
        root, *blocks = units(model)
    found = [unit.comm_settings for unit in (root, *blocks)]
    assert [each.divide for each in found] == [None, 3.0, None]
    assert [each.sum_only for each in found] == [True, False, False]
    assert [each.reduce_gradients for each in found] == [True, False, True]
    assert [each.all_reduce for each in found] == [True, False, False]
    assert [each.reshard_after_backward for each in found] == [True, True, False]
    assert [unit.reduce_group for unit in (root, *blocks)] == [ReduceGroup.OWN, ReduceGroup.SHARED, ReduceGroup.SHARED]
    assert [unit.policy.mesh_placement.reshard for unit in (root, *blocks)] == [
        Reshard.AFTER_FORWARD,
        Reshard.AFTER_FORWARD,
        Reshard.AFTER_BACKWARD,
    ]
    assert [list(unit.prefetched("forward_prefetch")) for unit in (root, *blocks)] == [[], [blocks[1].title], []]
    assert [list(unit.prefetched("backward_prefetch")) for unit in (root, *blocks)] == [[], [], [blocks[0].title]]
    assert root.model.post_optim_event is event


def _without(name: str, model: Any) -> None:
    """Takes an attribute away from what torch has made, as another torch may not have it."""
    state = model._get_fsdp_state()
    (group,) = state._fsdp_param_groups
    owners = [state, state._state_ctx, group, *group.fsdp_params]
    for owner in owners:
        vars(owner).pop(name, None)


NAMES = ("_mp_policy", "_state_ctx", "is_last_backward", "reduce_grads", "_all_gather_comm", "_module_info")


@pytest.mark.parametrize("name", NAMES)
def test_a_torch_that_names_its_attributes_otherwise_is_refused(name: str) -> None:
    with fake_world(2):
        model: nn.Module = fsdp2(Stack(), mesh=_mesh(2))  # type: ignore[assignment]
        _without(name, model)
        before = [(place, id(p), type(p)) for place, p in model.named_parameters()]
        message = _refusal(lambda: fully_shard(model))
        assert f"looks otherwise in torch {torch.__version__}: no " in message
        assert f".{name}" in message
        assert "fsdp_compile.fully_shard() in its place" in message
        assert [(place, id(p), type(p)) for place, p in model.named_parameters()] == before


def test_every_attribute_that_is_read_is_asked_for_first() -> None:
    """Those of torch's state, parameter groups and parameters, as the source names them."""
    tree = ast.parse(inspect.getsource(torch_fsdp2))
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("group", "param", "self._state", "state")
    }
    listed = {*torch_fsdp2._OF_STATE, *torch_fsdp2._OF_GROUP, *torch_fsdp2._OF_PARAM}
    ours = {"_unsharded_param", "parameter", "module_refs"}  # asked for where it is read; of our own `WrappedParam`
    assert read - listed == ours
