"""Eight bits and a scale per block: the stated error bounds, measured, and training with them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, MixedPrecision, explain, fully_shard, units
from fsdp_compile.ir.graph import Role
from fsdp_compile.ops.quantize import block_scales, dequantize, quantize
from tests import long
from tests.ranks import run_ranks
from tests.verify.captured import World, capture

INT8, FP8 = torch.int8, torch.float8_e4m3fn
BLOCK = 128


def there_and_back(x: torch.Tensor, sent: torch.dtype) -> torch.Tensor:
    scales = block_scales(x, sent)
    return dequantize(quantize(x, scales, sent), scales, sent, 1, torch.float32)


def _samples() -> torch.Tensor:
    """Blocks of many magnitudes: normal ones, ones with an outlier, tiny and huge ones, and every step of a line."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(400, BLOCK, generator=generator)
    outlier = torch.randn(400, BLOCK, generator=generator) * 1e-3
    outlier[:, 5] = 7.0
    scaled = torch.randn(40, BLOCK, generator=generator) * torch.logspace(-30, 30, 40)[:, None]
    line = torch.linspace(-1, 1, 400 * BLOCK).view(BLOCK, 400).t().contiguous()
    return torch.cat([normal, outlier, scaled, line]).view(-1)


@pytest.mark.core
def test_int8_is_off_by_at_most_a_254th_of_the_blocks_largest() -> None:
    x = _samples()
    error = (there_and_back(x, INT8) - x).abs().view(-1, BLOCK).amax(1)
    bound = x.view(-1, BLOCK).abs().amax(1) / 254
    assert (error <= bound * (1 + 2**-15)).all()
    assert (error > 0.98 * bound).any(), "and it comes that close to it"


@pytest.mark.core
def test_float8_is_off_by_at_most_a_16th_of_the_element() -> None:
    x = _samples().view(-1, BLOCK)
    largest = x.abs().amax(1, keepdim=True)
    error = (there_and_back(x.view(-1), FP8).view(-1, BLOCK) - x).abs()
    bound = torch.maximum(x.abs() / 16, largest / 2**18) * (1 + 2**-15)
    assert (error <= bound).all()
    assert (error <= largest / 28 * (1 + 2**-15)).all()
    assert (error > 0.9 * bound).any()
    assert (error > 0.9 * largest / 28).any()


@pytest.mark.parametrize("sent", [INT8, FP8])
def test_zeros_tiny_and_broken_blocks(sent: torch.dtype) -> None:
    x = torch.randn(4, BLOCK)
    x[0] = 0.0
    x[1] *= 1e-38
    x[2, 7] = float("inf")
    x[3, 7] = float("nan")
    got = there_and_back(x.view(-1), sent).view(4, BLOCK)
    assert torch.equal(got[:2], torch.zeros(2, BLOCK))
    assert got[2:].isnan().all()


