"""Stored compiles: they are loaded where nothing has changed, and only there, and train as what was compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdp_compile import RankMismatchError, explain, fully_shard, step_in_backward
from fsdp_compile._torch.inductor import cache_folder, cache_in
from fsdp_compile._torch.stored_compiles import CAN_STORE
from fsdp_compile.cost.hardware import Hardware, MeasuredCollective, hardware
from fsdp_compile.lower import once, region_key
from tests import long
from tests.fake_world import fake_world
from tests.models.kinds import KINDS
from tests.numerics.one_process.measure import Differences, train_pair
from tests.numerics.one_process.test_model_kinds import assert_equal_training
from tests.ranks import run_ranks
from tests.two_sides import loss_of

pytestmark = [
    pytest.mark.inductor,
    pytest.mark.skipif(not CAN_STORE, reason="this torch's cache of whole compiles has another form"),
]


class _Model(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    folder.mkdir(mode=0o700, exist_ok=True)
    with cache_in(folder):
        yield


@contextmanager
def _new_keys(folder: Path, tag: Path) -> Iterator[None]:
    """As if nothing were stored in a folder, but that C++ code compiled there need not be compiled again."""
    with _new_folder(folder), torch.compiler.config.patch(cache_key_tag=str(tag)):  # type: ignore[attr-defined]
        yield


def _step(
    options: Mapping[str, Any] | None = None, *, width: int = 8, rows: int = 4, evaluate: bool = False, **shard: Any
) -> tuple[str, str]:
    """Trains or evaluates a new model once with a clean Dynamo; says where its compile came from, and its report."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = _Model(width)
    fully_shard(model.first, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **shard)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **shard)
    compiled = torch.compile(model, backend="fsdp", options=dict(options or {}))
    with torch.set_grad_enabled(not evaluate):
        loss = loss_of(compiled(torch.ones(rows, 8)))
    if not evaluate:
        loss.backward()
    return _where(), str(explain(compiled))


