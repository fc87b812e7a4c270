"""`unshard_after_step`: the same bits, one gather less in forward, values that are never outdated, no memory left."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

from fsdp_compile import MixedPrecision, clip_grad_norm_, explain, flat_step, fully_shard, step_in_backward
from fsdp_compile._torch.inductor_cache import cache_in
from fsdp_compile._torch.stored_compiles import CAN_STORE
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.errors import BudgetTooSmallError, ConfigError, UnsupportedModelError
from fsdp_compile.explain.show.page import page_data
from fsdp_compile.explain.show.trace_events import trace_events
from fsdp_compile.options import FSDPOptions
from fsdp_compile.runtime import unshard
from fsdp_compile.runtime.module_state import units
from tests import long
from tests.models.extended import Half, Layers
from tests.models.kinds import Slim
from tests.numerics.one_process.pair import batches, loss_of
from tests.ops.test_quantize import Wide
from tests.ranks import run_ranks

AFTER_STEP = {"unshard_after_step": True}


def _model(**options: Any) -> Any:
    torch.manual_seed(0)
    model = Slim(2)
    for part in (*model.blocks, model):
        fully_shard(part)
    return torch.compile(model, backend="fsdp", options={"lower": "eager", "bucket_mb": 0, **options})


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _backward(model: nn.Module, seed: int) -> None:
    (batch,) = batches(1, 4 * dist.get_world_size(), seed=seed)
    loss_of(model(batch.chunk(dist.get_world_size())[dist.get_rank()])).backward()


def _unsharded(model: nn.Module) -> list[str]:
    """The units that are unsharded, or being gathered."""
    groups = [group for unit in units(model) for group in unit.param_groups]
    return [group.unit.title for group in groups if not group.unsharded.is_sharded]


def _parameters(model: nn.Module) -> list[torch.Tensor]:
    return [p.to_local().clone() for p in model.parameters() if isinstance(p, DTensor)]


def _is_same(models: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(*map(_parameters, models), strict=True))


def _reshard(model: Any) -> None:
    for part in (*model.blocks, model):
        part.reshard()


@torch.no_grad()
def _scale(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.25)


def _evaluate(model: nn.Module) -> None:
    (batch,) = batches(1, 4)
    with torch.no_grad():
        model(batch)


def _accumulate(model: Any) -> None:
    model.set_requires_gradient_sync(False)
    _backward(model, 100)
    model.set_requires_gradient_sync(True)


def _nothing(_model: nn.Module) -> None:
    """Two steps with nothing between them."""


BETWEEN: tuple[Callable[[Any], None], ...] = (
    _nothing,
    _nothing,
    _scale,
    lambda model: model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()}),
    _evaluate,
    _accumulate,
    _accumulate,
)
"""What happens after each step."""


def _fsdp2() -> Any:
    torch.manual_seed(0)
    model: Any = Slim(2)
    for part in (*model.blocks, model):
        fsdp2(part)
        part.set_force_sum_reduction_for_comms(True)  # gloo cannot divide for it
    return model


def _train(lower: str, updates: str) -> tuple[bool, list[list[str]], list[int]]:
    """Whether two models stay the same, what is unsharded after each step, and how many graphs there are by then.

    The other model is FSDP2's; where Inductor rounds otherwise, it is the same one without the option.
    """
    models = [_fsdp2() if lower == "eager" else _model(lower=lower), _model(lower=lower, **AFTER_STEP)]
    optimizers = [_optimizer(model) for model in models]
    if updates == "in_backward":
        optimizers[1] = step_in_backward(optimizers[1])
    seen, graphs = [], []
    torch._dynamo.config.recompile_limit = 32  # the two models have one forward
    is_usual = (lower, updates) == ("eager", "after_backward")
    for step, between in enumerate(2 * BETWEEN if is_usual else BETWEEN[:4]):
        for model, optimizer in zip(models, optimizers, strict=True):
            _backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(_unsharded(models[1]))
        for model in models:
            between(model)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return _is_same(models), seen, graphs


@long.parametrize(
    ("lower", "updates"),
    [("eager", "after_backward"), ("inductor", "after_backward"), ("eager", "in_backward")],
    always=[("eager", "after_backward")],
)
def test_numbers_stay_the_same_bits_and_the_second_step_compiles_once_more(lower: str, updates: str) -> None:
    for is_same, seen, graphs in run_ranks(_train, lower, updates):
        assert is_same
        assert [len(names) for names in seen] == [1] * len(seen), (seen, graphs)
        assert graphs[1] == graphs[0] + 1
        assert graphs[3] == graphs[1]  # a write, and a load
        assert graphs[-1] == graphs[len(graphs) // 2 - 1]  # the same again


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "replicas": ({}, {}),
    "8 bits": ({"mp_policy": MixedPrecision(gather_dtype=torch.int8)}, {}),
    "poisoned": ({}, {"poison": True}),
    "like layers share code": ({}, {"lower": "inductor", "share_code": True}),
}
"""Arguments of `fully_shard`, and options."""


def _with(name: str) -> tuple[bool, list[int]]:
    """Whether clipped training stays the same beside a model without the option, and what is unsharded after steps."""
    arguments, options = SETTINGS[name]
    shape = (2, 2) if name == "replicas" else (1, dist.get_world_size())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    arguments = {"mesh": mesh if name == "replicas" else mesh["shard"], **arguments}
    models: list[Any] = []
    for extra in ({}, AFTER_STEP):
        torch.manual_seed(0)
        model = Wide()
        for part in (model.up, model.down, model):
            fully_shard(part, **arguments)
        all_options = {"lower": "eager", "bucket_mb": 0, **options, **extra}
        models.append(torch.compile(model, backend="fsdp", options=all_options))
    optimizers = [_optimizer(model) for model in models]
    seen = []
    for step in range(4):
        batch = torch.randn(4, 96, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for model, optimizer in zip(models, optimizers, strict=True):
            model(batch).square().mean().backward()
            clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(len(_unsharded(models[1])))
    for part in (models[1].up, models[1].down, models[1]):
        part.reshard()
    return _is_same(models), seen


@long.parametrize("name", SETTINGS, always=["replicas"])
def test_numbers_stay_the_same_with_other_settings(name: str) -> None:
    world_size = 4 if name == "replicas" else 2
    for is_same, seen in run_ranks(_with, name, world_size=world_size):
        assert is_same
        assert seen == [1] * 4


def _two_models() -> list[str]:
    """Whose groups are gathered, in order, when their optimizer steps; trained in another order than sharded."""
    models = [_model(**AFTER_STEP), _model(**AFTER_STEP)]
    for model in reversed(models):
        _backward(model, 0)
    parameters = [p for model in models for p in model.parameters()]
    with mock.patch.object(unshard, "_start_all_gather", wraps=unshard._start_all_gather) as started:
        torch.optim.SGD(parameters, lr=0.1).step()
    for model in models:
        _reshard(model)
    owners = {id(unit.model): str(i) for i, model in enumerate(models) for unit in units(model)}
    return [owners[id(call.args[0].unit.model)] for call in started.call_args_list]


def test_models_gather_in_the_order_in_which_they_were_sharded() -> None:
    assert run_ranks(_two_models) == [["0", "1"]] * 2


def _own_optimizers() -> list[list[str]]:
    """Whose groups are gathered when each of two optimizers steps, and when the first one does after `reshard()`."""
    models = [_model(**AFTER_STEP), _model(**AFTER_STEP)]
    optimizers = [_optimizer(models[0]), flat_step(_optimizer(models[1]))]
    owners = {id(unit.model): str(i) for i, model in enumerate(models) for unit in units(model)}
    found: list[list[str]] = []
    for model in models:
        _backward(model, 0)
    for optimizer in (*optimizers, optimizers[0]):
        if len(found) == len(optimizers):
            for model in models:
                _reshard(model)
        with mock.patch.object(unshard, "_start_all_gather", wraps=unshard._start_all_gather) as started:
            optimizer.step()
        found.append([owners[id(call.args[0].unit.model)] for call in started.call_args_list])
    return found


def test_an_optimizer_gathers_for_its_own_models_whose_forward_is_expected() -> None:
    # Another model may be deleted on some ranks, and not yet on others.
    assert run_ranks(_own_optimizers) == [[["0"], ["1"], []]] * 2


def _again(folder: str) -> tuple[int, list[str]]:
    """How many graphs a second model loaded, and what is unsharded after its third step."""
    with cache_in(Path(folder)):
        _third_step(_model(lower="inductor", **AFTER_STEP))
        dist.barrier()
        torch._dynamo.reset()
        counters.clear()
        model = _model(lower="inductor", **AFTER_STEP)
        unsharded = _third_step(model)
        _reshard(model)
        return counters["aot_autograd"]["autograd_cache_hit"], unsharded


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.skipif(not CAN_STORE, reason="this torch's cache of whole compiles has another form")
def test_compiles_that_are_loaded_know_what_is_gathered_first(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    for loaded, unsharded in run_ranks(_again, str(tmp_path / "cache")):
        assert loaded > 0
        assert len(unsharded) == 1


def _between_steps() -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = _model(**AFTER_STEP)
    optimizer = _optimizer(model)
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    _backward(model, 0)
    started = mock.patch.object(unshard, "_start_all_gather", wraps=unshard._start_all_gather)
    with started as gathers:
        optimizer.step()
        found["started"] = gathers.call_count
        other.step()
        found["started by another optimizer"] = gathers.call_count
        _backward(model, 1)
        found["started by forward"] = gathers.call_count
        found["after backward"] = _unsharded(model)
        optimizer.step()
        _evaluate(model)
        found["after evaluation"] = _unsharded(model)
        found["before a step that follows an evaluation"] = gathers.call_count
        optimizer.step()
        found["after a step that follows an evaluation"] = gathers.call_count
        _backward(model, 2)
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        with pytest.raises(UnsupportedModelError, match=r"a write that torch does not count"):
            _backward(model, 3)
        _reshard(model)
        _backward(model, 3)
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        _reshard(model)
        _backward(model, 4)
        optimizer.step()
    found["waiting"] = torch._C._distributed_c10d._get_work_registry_size()
    started_for = [weakref.ref(call.args[0]) for call in gathers.call_args_list]
    del model, optimizer, parameter, started, gathers
    torch._dynamo.reset()
    gc.collect()
    found["deleted"] = all(group() is None for group in started_for)
    found["waiting after deletion"] = torch._C._distributed_c10d._get_work_registry_size()
    return found


def test_what_happens_between_steps() -> None:
    for found in run_ranks(_between_steps):
        assert found["started"] == 1
        assert found["started by another optimizer"] == 1
        assert found["started by forward"] == 1, "an optimizer of other parameters has written to none"
        assert found["after backward"] == found["after evaluation"] == []
        assert found["after a step that follows an evaluation"] == found["before a step that follows an evaluation"]
        assert found["deleted"]
        assert found["waiting"] > 0
        assert found["waiting after deletion"] == 0


def _third_step(model: Any) -> list[str]:
    """What is unsharded after the third step."""
    optimizer = _optimizer(model)
    for step in range(3):
        _backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return _unsharded(model)


def _within_budgets() -> list[list[str]]:
    with pytest.raises(BackendCompilerFailed) as caught:
        _backward(_model(memory_budget_gb=1e-6, activations="saved"), 0)
    assert isinstance(caught.value.inner_exception, BudgetTooSmallError)
    least_bytes = caught.value.inner_exception.least_bytes
    cases: list[dict[str, Any]] = [{"memory_budget_gb": each * least_bytes / 1e9} for each in (1, 10)]
    cases.append({"memory_budget_gb": 1.0, "stop_after": "bucket"})
    return [_third_step(_model(**AFTER_STEP, activations="saved", **each)) for each in cases]


def test_nothing_is_started_where_the_budget_has_no_room() -> None:
    for tight, ample, not_planned in run_ranks(_within_budgets):
        assert tight == not_planned == []
        assert len(ample) == 1


def test_explain_shows_what_is_sent_between_steps() -> None:
    link = hardware("cpu", 0.01)
    without, plan = (
        explain(Slim(2), torch.ones(4, 32), world_size=2, hardware=link, options={"bucket_mb": 0, **options})
        for options in ({}, AFTER_STEP)
    )
    first = plan.next_gather
    assert first == plan.forward[0].collectives[0]
    assert first.exposed_us > 0
    assert re.search(rf"between steps +{first.unit}: ", str(plan))
    assert without.next_gather is None
    assert "between steps" not in str(without)
    title = f"all-gather {first.unit} for the next forward"
    (drawn,) = (event for event in trace_events(plan)["traceEvents"] if event["name"] == title)
    assert drawn["ts"] == pytest.approx(plan.step_us)
    assert drawn["dur"] == pytest.approx(first.time_us)
    assert page_data(plan)["next_gather"]["unit"] == first.unit
    assert page_data(without)["next_gather"] is None


CUDA_GRAPHS = {"lower": "inductor", "inductor": {"triton.cudagraphs": True}}


REFUSED: tuple[tuple[Callable[[], nn.Module], dict[str, Any], str], ...] = (
    (lambda: fully_shard(Layers(None), reshard_after_forward="auto"), {}, "reshard_after_forward=True"),
    (lambda: fully_shard(Layers(None), offload_policy=CPUOffloadPolicy()), {}, "its shards are on the host"),
    (lambda: fully_shard(Layers(Half)), {}, "the class of its parameters says how they are gathered"),
    (lambda: fully_shard(Layers(None)), CUDA_GRAPHS, "CUDA graphs read their inputs where they were recorded"),
)


def _refused() -> list[str]:
    messages = []
    for make, options, _ in REFUSED:
        compiled = torch.compile(make(), backend="fsdp", options={"lower": "eager", **AFTER_STEP, **options})
        with pytest.raises(Exception, match=r"unshard_after_step") as caught:
            compiled(torch.ones(2, 6)).sum().backward()
        messages.append(str(caught.value))
    return messages


def test_what_is_not_supported_is_refused_by_name() -> None:
    for messages in run_ranks(_refused):
        for message, (*_, told) in zip(messages, REFUSED, strict=True):
            assert told in message
    with pytest.raises(ConfigError, match=r"unshard_after_step.*refine_after"):
        FSDPOptions(refine_after=1, **AFTER_STEP)  # type: ignore[arg-type]
