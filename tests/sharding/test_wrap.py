"""Which modules become units: found automatically, by bottom-up calls, or by FSDP1's wrap policies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _recursive_wrap,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.tensor import DTensor

from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.take_over import units
from fsdp_compile.sharding.fully_shard import fully_shard
from tests.models.outlines import Block, Transformer
from tests.sharding.models import same_call

pytestmark = pytest.mark.usefixtures("world")


def _layout(model: nn.Module) -> dict[str, list[str]]:
    """Units with parameters by the names of their modules, each with the names of its parameters in the model."""
    names = {module: name or "(root)" for name, module in model.named_modules()}
    params = {parameter: name for name, parameter in model.named_parameters()}
    found = {}
    for call in same_call(model.modules()):
        groups = fsdp2.state(call[0])._fsdp_param_groups  # type: ignore[attr-defined]
        own = [params[param.sharded_param] for group in groups for param in group.fsdp_params]
        if own:
            found["+".join(names[module] for module in call)] = sorted(own)
    return found


def _titles(model: nn.Module) -> list[str]:
    """Titles of the units, after a check that they have every parameter of the model exactly once."""
    own = [name for names in _layout(model).values() for name in names]
    assert sorted(own) == sorted(name for name, _ in model.named_parameters())
    return list(_layout(model))


def _of(**children: nn.Module) -> Any:
    """A module of these, which is never called."""
    made = nn.Module()
    for name, child in children.items():
        made.add_module(name, child)
    return made


class _ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
        self.shortcut = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))


def _resnet() -> nn.Module:
    stages = [nn.Sequential(*(_ConvBlock() for _ in range(blocks))) for blocks in (2, 3)]
    return _of(stem=nn.Conv2d(3, 8, 3), layer1=stages[0], layer2=stages[1], head=nn.Linear(8, 10))


def _mixture() -> nn.Module:
    """Blocks that contain repeated blocks themselves: the outermost ones are units."""
    layers = [_of(experts=nn.ModuleList(Block() for _ in range(3))) for _ in range(2)]
    return _of(layers=nn.ModuleList(layers))


def _unlike() -> nn.Module:
    """No module stands twice in a container."""
    body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))
    return _of(embed=nn.Embedding(7, 4), body=body, head=nn.Linear(4, 7))


AUTOMATIC: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "transformer": (Transformer, ["(root)", "blocks.0", "blocks.1", "blocks.2", "embed", "head"]),
    "tied": (lambda: Transformer(tied=True), ["(root)", "blocks.0", "blocks.1", "blocks.2", "embed+head"]),
    "sequential-of-linear": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ["0", "2"]),
    "resnet": (_resnet, ["head", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2", "stem"]),
    "module-dict": (
        lambda: _of(d=nn.ModuleDict({"a": Block(), "b": Block(), "n": nn.LayerNorm(4)})),
        ["(root)", "d.a", "d.b"],
    ),
    "nested-blocks": (_mixture, ["layers.0", "layers.1"]),
    "no-repetition": (_unlike, ["(root)"]),
    "nested-sequential": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))),
        ["0", "1", "2"],
    ),
}


@pytest.mark.parametrize("kind", AUTOMATIC)
def test_automatic_split(kind: str) -> None:
    make, expected = AUTOMATIC[kind]
    model = fully_shard(make())
    assert sorted(_titles(model)) == expected


def test_the_root_keeps_what_is_no_block_and_no_matrix() -> None:
    assert _layout(fully_shard(Transformer()))["(root)"] == ["norm.bias", "norm.weight"]


def test_units_stand_in_registration_order() -> None:
    model = fully_shard(Transformer())
    found = {unit.title: sorted(param.name for group in unit.groups for param in group.params) for unit in units(model)}
    assert list(found) == ["(root)", "embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert {title: names for title, names in found.items() if names} == _layout(model)


def test_one_call_shards_all_of_a_module_and_puts_nothing_around_it() -> None:
    model = Transformer()
    modules, names = list(model.modules()), [name for name, _ in model.named_parameters()]
    assert fully_shard(model) is model
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert [name for name, _ in model.named_parameters()] == names
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert sorted(name for own in _layout(model).values() for name in own) == sorted(names)


def test_an_ancestors_call_takes_a_descendants_call_as_one_unit() -> None:
    """The call on the inner model alone would split it; called on the outer one too, it is FSDP2's bottom-up style."""
    outer = nn.ModuleDict({"inner": Transformer(), "head": nn.Linear(4, 4)})
    model = _of(d=outer)
    fully_shard(outer["inner"])
    sharded = list(outer["inner"].parameters())
    assert len(_layout(outer["inner"])) == 6
    fully_shard(model)
    assert sorted(_titles(model)) == ["(root)", "d.inner"]
    assert all(a is b for a, b in zip(outer["inner"].parameters(), sharded, strict=True)), "identities are kept"