def _where() -> str:
    """Where the compiles since counters were cleared came from."""
    found = counters["aot_autograd"]
    return "loaded" if found["autograd_cache_hit"] else "compiled" if found["autograd_cache_saved"] else "not stored"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for tests that need not be the first to compile; what Inductor makes once is made once."""
    return tmp_path_factory.mktemp("shared") / "cache"


def test_the_second_compile_is_loaded_and_reports_the_same(shared: Path, tmp_path: Path) -> None:
    with fake_world(2), _new_keys(shared, tmp_path):
        (first, report), (second, report_again) = _step(), _step()
        assert (first, second) == ("compiled", "loaded")
        assert report_again == report
        assert [_step(evaluate=True)[0] for _ in range(2)] == ["compiled", "loaded"]


CHANGES: dict[str, dict[str, Any]] = {
    "prefetch": {"options": {"prefetch": 0}},
    "buckets": {"options": {"bucket_mb": 1.0}},
    "layout": {"options": {"reduce_layout": "fsdp2"}},
    "budget": {"options": {"memory_budget_gb": 1.0}},
    "hardware": {"options": {"hardware": hardware("cpu", 1.0)}},
    "poison": {"options": {"poison": True}},
    "inductor": {"options": {"inductor": {"epilogue_fusion": False}}},
    "unsharded": {"reshard_after_forward": False},
    "dtype": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "width": {"width": 16},
    "rows": {"rows": 8},
}


@long.parametrize("changed", list(CHANGES), always=["prefetch", "unsharded"])
def test_another_option_unit_or_shape_is_compiled(changed: str, shared: Path) -> None:
    with fake_world(2), _new_folder(shared):
        _step()
        assert _step(**CHANGES[changed])[0] == "compiled"
        assert _step()[0] == "loaded"


def _known() -> list[Hardware]:
    """Hardware of one name, as it is, with a measured collective, and with a measured operator."""
    known = hardware("cpu", 2.0)
    slower = MeasuredCollective("all-gather", 2, ((1e3, 1e3), (1e6, 1e6)))
    measured = dataclasses.replace(known, link=dataclasses.replace(known.link, measured=(slower,)))
    timed = dataclasses.replace(known, device=dataclasses.replace(known.device, measured={"mm": 1.0}))
    return [known, measured, timed]


def test_all_numbers_of_named_hardware_are_in_the_key() -> None:
    assert len({region_key._hardware(each) for each in [None, *_known(), *_known()]}) == 4


@pytest.mark.long
def test_named_hardware_is_a_part_of_what_is_stored(shared: Path) -> None:
    known, measured, timed = _known()
    guessed = dataclasses.replace(known, device=dataclasses.replace(known.device, estimate=lambda _node: 1.0))
    given = [known, hardware("cpu", 2.0), measured, timed, guessed]
    with fake_world(2), _new_folder(shared):
        found = [_step({"hardware": each})[0] for each in given]
    assert found == ["compiled", "loaded", "compiled", "compiled", "not stored"]


def test_another_version_of_this_package_compiles(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(2), _new_folder(shared):
        _step()
        monkeypatch.setattr(region_key, "_package_digest", lambda: "another one")
        assert _step()[0] == "compiled"


def test_plans_of_unnamed_hardware_depend_on_hosts_and_float32_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    found = []
    try:
        for precision, local in (("highest", "1"), ("high", "1"), ("high", "2"), ("highest", "1")):
            torch.set_float32_matmul_precision(precision)
            monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
            found.append(region_key._hardware(None))
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(set(found)) == 3
    assert found[0] == found[3]


@pytest.mark.long
def test_other_hosts_or_float32_matmuls_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before)  # what was never set is another setting to torch
    with fake_world(2), _new_folder(tmp_path / "cache"):
        _step()
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        assert _step()[0] == "compiled"
        torch.set_float32_matmul_precision("high")
        try:
            assert _step()[0] == "compiled"
        finally:
            torch.set_float32_matmul_precision(before)
        assert _step()[0] == "loaded"


def test_other_attention_kernels_compile(shared: Path) -> None:
    """AOTAutograd has chosen one of those that were allowed when it traced."""
    with fake_world(2), _new_folder(shared):
        _step()
        with sdpa_kernel(SDPBackend.MATH):
            assert _step()[0] == "compiled"
        assert _step()[0] == "loaded"


def test_without_inductors_cache_no_rank_waits(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    monkeypatch.setattr(once, "check_folder", lambda _: pytest.fail("a lock was to be made"))
    with fake_world(2), _new_folder(shared):
        assert _step({"inductor": {"fx_graph_cache": False}})[0] == "not stored"


def test_another_number_of_ranks_compiles(shared: Path) -> None:
    with _new_folder(shared):
        with fake_world(2):
            _step()
        with fake_world(4):
            assert _step()[0] == "compiled"


NOT_STORED: list[dict[str, Any]] = [{"artifacts": True}, {"share_code": True}, {"lower": "eager"}]


@long.parametrize("options", NOT_STORED, always=[{"artifacts": True}, {"lower": "eager"}], ids=str)
def test_what_more_depends_on_is_not_stored(options: dict[str, Any], shared: Path, tmp_path: Path) -> None:
    given = {"artifacts": str(tmp_path / "artifacts")} if "artifacts" in options else options
    with fake_world(2), _new_folder(shared):
        assert [_step(given)[0] for _ in range(2)] == ["not stored"] * 2


def test_updates_in_backward_are_not_stored(shared: Path) -> None:
    with fake_world(2), _new_folder(shared):
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            model = fully_shard(_Model(), mesh=init_device_mesh("cpu", (2,)))
            step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
            loss_of(torch.compile(model, backend="fsdp")(torch.ones(4, 8))).backward()
            assert _where() == "not stored"


def test_open_sizes_are_not_stored(shared: Path) -> None:
    with fake_world(2), _new_folder(shared):
        model = fully_shard(_Model(), mesh=init_device_mesh("cpu", (2,)))
        compiled = torch.compile(model, backend="fsdp", dynamic=True)
        counters.clear()
        loss_of(compiled(torch.ones(4, 8))).backward()
        assert _where() == "not stored"


@torch.library.custom_op("tests_stored::same", mutates_args=())
def _same(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


_same.register_fake(torch.empty_like)
_same.register_autograd(lambda _, grad: 2 * grad)


class _WithOperator(_Model):
    """Calls an operator whose code no key has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _same(super().forward(x))


