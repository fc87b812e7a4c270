"""How many ranks of a group share a host, and what a launcher says of hosts."""

from __future__ import annotations

import pytest

from fsdp_compile.layout.hosts import GroupRanks, ranks_per_host


@pytest.mark.parametrize(
    ("group", "per_host", "together"),
    [
        (GroupRanks(64), 8, 8),
        (GroupRanks(8), 8, 8),
        (GroupRanks(4), 8, 4),
        (GroupRanks(8, stride=8), 8, 1),
        (GroupRanks(4, stride=4), 8, 2),
        (GroupRanks(4, stride=2), 8, 4),
        (GroupRanks(4, stride=16), 8, 1),
        (GroupRanks(6), 4, 2),  # four on one host, two on the other
        (GroupRanks(1), 8, 1),
    ],
)
def test_ranks_of_a_group_on_one_host(group: GroupRanks, per_host: int, together: int) -> None:
    assert group.on_one_host(per_host) == together


@pytest.mark.parametrize(
    ("ranks", "group"),
    [((0, 1, 2, 3), GroupRanks(4)), ((3, 11, 19), GroupRanks(3, 8)), ((5,), GroupRanks(1)), ((1, 0), GroupRanks(2))],
)
def test_the_stride_is_that_of_the_ranks(ranks: tuple[int, ...], group: GroupRanks) -> None:
    assert GroupRanks.of(ranks) == group


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": ""}, None),
        ({"LOCAL_WORLD_SIZE": "0"}, None),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}, 4),
        # Eight ranks on one host, four on the other: both say the same.
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "12", "GROUP_WORLD_SIZE": "2"}, 6),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "12", "GROUP_WORLD_SIZE": "2"}, 6),
    ],
)
def test_what_a_launcher_says(environment: dict[str, str], found: int | None) -> None:
    assert ranks_per_host(environment) == found
