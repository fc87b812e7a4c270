"""`fully_shard` on models that share parts with others."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_compile import fully_shard, units
from tests.fake_world import fake_world


def test_a_parameter_of_another_sharded_model_is_shared() -> None:
    with fake_world(1):
        trunk = nn.Linear(4, 4)
        first = fully_shard(nn.Sequential(trunk, nn.Linear(4, 2)))
        second = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        other = nn.Linear(4, 4)
        other.weight = trunk.weight  # a sharded parameter in a module of its own
        second[0] = other
        fully_shard(second)
        assert other.weight is trunk.weight
        x = torch.ones(2, 4)
        expected = torch.nn.functional.linear(x, trunk.weight.to_local(), other.bias.to_local())  # type: ignore[attr-defined]
        assert torch.equal(other(x), expected)
        second(x).sum().backward()
        assert trunk.weight.grad is not None
        assert [unit.title for unit in units(first)] == ["(root)"]
