"""Which link the collectives of a group are sent on, and how fast it is for them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fsdp_compile.cost.hardware import DEVICES, MeasuredCollective, device_reported_as, hardware
from fsdp_compile.errors import ConfigError
from fsdp_compile.layout.hosts import GroupRanks

H100 = hardware("h100-sxm", "ib-400", ranks_per_host=8)


@pytest.mark.core
@pytest.mark.parametrize(
    ("group", "link", "gb_per_s"),
    [
        pytest.param(GroupRanks(8), "nvlink4", 405.0, id="a host"),
        pytest.param(GroupRanks(4), "nvlink4", 405.0, id="half a host"),
        pytest.param(GroupRanks(4, stride=2), "nvlink4", 405.0, id="beside tensor parallelism on a host"),
        # Reported: 323 GB/s bus bandwidth on 4 hosts of 8 H100, with a port of 400 Gb/s for each of them.
        pytest.param(GroupRanks(32), "ib-400", 323.0, id="four hosts"),
        pytest.param(GroupRanks(8, stride=8), "ib-400", 323.0 / 8, id="replicas, a rank on each host"),
        pytest.param(GroupRanks(16, stride=4), "ib-400", 323.0 / 4, id="two ranks on each host"),
    ],
)
def test_a_group_inside_a_host_takes_its_link_and_a_ring_over_hosts_all_ports_of_its_ranks(
    group: GroupRanks, link: str, gb_per_s: float
) -> None:
    assert H100.link_of(group).name == link
    assert H100.bytes_per_s(group) == pytest.approx(gb_per_s * 1e9)
    latency_us = 10.0 + 5.0 * {4: 2, 8: 3, 16: 4, 32: 5}[group.size]
    assert H100.collective_us("all-gather", 1e9, group) == pytest.approx(latency_us + 1e6 / gb_per_s)


def test_groups_share_the_one_port_of_a_host() -> None:
    there = hardware("cpu", "ethernet-10", ranks_per_host=4)
    whole = there.bytes_per_s(GroupRanks(16))
    assert whole == there.link.bytes_per_s
    assert there.bytes_per_s(GroupRanks(4, stride=4)) == whole / 4
    assert there.link_of(GroupRanks(4)) == there.device.near


def test_a_ring_over_hosts_is_no_faster_than_inside_of_them() -> None:
    cards = hardware("h100-pcie", "ib-400", ranks_per_host=8)
    assert cards.bytes_per_s(GroupRanks(16)) == cards.bytes_per_s(GroupRanks(8)) == 0.9 * 64e9
    assert cards.bytes_per_s(GroupRanks(2, stride=8)) == cards.link.bytes_per_s  # passes no other rank of its host


def test_a_number_is_what_each_rank_of_any_group_has() -> None:
    given = hardware("h100-sxm", 50.0, ranks_per_host=8)
    for group in (GroupRanks(8), GroupRanks(64), GroupRanks(8, stride=8)):
        assert given.link_of(group) is given.link
        assert given.bytes_per_s(group) == 0.9 * 50e9


def test_hosts_are_as_given_or_as_launched_or_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert hardware().local_size == 8
    assert hardware("gh200").local_size == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert hardware().local_size == 2
    assert hardware().link_of(GroupRanks(4)).name == "ib-400"
    assert hardware(ranks_per_host=4).link_of(GroupRanks(4)).name == "nvlink4"
    # Devices that happen to be visible do not count.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert hardware().link_of(GroupRanks(4)).name == "ib-400"
    with pytest.raises(ConfigError, match="0 ranks"):
        hardware(ranks_per_host=0)


def test_measured_times_count_for_groups_that_are_spread_alike() -> None:
    tables = tuple(
        MeasuredCollective("all-gather", 4, ((0.0, us), (1e9, 2 * us)), on_one_host=together)
        for together, us in ((2, 100.0), (1, 300.0))
    )
    there = dataclasses.replace(H100, link=dataclasses.replace(H100.link, measured=tables), ranks_per_host=2)
    assert there.collective_us("all-gather", 0.0, GroupRanks(4)) == 100.0
    assert there.collective_us("all-gather", 0.0, GroupRanks(4, stride=2)) == 300.0
    assert there.collective_us("all-gather", 0.0, GroupRanks(8)) == 10.0 + 5.0 * 3


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm"),
        ("something else", "h100-sxm"),
    ],
)
def test_devices_are_known_by_what_cuda_calls_them(reported: str, name: str) -> None:
    assert device_reported_as(reported).name == name


def test_float32_matmuls_take_tf32_where_torch_may_round_to_it() -> None:
    device = DEVICES["h100-sxm"]
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert device.flops_per_s(torch.float32) == pytest.approx(0.7 * 66.9e12)
        torch.set_float32_matmul_precision("high")
        assert device.flops_per_s(torch.float32) == pytest.approx(0.7 * 494.7e12)
        assert device.flops_per_s(torch.float64) == pytest.approx(0.7 * 66.9e12)
        assert DEVICES["cpu"].flops_per_s(torch.float32) == pytest.approx(0.7 * 0.1e12)
    finally:
        torch.set_float32_matmul_precision(before)


def test_8_bit_matmuls_take_twice_the_rate_of_16_bit_ones() -> None:
    for device in DEVICES.values():
        eight = device.matmul.get(torch.float8_e4m3fn)
        assert (eight is None) == (device.name in ("a100-sxm", "cpu"))
        if eight is not None:
            assert eight.value == pytest.approx(2 * device.matmul[torch.bfloat16].value, rel=1e-3)


def test_a_blackwell_host_has_its_own_near_link() -> None:
    assert hardware("b200", "ib-400", ranks_per_host=8).link_of(GroupRanks(8)).name == "nvlink5"
