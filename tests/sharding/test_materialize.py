"""Meta models get the values that one process would give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_compile
from fsdp_compile import ConfigError, RankMismatchError, fully_shard, materialize
from tests import long
from tests.models.meta import Norm, Tied, init_normal, initialize, tokens
from tests.ranks import run_ranks


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, non-persistent ones too, in full."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {n: t.full_tensor() if isinstance(t, DTensor) else t.detach() for n, t in named}


def assert_equal(model: nn.Module, reference: nn.Module) -> None:
    mine, theirs = full_state(model), full_state(reference)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert mine[name].device.type == "cpu", name
        assert torch.equal(mine[name], value), name


def _check_values(shape: tuple[int, ...], init: Callable[[nn.Module], object] | None) -> None:
    model = on_meta(Tied)
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = list(model.parameters())
    torch.manual_seed(5)
    materialize(model, param_init_fn=init)
    torch.manual_seed(5)
    reference = Tied()
    torch.manual_seed(5)
    if init is None:
        initialize(reference)
    else:
        with torch.no_grad():
            for module in reference.modules():
                init(module)
    assert_equal(model, reference)
    assert model.head.weight is model.embedding.weight
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in reference.parameters()]
    assert all(p is q for p, q in zip(before, model.parameters(), strict=True)), "optimizers made before stay right"
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    for each, optimize in ((compiled, optimizer), (reference, reference_optimizer)):
        each(tokens()).square().mean().backward()
        optimize.step()
    mine, theirs = full_state(model), full_state(reference)
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, msg=name)


@pytest.mark.core
@long.parametrize("shape", [(2,), (4,), (2, 2)], always=[(2,)])
def test_values_are_those_of_a_plain_loop_over_the_modules(shape: tuple[int, ...]) -> None:
    run_ranks(_check_values, shape, None, world_size=2 if shape == (2,) else 4)


def test_values_of_param_init_fn_are_those_of_a_plain_loop() -> None:
    run_ranks(_check_values, (2,), init_normal)


class _Damped(nn.Linear):
    """Scales what its weight is initialized with, here or by a module that it is tied to."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.mul_(0.5)


def _check_second_initialization() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 5, bias=False), _Damped(5, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    model = fully_shard(on_meta(make))
    torch.manual_seed(3)
    materialize(model)
    torch.manual_seed(3)
    reference = make()
    torch.manual_seed(3)
    initialize(reference)
    assert_equal(model, reference)


def test_a_second_module_of_a_tied_parameter_starts_with_the_values_of_the_first() -> None:
    run_ranks(_check_second_initialization)


def _check_constructor() -> None:
    """Where constructors initialize in the order of registration, seed and constructor are the reference."""
    model = fully_shard(on_meta(lambda: nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Conv1d(7, 3, 1))))
    torch.manual_seed(1)
    materialize(model)
    torch.manual_seed(1)
    assert_equal(model, nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Conv1d(7, 3, 1)))


def test_values_are_those_of_the_constructor() -> None:
    run_ranks(_check_constructor)


def _check_argument() -> None:
    torch.manual_seed(4)
    model = fully_shard(on_meta(Tied), mesh=init_device_mesh("cpu", (2,)), param_init_fn=init_normal)
    torch.manual_seed(4)
    reference = Tied()
    torch.manual_seed(4)
    with torch.no_grad():
        for module in reference.modules():
            init_normal(module)
    assert_equal(model, reference)
    with pytest.raises(ConfigError, match="cannot be called"):
        fully_shard(nn.Linear(2, 2), param_init_fn=3)  # type: ignore[arg-type]
    there = nn.Linear(2, 2)
    kept = there.weight.detach().clone()
    fully_shard(there, param_init_fn=init_normal)
    assert torch.equal(full_state(there)["weight"], kept), "only what is on meta is initialized"


def test_fully_shard_takes_param_init_fn() -> None:
    run_ranks(_check_argument)


def _most_at_once(model: nn.Module) -> int:
    """Largest number of elements of full parameters that stand at once while a model is initialized."""
    most = 0

    def init(module: nn.Module) -> None:
        nonlocal most
        full = [p for p in model.parameters() if not isinstance(p, DTensor)]
        most = max(most, sum(p.numel() for p in full))
        init_normal(module)

    materialize(model, param_init_fn=init)
    return most


def _check_one_module_at_a_time() -> tuple[int, int]:
    model = fully_shard(on_meta(Tied))
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    return _most_at_once(model), largest


def test_one_module_is_full_at_a_time() -> None:
    assert all(most == largest for most, largest in run_ranks(_check_one_module_at_a_time))


def _check_what_is_there_stays() -> None:
    model = on_meta(Tied)
    model.blocks[0].up = nn.Linear(6, 13)
    model.average = nn.BatchNorm1d(6)
    there = {n: t.clone() for n, t in full_state(model).items() if t.device.type != "meta"}
    kept_full = model.blocks[1].down.bias
    fully_shard(model, ignored_params={kept_full}, mesh=init_device_mesh("cpu", (2,)))
    materialize(model, "cpu")
    state = full_state(model)
    assert "blocks.0.up.weight" in there
    assert all(torch.equal(state[n], t) for n, t in there.items())
    assert not isinstance(model.blocks[1].down.bias, DTensor)
    assert not model.blocks[1].down.bias.isnan().any()
    materialize(model)  # nothing is left to do
    assert all(torch.equal(t, state[n]) for n, t in full_state(model).items())