def test_units_of_an_explicit_split_below_are_not_merged() -> None:
    inner = Transformer()
    for block in inner.blocks:
        fully_shard(block)
    fully_shard(inner)
    model = fully_shard(_of(d=nn.ModuleDict({"inner": inner})))
    assert sorted(_titles(model)) == ["d.inner", "d.inner.blocks.0", "d.inner.blocks.1", "d.inner.blocks.2"]


def test_units_of_a_policy_below_are_kept_and_named_after_their_place() -> None:
    inner = fully_shard(Transformer(), auto_wrap_policy=ModuleWrapPolicy({Block}))
    middle = fully_shard(_of(d=nn.ModuleDict({"d": inner, "own": nn.Linear(4, 4)})))
    model = fully_shard(_of(d=nn.ModuleDict({"middle": middle, "own": nn.Linear(4, 4)})))
    blocks = [f"d.middle.d.d.blocks.{i}" for i in range(3)]
    assert sorted(_titles(model)) == ["(root)", "d.middle", "d.middle.d.d", *blocks]


class _Marked(nn.Module):
    """Stands where FSDP1 would wrap."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def _wrapped_by_torch(model: nn.Module, policy: Any) -> set[str]:
    """Names of the modules that FSDP1 wraps, by torch's own code."""
    names = {id(module): name for name, module in model.named_modules()}
    if isinstance(policy, ModuleWrapPolicy | CustomPolicy):
        chosen = list(policy._run_policy(model, ignored_modules=set(), root_kwargs={}))
    else:
        _recursive_wrap(model, policy, _Marked, ignored_modules=set(), ignored_params=set())
        chosen = [m.module for m in model.modules() if isinstance(m, _Marked)]
    managed = {names[id(m)] for m in chosen if any(True for _ in m.parameters())}
    return managed - {""}


POLICIES: dict[str, Any] = {
    "modules": ModuleWrapPolicy({Block, nn.Embedding}),
    "nested-modules": ModuleWrapPolicy({Block, nn.Linear}),
    "custom": CustomPolicy(lambda m: isinstance(m, nn.Linear) and m.out_features > 16),
    "custom-dict": CustomPolicy(lambda m: {} if isinstance(m, nn.Linear) else isinstance(m, Block)),
    "sizes-300": functools.partial(size_based_auto_wrap_policy, min_num_params=300),
    "sizes-1000": functools.partial(size_based_auto_wrap_policy, min_num_params=1000),
    "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
}


@pytest.mark.parametrize("kind", POLICIES)
def test_wrap_policies_choose_what_fsdp1_wraps(kind: str) -> None:
    model = fully_shard(Transformer(), auto_wrap_policy=POLICIES[kind])
    # FSDP1 makes its root a unit too; a module whose parameters all went to units below it makes none.
    wrapped = _wrapped_by_torch(Transformer(), POLICIES[kind])
    inside = [[n for n in wrapped if name.startswith(f"{n}.")] for name, _ in model.named_parameters()]
    expected = {max(names, key=len) for names in inside if names}
    assert {title for title in _titles(model) if title != "(root)"} == expected
    assert expected


def test_a_policy_that_returns_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="it returned yes"):
        fully_shard(Transformer(), auto_wrap_policy=CustomPolicy(lambda _: "yes"))  # type: ignore[arg-type,return-value]


def test_containers_that_are_never_called_are_units_by_their_children() -> None:
    rows = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.ReLU()]) for _ in range(2))
    assert _titles(fully_shard(_of(rows=rows))) == ["rows.0.0", "rows.1.0"]
    model = _of(row=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)]))
    assert _titles(fully_shard(model, auto_wrap_policy=ModuleWrapPolicy({nn.ModuleList}))) == ["row.0+row.1"]


def test_a_module_without_parameters_has_no_parameter_groups() -> None:
    assert _layout(fully_shard(nn.Sequential(nn.ReLU(), nn.Flatten()))) == {}