class Wide(nn.Module):
    """Two large weights, of which ranks have uneven rows, and small biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(96, 129)
        self.down = nn.Linear(129, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def as_sent(weight: torch.Tensor, sent: torch.dtype, world: int) -> torch.Tensor:
    """The full weight as every rank gets it: each rank's rows by themselves, in blocks from the first element on."""
    rows = -(-weight.shape[0] // world)
    parts = []
    for part in weight.detach().split(rows):
        flat = part.new_zeros(-(-rows * weight.shape[1] // BLOCK) * BLOCK)
        flat[: part.numel()] = part.reshape(-1)
        parts.append(there_and_back(flat, sent)[: part.numel()].view(part.shape))
    return torch.cat(parts)


def _train(sent: torch.dtype, lower: str) -> float:
    """Largest difference of losses and gradients from one process that quantizes by hand."""
    torch.manual_seed(0)
    model = Wide()
    reference = copy.deepcopy(model)
    fully_shard(model, mp_policy=MixedPrecision(gather_dtype=sent))
    compiled = torch.compile(model, backend="fsdp", options={"lower": lower})
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference))
    world, rank = dist.get_world_size(), dist.get_rank()
    worst = 0.0
    losses = []
    for step in range(4):
        batch = torch.randn(4 * world, 96, generator=torch.Generator().manual_seed(step % 2))
        loss = compiled(batch.chunk(world)[rank]).square().mean()
        loss.backward()
        low = copy.deepcopy(reference)
        with torch.no_grad():
            for layer in (low.up, low.down):
                layer.weight.copy_(as_sent(layer.weight, sent, world))
        reference_loss = sum((low(chunk).square().mean() for chunk in batch.chunk(world)), torch.zeros(())) / world
        reference_loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        worst = max(worst, abs(total.item() / world - reference_loss.item()))
        losses.append(total.item())
        for mine, theirs, source in zip(model.parameters(), reference.parameters(), low.parameters(), strict=True):
            theirs.grad = source.grad
            assert isinstance(mine.grad, DTensor)
            assert source.grad is not None
            worst = max(worst, (mine.grad.full_tensor() - source.grad).abs().max().item())
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    assert losses[-1] < losses[0], "it learns"
    return worst


@pytest.mark.core
@long.parametrize("sent", [INT8, FP8], always=[INT8])
def test_training_equals_quantizing_by_hand(sent: torch.dtype) -> None:
    assert max(run_ranks(_train, sent, "eager")) < 1e-5


@pytest.mark.long
def test_under_inductor() -> None:
    assert max(run_ranks(_train, INT8, "inductor")) < 1e-5


def _eager_read(sent: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Wide()
    wanted = as_sent(model.up.weight, sent, dist.get_world_size())
    bias = model.up.bias.detach().clone()
    fully_shard(model, mp_policy=MixedPrecision(gather_dtype=sent))
    seen: dict[str, object] = {}

    def note(module: nn.Module, *_: object) -> None:
        seen.update(weight=module.weight, bias=module.bias)

    model.up.register_forward_hook(note)
    model(torch.ones(2, 96))
    torch.testing.assert_close(seen["weight"], wanted, rtol=0, atol=0)
    torch.testing.assert_close(seen["bias"], bias, rtol=0, atol=0, msg="small parameters are exact")


@long.parametrize("sent", [INT8, FP8], always=[FP8])
def test_reads_outside_of_graphs_get_the_same_values(sent: torch.dtype) -> None:
    run_ranks(_eager_read, sent)


def test_the_wire_has_bytes_and_scales() -> None:
    policy = MixedPrecision(torch.bfloat16, gather_dtype=INT8)
    forward, _ = capture(Wide, [torch.ones(4, 96)], World(2, policy=policy))
    sent: dict[tuple[str, ...], list[tuple[torch.dtype, int]]] = {}
    for gather in forward.nodes(Role.GATHER):
        for message in gather.all_input_nodes:
            value = message.meta["val"]
            sent.setdefault(message.meta["fsdp"].parameters, []).append((value.dtype, value.numel()))
    up, down = 65 * 96 + 32, 48 * 129 + 80  # rows of one rank, up to a multiple of 128 elements
    assert sent == {
        ("up.weight",): [(torch.uint8, up), (torch.uint8, 256)],  # 49 scales of 4 bytes, up to a multiple of 128
        ("down.weight",): [(torch.uint8, down), (torch.uint8, 256)],
        ("up.bias", "down.bias"): [(torch.bfloat16, 2 * 128)],
    }


def test_explain_counts_the_bytes_that_travel() -> None:
    def sent_bytes(policy: MixedPrecision) -> float:
        plan = explain(Wide(), torch.ones(4, 96), world_size=2, options={"mp_policy": policy})
        return sum(c.sent_bytes for graph in plan.graphs for c in graph.collectives if c.kind.value == "all-gather")

    narrow = sent_bytes(MixedPrecision(torch.bfloat16, gather_dtype=INT8))
    plain = sent_bytes(MixedPrecision(torch.bfloat16))
    assert 0.5 < narrow / plain < 0.56


def test_a_dtype_of_other_width_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gather_dtype is torch.int16(.|\n)*torch.int8, torch.float8_e4m3fn"):
        MixedPrecision(gather_dtype=torch.int16)


def _alone() -> None:
    model = fully_shard(Wide(), mp_policy=MixedPrecision(gather_dtype=INT8))
    assert all(slot.spec.gather_dtype is None for unit in units(model) for slot in unit.params)


def test_one_rank_sends_nothing_and_rounds_nothing() -> None:
    run_ranks(_alone, world_size=1)