def test_what_has_values_already_keeps_them() -> None:
    run_ranks(_check_what_is_there_stays)


class Bare(nn.Module):
    """Cannot initialize itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.empty(4))


def _nothing(module: nn.Module) -> None:
    """Writes no values."""


def _to_meta(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(torch.empty(4, 4, device="meta"))


def _reshape(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()
        module.weight = nn.Parameter(torch.zeros(5, 4))


def _children(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data[:2].normal_()


REFUSED: dict[str, tuple[Any, str, str]] = {
    "no reset_parameters": (None, "has no reset_parameters", "param_init_fn"),
    "not callable": (5, "param_init_fn is a int", "a function of one module"),
    "nothing written": (_nothing, "without a value", "inner.weight"),
    "left on meta": (_to_meta, "left it on the meta device", "weight"),
    "other shape": (_reshape, "shape (4, 4) to torch.float32 of shape (5, 4)", "weight"),
    "children": (_children, "is sharded, and has no views", "param_init_fn is called on all"),
}


def _check_refused(case: str) -> None:
    init, what, also = REFUSED[case]
    model = fully_shard(
        on_meta(lambda: nn.Sequential(nn.Linear(4, 4)) if case in ("left on meta", "other shape") else Bare())
    )
    with pytest.raises(ConfigError) as caught:
        materialize(model, param_init_fn=init)
    assert what in str(caught.value)
    assert also in str(caught.value)


def _check_all_refused() -> None:
    for case in REFUSED:
        _check_refused(case)
    with pytest.raises(ConfigError, match="nothing in this model is sharded"):
        materialize(on_meta(Bare))
    with pytest.raises(ConfigError, match="not one of the mesh"):
        materialize(fully_shard(on_meta(lambda: Norm(4))), device="meta")
    with pytest.raises(ConfigError, match="no device"):
        materialize(fully_shard(on_meta(lambda: Norm(4))), device=1.5)  # type: ignore[arg-type]


def test_wrong_initializations_are_refused_by_name() -> None:
    run_ranks(_check_all_refused, world_size=1)


def _check_seeds() -> str:
    model = fully_shard(on_meta(Tied))
    torch.manual_seed(torch.distributed.get_rank())
    with pytest.raises(RankMismatchError) as caught:
        fsdp_compile.materialize(model)
    quiet = fully_shard(on_meta(lambda: nn.LayerNorm(5)))
    fsdp_compile.materialize(quiet)  # draws nothing, so that seeds may differ
    assert torch.equal(full_state(quiet)["weight"], torch.ones(5))
    return str(caught.value)


def test_ranks_with_different_seeds_are_refused() -> None:
    assert all("same seed on every rank" in message for message in run_ranks(_check_seeds))


def _if_on_meta(module: nn.Module) -> None:
    if any(t.is_meta for t in module.parameters(recurse=False)):
        module.to_empty(device="cpu", recurse=False)
        _reset_all(module)


def _if_any_below_is_on_meta(module: nn.Module) -> None:
    if any(t.is_meta for t in module.parameters()):
        module.to_empty(device="cpu")
        _reset_all(module)


def _all_below(module: nn.Module) -> None:
    module.to_empty(device="cpu")
    _reset_all(module)


def _reset_all(module: nn.Module) -> None:
    for part in module.modules():
        if callable(reset := getattr(part, "reset_parameters", None)):
            reset()


class Residual(nn.Module):
    """Two layers around a sum, of which the second is scaled by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 13)
        self.down = nn.Linear(13, 6)


class Language(nn.Module):
    """Initializes all of its parts by itself, as GPT-2 does; its head is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.position = nn.Parameter(torch.empty(5, 6))
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def initialize(self) -> None:
        self.apply(_init_normal_and_zero)
        nn.init.trunc_normal_(self.position, std=0.02)
        for name, parameter in self.named_parameters():
            if name.endswith("down.weight"):
                nn.init.normal_(parameter, std=0.02 / 2)
            if name.endswith("up.weight"):
                parameter.mul_(2)


def _init_normal_and_zero(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _from_the_root(module: nn.Module) -> None:
    if isinstance(module, Language):
        module.initialize()


IDIOMS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], None]]] = {
    "if on meta": (lambda: nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Conv1d(7, 3, 1)), _if_on_meta),
    "if any below": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 3))), _if_any_below_is_on_meta),
    "all below": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 3))), _all_below),
    "from the root": (Language, _from_the_root),
}


def _check_idiom(case: str, shape: tuple[int, ...], *, from_first_rank: bool) -> None:
    make, init = IDIOMS[case]
    torch.manual_seed(3 + (torch.distributed.get_rank() if from_first_rank else 0))
    model = on_meta(make)
    mesh = init_device_mesh("cpu", shape)
    fully_shard(model, mesh=mesh, param_init_fn=init, sync_module_states=from_first_rank)
    reference = make() if case == "from the root" else on_meta(make)  # `to_empty()` of a plain model unties it
    torch.manual_seed(3)
    with torch.no_grad():
        reference.apply(init)
    assert_equal(model, reference)


@long.parametrize("case", IDIOMS, always=["from the root"])
@long.parametrize(("shape", "from_first_rank"), [((2,), False), ((2,), True), ((2, 2), True)], always=[((2, 2), True)])
def test_initializations_written_for_fsdp1_and_for_whole_models(
    *, case: str, shape: tuple[int, ...], from_first_rank: bool
) -> None:
    run_ranks(_check_idiom, case, shape, from_first_rank=from_first_rank, world_size=2 * len(shape))