def test_operators_of_others_are_not_stored(shared: Path) -> None:
    with fake_world(2), _new_folder(shared):
        counters.clear()
        compiled = torch.compile(fully_shard(_WithOperator(), mesh=init_device_mesh("cpu", (2,))), backend="fsdp")
        loss_of(compiled(torch.ones(4, 8))).backward()
        assert _where() == "not stored"


class _Looked(nn.Module):
    """A table of which each rank of `tp` has some rows: which ones is a constant of AOTAutograd's graph."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


def test_tensor_parallelism_is_not_stored(shared: Path) -> None:
    with fake_world(4), _new_folder(shared):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(_Looked(), mesh["tp"], {"table": RowwiseParallel(input_layouts=Replicate())})
        counters.clear()
        compiled = torch.compile(fully_shard(model, mesh=mesh["dp"]), backend="fsdp")
        loss_of(compiled(torch.arange(4))).backward()
        assert _where() == "not stored"


@long.parametrize("folder", ["fxgraph", "aotautograd"], always=["aotautograd"])
def test_a_damaged_folder_costs_a_compile(folder: str, shared: Path, tmp_path: Path) -> None:
    others = set((shared / folder).rglob("*"))
    with fake_world(2), _new_keys(shared, tmp_path):
        _step()
        damaged = [path for path in (shared / folder).rglob("*") if path.is_file() and path not in others]
        assert damaged
        for path in damaged:
            path.write_bytes(b"")
        assert _step()[0] != "loaded"


def _train_twice(kind: str, folder: Path, tag: Path) -> tuple[Differences, int]:
    """Trains beside one process with what this rank compiles, or waits for, and again with what it loads."""
    with _new_keys(folder, tag):
        train_pair(KINDS[kind], options={"lower": "inductor"})
        dist.barrier()
        torch._dynamo.reset()
        counters.clear()
        return train_pair(KINDS[kind], options={"lower": "inductor"}), counters["aot_autograd"]["autograd_cache_hit"]


@pytest.mark.parametrize("kind", ["frozen"])
def test_what_is_loaded_trains_like_one_process(kind: str, tmp_path: Path) -> None:
    # In the folder of all tests, where an earlier session has compiled the C++ code.
    results = run_ranks(_train_twice, kind, cache_folder(), tmp_path)
    assert all(hits for _, hits in results)
    assert_equal_training([differences for differences, _ in results])


class _Chosen(nn.Module):
    """Reads one of two layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.wide = nn.Linear(8, 64)
        self.chosen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x) if self.chosen == 2 else self.layers[self.chosen](x)


def _mismatch(error: BackendCompilerFailed) -> RankMismatchError:
    if not isinstance(error.inner_exception, RankMismatchError):
        raise error
    return error.inner_exception


def _choose(which: list[list[int]], folder: Path, tag: Path) -> tuple[str, int]:
    """Trains new models that read one layer after the other, as `which` says for each rank."""
    hits = 0
    with _new_keys(folder, tag):
        for chosen in which[dist.get_rank()]:
            torch._dynamo.reset()
            counters.clear()
            torch.manual_seed(0)
            model = _Chosen()
            model.chosen = chosen
            for layer in (*model.layers, model.wide):
                fully_shard(layer)
            fully_shard(model)
            try:
                loss_of(torch.compile(model, backend="fsdp")(torch.ones(4, 8))).backward()
            except BackendCompilerFailed as error:
                return str(_mismatch(error)), counters["aot_autograd"]["autograd_cache_hit"]
            hits += counters["aot_autograd"]["autograd_cache_hit"]
            dist.barrier()
    return "", hits


def test_ranks_that_load_other_graphs_are_told(shared: Path, tmp_path: Path) -> None:
    first = run_ranks(_choose, [[0, 2], [0, 2]], shared, tmp_path)
    assert all(text == "" for text, _ in first)
    assert sum(hits for _, hits in first) == 2, "one of two ranks compiles each, the other one loads"
    results = run_ranks(_choose, [[0], [2]], shared, tmp_path)
    assert [hits for _, hits in results] == [1, 1]
    assert all("compile different collectives" in text for text, _ in results), results
