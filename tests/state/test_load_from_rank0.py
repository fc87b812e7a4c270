"""A full state dict that the first rank alone holds reaches a sharded model, whatever its modules share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_compile import ConfigError, full_params, full_tensors, fully_shard, load_from_rank0
from fsdp_compile.state.load_from_rank0 import IncompatibleKeys
from tests import long
from tests.beside import compile_eagerly
from tests.models.meta import Tied
from tests.ranks import run_ranks
from tests.sharding.test_materialize import assert_equal, full_state, on_meta
from tests.sharding.test_sync_states import assert_parts_equal, mesh_of, seeded
from tests.state.test_ema import WithExtraState

State = dict[str, torch.Tensor]


def _model(mesh: tuple[int, ...], *, meta: bool = False) -> Any:
    model = on_meta(Tied) if meta else Tied()
    model.image = nn.Conv2d(3, 5, 3, device="meta" if meta else None)
    return fully_shard(model, mesh=mesh_of(mesh), reshard_after_forward=meta)


def _alone(state: dict[str, Any]) -> dict[str, Any] | None:
    return state if dist.get_rank() == 0 else None


def _load(mesh: tuple[int, ...]) -> None:
    """Tied weights, a module under two names, uneven rows, several dtypes, frozen parameters, a table not saved."""
    reference = seeded(0)
    state = copy.deepcopy(reference.state_dict())
    model = _model(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled: Any = torch.compile(model, backend="fsdp")
    assert load_from_rank0(compiled, _alone(state)) == IncompatibleKeys((), ())
    for norm in (m for m in model.modules() if hasattr(m, "table")):
        norm.table.copy_(reference.blocks[0].norm.table)
    assert_parts_equal(model, reference)
    assert_equal(model, reference)
    assert optimizer.param_groups[0]["params"] == list(model.parameters())

    empty = _model(mesh, meta=True)
    fewer = {name: value for name, value in state.items() if "blocks.1.shared" not in name and name != "head.weight"}
    load_from_rank0(empty, _alone({name: value.double() for name, value in fewer.items()}))
    assert not any(p.is_meta for p in empty.parameters())
    assert {name for name, b in empty.named_buffers() if b.is_meta} == {
        "blocks.0.norm.table", "blocks.0.shared.table", "blocks.1.norm.table"
    }  # fmt: skip
    loaded = full_state(empty)
    for name, value in state.items():
        assert torch.equal(loaded[name], value), name
    assert empty.head.weight is empty.embedding.weight


def _wrong(mesh: tuple[int, ...]) -> tuple[list[str], IncompatibleKeys]:
    model = _model(mesh)
    before = full_state(model)
    state = seeded(0).state_dict()
    cases: list[State | None] = [
        {**state, "tail.weight": torch.ones(1)},
        {name: value for name, value in state.items() if name not in ("embedding.weight", "head.weight")},
        {**state, "middle.weight": torch.ones(2, 3), "image.bias": torch.ones(5, device="meta")},
        None,
    ]
    messages = []
    for case in cases:
        with pytest.raises(ConfigError) as caught:
            load_from_rank0(model, case if case is None else _alone(case))
        messages.append(str(caught.value))
    for name, value in full_state(model).items():
        assert torch.equal(value, before[name]), "nothing was changed"
    some = {"middle.weight": state["middle.weight"] + 1, "tail.weight": torch.ones(1)}
    keys = load_from_rank0(model, _alone(some), strict=False)
    assert torch.equal(full_state(model)["middle.weight"], some["middle.weight"])
    assert torch.equal(full_state(model)["image.weight"], before["image.weight"])
    with pytest.raises(ConfigError, match="nothing in this model is sharded"):
        load_from_rank0(nn.Linear(2, 2), None)
    return messages, keys


def _all(mesh: tuple[int, ...]) -> tuple[list[str], IncompatibleKeys]:
    _load(mesh)
    return _wrong(mesh)


@pytest.mark.core
@long.parametrize("mesh", [(2,), (2, 2)], always=[(2,)])
def test_every_rank_gets_its_part_and_what_does_not_fit_is_named_on_all(mesh: tuple[int, ...]) -> None:
    for (unexpected, missing, wrong, nothing), keys in run_ranks(_all, mesh, world_size=torch.Size(mesh).numel()):
        assert "fit the model: tail.weight is not in the model\n" in unexpected
        assert "fit the model: embedding.weight is missing; head.weight is missing\n" in missing
        assert "middle.weight has shape (2, 3), and (6, 6) in the model; image.bias is on the meta device\n" in wrong
        assert "the first rank was given no state dict" in nothing
        assert "middle.weight" not in keys.missing
        assert {"embedding.weight", "head.weight", "average.running_mean"} < set(keys.missing)
        assert keys.unexpected == ("tail.weight",)


def _wrapped(seed: int, wrap: Callable[[nn.Module], Any]) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(WithExtraState(4, 4), nn.Linear(4, 4))
    model[0] = wrap(model[0])
    return fully_shard(model)


def _wrapped_names() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(WithExtraState(4, 4), nn.Linear(4, 4)).state_dict()
    for wrap, part in ((checkpoint_wrapper, "_checkpoint_wrapped_module"), (compile_eagerly, "_orig_mod")):
        long = {name.replace("0.", f"0.{part}."): value for name, value in plain.items()}
        own = _wrapped(0, wrap)
        with full_params(own, writeback=False):
            saved = {name: copy.deepcopy(value) for name, value in own.state_dict().items()}
        for state in (plain, long, saved):
            model = _wrapped(1, wrap)
            assert load_from_rank0(model, _alone(state)) == IncompatibleKeys((), ())
            for name, value in full_tensors(model):
                assert torch.equal(value, plain[name]), name
        with pytest.raises(ConfigError, match=r"the state dict has 0\.weight twice"):
            load_from_rank0(model, _alone({**plain, **long}))


def test_names_may_have_those_of_wrappers_in_them() -> None:
    run_ranks(_wrapped_names)


class _Own:
    """What only code of its own can make."""


def _extra_state() -> None:
    model: Any = fully_shard(nn.Sequential(WithExtraState(4, 4), nn.Linear(4, 4)))
    given: Any = nn.Sequential(WithExtraState(4, 4), nn.Linear(4, 4))
    given[0].scale = 3.0
    state: dict[str, Any] = given.state_dict()
    assert load_from_rank0(model, _alone(state)) == IncompatibleKeys((), ())
    assert model[0].scale == 3.0
    before = model[0].weight.full_tensor()
    other: dict[str, Any] = {
        name: value + 1 if isinstance(value, torch.Tensor) else {"scale": _Own()} for name, value in state.items()
    }
    with pytest.raises(ConfigError, match="extra state is sent as tensors, numbers"):
        load_from_rank0(model, _alone(other))
    with pytest.raises(ConfigError, match=r"the first rank cannot send(.|\n)*get_extra_state\(\) that returns"):
        load_from_rank0(model, _alone({**state, "0._extra_state": {"scale": lambda: 1}}))
    assert torch.equal(model[0].weight.full_tensor(), before), "nothing was changed"
    del state["0._extra_state"]
    with pytest.raises(ConfigError, match=r"0\._extra_state is missing"):
        load_from_rank0(model, _alone(state))


def test_extra_state_reaches_every_rank() -> None:
    run_ranks(_extra_state)
