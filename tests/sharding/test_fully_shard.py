"""`fully_shard` on models that share parts with others."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_compile import fully_shard
from tests.fake_world import fake_world


def test_a_parameter_of_another_sharded_model_is_shared() -> None:
    with fake_world(1):
        trunk, other = nn.Linear(4, 4), nn.Linear(4, 4)
        other.weight = trunk.weight
        fully_shard(nn.Sequential(trunk, nn.Linear(4, 2)))
        second = fully_shard(nn.Sequential(other, nn.Linear(4, 3)))
        assert other.weight is trunk.weight
        x = torch.ones(2, 4)
        expected = torch.nn.functional.linear(x, trunk.weight.to_local(), other.bias.to_local())  # type: ignore[attr-defined]
        assert torch.equal(other(x), expected)
        second(x).sum().backward()
        assert trunk.weight.grad is not None
