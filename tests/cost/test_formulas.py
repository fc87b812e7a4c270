"""Formulas at known points, and with open symbols."""

from __future__ import annotations

import math

import pytest
import sympy

from fsdp_compile.cost.formulas import collective_us, full_sharding_bytes, roofline_us, share_of_others
from fsdp_compile.cost.hardware import DEVICES, LINKS, hardware, make_link
from fsdp_compile.errors import ConfigError


def test_a_roofline_is_the_slower_of_computing_and_moving() -> None:
    assert roofline_us(2e9, 1e6, 1e12, 1e12) == pytest.approx(2000.0)
    assert roofline_us(1e6, 3e9, 1e12, 1e12) == pytest.approx(3000.0)


def test_full_sharding_sends_six_bytes_per_parameter_in_bfloat16() -> None:
    # Gathered twice and reduced once, two bytes each: six times 1000, of which a rank holds an eighth itself.
    assert full_sharding_bytes(1000, 8, gathers=2, gathered_bytes=2, reduced_bytes=2) == 5250
    assert full_sharding_bytes(1000, 1, gathers=2, gathered_bytes=2, reduced_bytes=2) == 0


def test_a_collective_takes_latency_and_bytes_over_bandwidth() -> None:
    # 10 us + 5 us * log2(8) + 45 MB at 45 GB/s
    took = collective_us(45e6, 8, launch_us=10.0, hop_us=5.0, bytes_per_s=45e9)
    assert took == pytest.approx(10 + 15 + 1000)


def test_formulas_stay_open_in_world_size_and_bandwidth() -> None:
    ranks, rate = sympy.symbols("N gb_per_s", positive=True)
    link = make_link("open", rate, "unknown")
    size_bytes = 1e9
    open_us = link.formula_us(size_bytes * share_of_others(ranks), ranks, link.bytes_per_s)
    closed = hardware(link=50.0).link
    for n in (8, 8192):
        here = closed.formula_us(size_bytes * share_of_others(n), n, closed.bytes_per_s)
        assert float(open_us.subs({ranks: n, rate: 50})) == pytest.approx(here)
    assert roofline_us(ranks, 5.0, 1.0, 1.0).subs({ranks: 3}) == 5e6


def test_every_number_of_the_hardware_has_a_unit_and_a_source() -> None:
    devices, links = DEVICES.values(), (*LINKS.values(), *(device.near for device in DEVICES.values()))
    quantities = [quantity for device in devices for quantity in device.matmul.values()]
    quantities += [q for d in devices for q in (d.matmul_share, d.memory_rate, d.memory_share, d.memory)]
    quantities += [q for link in links for q in (link.rate, link.rate_share, link.launch, link.hop)]
    assert all(q.value > 0 and q.unit and q.source for q in quantities)
    assert "323 GB/s" in LINKS["ib-400"].rate_share.source


def test_unknown_hardware_is_refused_with_all_names() -> None:
    with pytest.raises(ConfigError, match=r"instead: one of .*h100-sxm"):
        hardware("h100")
    with pytest.raises(ConfigError, match="ib-400"):
        hardware(link="ib400")
    for nothing in (0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="GB/s"):
            hardware(link=nothing)
