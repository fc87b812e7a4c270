"""An emulated network: what its links cost, and groups that return what ranks with equal tensors would."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fsdp_compile
from benchmarks.network.clock import VirtualClock
from benchmarks.network.emulated import Lanes, Network, emulated_world
from benchmarks.network.traffic import Kind, full_sharding_bytes, sent_bytes
from benchmarks.network.wire import Link, Wire

RANKS = 8
WIDTH = 256
FAST = Network(Link(bytes_per_s=1e15))
functional = torch.ops._c10d_functional


def _world_name() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


def _fsdp2(model: nn.Sequential) -> Any:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def _fsdp1(model: nn.Sequential) -> nn.Module:
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)


def _ours(model: nn.Sequential) -> Any:
    return torch.compile(model, backend="fsdp", options={"lower": "eager"})


def _step(model: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(1)
    model(torch.randn(4, WIDTH)).square().mean().backward()


@pytest.mark.core
def test_collectives_return_what_ranks_with_equal_tensors_would() -> None:
    with emulated_world(RANKS, FAST):
        gathered = functional.all_gather_into_tensor_coalesced([torch.arange(3.0)], RANKS, _world_name())
        assert torch.equal(functional.wait_tensor(gathered[0]), torch.arange(3.0).repeat(RANKS))
        whole = torch.arange(16.0)
        for op, factor in (("avg", 1), ("sum", RANKS)):
            one = functional.reduce_scatter_tensor(whole, op, RANKS, _world_name())
            assert torch.equal(functional.wait_tensor(one), whole[:2] * factor)
            (grouped,) = functional.reduce_scatter_tensor_coalesced([whole], op, RANKS, _world_name())
            assert torch.equal(functional.wait_tensor(grouped), whole[:2] * factor)
            reduced = functional.all_reduce(whole, op, _world_name())
            assert torch.equal(functional.wait_tensor(reduced), whole * factor)
        in_place = torch.zeros(RANKS)
        in_place[0] = 3
        dist.all_gather_into_tensor(in_place, in_place[:1])
        assert torch.equal(in_place, torch.full((RANKS,), 3.0))


def test_an_exchange_returns_what_this_rank_sends_to_itself() -> None:
    with emulated_world(2, FAST) as world:
        output = torch.full((5,), 9.0)
        dist.all_to_all_single(output, torch.arange(6.0), [2, 3], [2, 4])
        assert torch.equal(output, torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]))
        assert world.traffic.sent == {Kind.ALL_TO_ALL: 6 * 4 / 2}
        output = torch.empty(4)
        dist.all_to_all_single(output, torch.arange(4.0))
        assert torch.equal(output, torch.tensor([0.0, 1.0, 0.0, 1.0]))


@pytest.mark.core
def test_time_passes_while_computing_and_is_waited_for() -> None:
    clock = VirtualClock()
    with emulated_world(RANKS, Network(Link(bytes_per_s=1e6, latency_s=0.5)), clock=clock):
        tensor = torch.ones(250_000)  # 2 * 1 MB * 7/8 are sent
        work = dist.all_reduce(tensor, async_op=True)
        clock.compute(2.0)
        assert not work.is_completed()
        work.wait()
        assert clock.now_s() == pytest.approx(0.5 + 1.75)
        work = dist.all_reduce(tensor, async_op=True)
        clock.compute(3.0)
        work.wait()  # hidden
        assert clock.now_s() == pytest.approx(2.25 + 3.0)


@pytest.mark.parametrize(("lanes", "end_s"), [(Lanes.ONE, 1.0), (Lanes.PER_GROUP, 2.0)])
def test_two_groups_take_turns_or_share(lanes: Lanes, end_s: float) -> None:
    clock = VirtualClock()
    network = Network(Link(bytes_per_s=1.75e6), lanes=lanes)
    with emulated_world(RANKS, network, clock=clock):
        other = dist.new_group(list(range(RANKS)))
        first = dist.all_reduce(torch.ones(250_000), async_op=True)
        second = dist.all_reduce(torch.ones(250_000), group=other, async_op=True)
        first.wait()
        assert clock.now_s() == pytest.approx(end_s)
        second.wait()
        assert clock.now_s() == pytest.approx(2.0)


def test_groups_inside_a_node_use_its_link() -> None:
    clock = VirtualClock()
    slow, quick = Link(bytes_per_s=1e6), Link(bytes_per_s=4e6)
    with emulated_world(RANKS, Network(slow, node=quick, ranks_per_node=4), clock=clock) as world:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        clock_at_start = clock.now_s()
        dist.all_gather_into_tensor(torch.empty(1_000_000), torch.ones(250_000), group=mesh.get_group("shard"))
        assert clock.now_s() - clock_at_start == pytest.approx(3e6 / 4e6)
        clock_at_start = clock.now_s()
        dist.all_reduce(torch.ones(250_000), group=mesh.get_group("replicate"))
        assert clock.now_s() - clock_at_start == pytest.approx(1e6 / 1e6)
        assert (world.traffic.node_bytes, world.traffic.total_bytes) == (3e6, 4e6)
        world.reset()
        assert world.traffic.node_bytes == 0.0


def test_links_can_be_changed() -> None:
    clock = VirtualClock()

    def seconds(call: Callable[[], object]) -> float:
        before_s = clock.now_s()
        call()
        return clock.now_s() - before_s

    with emulated_world(2, Network(Link(1e15), node=Link(1e15), ranks_per_node=2), clock=clock) as world:
        world.change(Link(1e15), node=Link(bytes_per_s=2e6))
        assert seconds(lambda: dist.all_reduce(torch.ones(250_000))) == pytest.approx(1e6 / 2e6)
        world.change(Link(1e15))
        assert seconds(lambda: dist.all_reduce(torch.ones(250_000))) == pytest.approx(1e6 / 2e6)
    with emulated_world(RANKS, FAST, clock=clock) as world:
        dist.all_reduce(torch.ones(250_000))
        world.reset()
        world.change(Link(bytes_per_s=1e6))
        gather = lambda: dist.all_gather_into_tensor(torch.empty(2_000_000), torch.ones(250_000))  # noqa: E731
        assert seconds(gather) == pytest.approx(7.0)
        assert [kind for kind, _ in world.traffic.order] == [Kind.ALL_GATHER]
        with pytest.raises(ValueError, match="without a link inside of nodes"):
            world.change(Link(1e15), node=Link(1e15))


@pytest.mark.core
@pytest.mark.parametrize("make", [_fsdp2, _fsdp1, _ours])
def test_full_sharding_gathers_and_reduces(make: Callable[[nn.Sequential], nn.Module]) -> None:
    with emulated_world(RANKS, FAST) as world:
        model = make(_model())
        world.reset()
        _step(model)
        size_bytes = 3 * WIDTH * WIDTH * 4
        gathered = sent_bytes(Kind.ALL_GATHER, size_bytes, RANKS)
        # The first weight's value is in no gradient: a compiled backward does not gather it again.
        assert gathered * 5 / 3 <= world.traffic.sent[Kind.ALL_GATHER] <= gathered * 2
        assert world.traffic.sent[Kind.REDUCE_SCATTER] == pytest.approx(size_bytes * 7 / 8)
        assert world.traffic.total_bytes <= full_sharding_bytes(size_bytes, RANKS)


def test_data_parallel_gradients_are_those_of_one_process() -> None:
    reference = _model()
    model = copy.deepcopy(reference)
    _step(reference)
    with emulated_world(RANKS, FAST) as world:
        parallel = DistributedDataParallel(model)
        world.reset()
        _step(parallel)
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)
        assert world.traffic.sent[Kind.ALL_REDUCE] == pytest.approx(2 * 3 * WIDTH * WIDTH * 4 * 7 / 8)


def test_gradients_of_a_sharded_model_are_this_ranks_part() -> None:
    reference = _model()
    # Rank 0's rows everywhere, as the emulated gathers will have it.
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter[: WIDTH // RANKS].repeat(RANKS, 1))
    model = copy.deepcopy(reference)
    _step(reference)
    with emulated_world(RANKS, FAST):
        fsdp_compile.fully_shard(model)
        _step(_ours(model))
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert parameter.grad is not None
            assert expected.grad is not None
            local = parameter.grad.to_local()  # type: ignore[attr-defined]
            torch.testing.assert_close(local, expected.grad[: WIDTH // RANKS])


def test_errors_reach_the_waiter() -> None:
    with emulated_world(RANKS, FAST):
        with pytest.raises(RuntimeError, match=r"shape|size|view"):
            dist.all_gather_into_tensor(torch.empty(15), torch.ones(2))
        with pytest.raises(NotImplementedError, match="PRODUCT"):
            dist.all_reduce(torch.ones(2), op=dist.ReduceOp.PRODUCT)


@pytest.mark.parametrize(
    ("latency_s", "transfers", "ends_s"),
    [
        pytest.param(0.5, [("a", 200, 1.0)], [1.0 + 0.5 + 2.0], id="latency and bytes"),
        pytest.param(0.5, [("a", 200, 0.0), ("a", 100, 1.0), ("a", 100, 10.0)], [2.5, 4.0, 11.5], id="a queue"),
        # Half the rate each until the short one ends; then 150 bytes of the long one are left at the full rate.
        pytest.param(0.0, [("a", 200, 0.0), ("b", 50, 0.0)], [2.5, 1.0], id="two lanes share"),
        # The second starts to send when the first has ended.
        pytest.param(1.0, [("a", 100, 0.0), ("b", 100, 1.0)], [2.0, 3.0], id="latency leaves the bandwidth"),
        pytest.param(0.0, [("a", 100, 0.0), ("b", 100, 0.5)], [1.5, 2.0], id="a later one delays an earlier one"),
    ],
)
def test_times_of_transfers(latency_s: float, transfers: list[tuple[str, float, float]], ends_s: list[float]) -> None:
    wire = Wire(Link(bytes_per_s=100.0, latency_s=latency_s))
    made = []
    for lane, size, now_s in transfers:
        made.append(wire.submit(lane, size, now_s))
        assert wire.end_s(made[-1]) <= ends_s[len(made) - 1] + 1e-9  # as far as it is known; asking changes nothing
    assert [wire.end_s(transfer) for transfer in made] == pytest.approx(ends_s)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1000), st.integers(0, 5)), min_size=1, max_size=12),
)
def test_lanes_never_send_more_than_the_bandwidth(transfers: list[tuple[str, int, int]]) -> None:
    wire = Wire(Link(bytes_per_s=100.0))
    now_s = 0.0
    made = []
    for lane, size_bytes, pause_s in transfers:
        now_s += pause_s
        made.append((lane, wire.submit(lane, float(size_bytes), now_s)))
    ends = [wire.end_s(transfer) for _, transfer in made]
    # Work is conserved: with everything there from some point on, the last ends when all bytes have passed.
    assert max(ends) >= sum(size for _, size, _ in transfers) / 100.0 - 1e-9
    for lane in "abc":
        of_lane = [end for (name, _), end in zip(made, ends, strict=True) if name == lane]
        assert of_lane == sorted(of_lane)


def test_a_network_without_bandwidth_limit_costs_latency_only() -> None:
    wire = Wire(Link(bytes_per_s=math.inf, latency_s=0.25))
    assert wire.end_s(wire.submit("a", 1e12, now_s=0.0)) == pytest.approx(0.25)


@pytest.mark.parametrize(("bytes_per_s", "latency_s"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -1.0), (math.nan, 0.0)])
def test_impossible_links_are_refused(bytes_per_s: float, latency_s: float) -> None:
    with pytest.raises(ValueError, match="bandwidth above 0"):
        Link(bytes_per_s, latency_s)
