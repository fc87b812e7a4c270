"""Eight bits or four and a scale per block: the stated error bounds, measured, and training with them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import ConfigError, MixedPrecision, explain, fully_shard, units
from fsdp_compile.ir.graph import Role
from fsdp_compile.layout.wire_formats import ASKED
from fsdp_compile.ops.quantize import block_scales, dequantize, quantize
from tests import long
from tests.ranks import on_ranks
from tests.two_sides import WithOneProcess
from tests.verify.captured import World, capture

INT8, FP8 = torch.int8, torch.float8_e4m3fn
MX, FOUR = "mxfp8", "nvfp4"
BLOCK = 128
Asked = torch.dtype | str


def there_and_back(x: torch.Tensor, asked: Asked) -> torch.Tensor:
    sent = ASKED[asked].name
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


Bound = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""By the elements of blocks, and the largest of each block."""
BOUNDS: dict[Asked, list[tuple[Bound, float]]] = {
    INT8: [(lambda _, largest: largest / 254, 0.98)],
    FP8: [
        (lambda x, largest: torch.maximum(x.abs() / 16, largest / 2**18), 0.9),
        (lambda _, largest: largest / 28, 0.9),
    ],
    MX: [
        (lambda x, largest: torch.maximum(x.abs() / 16, largest / 2**17), 0.9),
        (lambda _, largest: largest / 14, 0.75),
    ],
    FOUR: [(lambda x, largest: largest * 17 / 96 + x.abs().max() / 2**18, 0.9)],
}
"""Of the error in each format, and what share of it some error is larger than."""


@pytest.mark.core
@pytest.mark.parametrize("asked", BOUNDS)
def test_errors_stay_within_their_bounds_and_come_close_to_them(asked: Asked) -> None:
    x = _samples().view(-1, ASKED[asked].block)
    if asked == FOUR:  # one scale for the whole shard
        x = x[(x.abs().amax(1) < 1e3) & (x.abs().amax(1) > 1e-6)]
        x = x[: len(x) // 16 * 16]
    error = (there_and_back(x.reshape(-1), asked).view_as(x) - x).abs()
    for bound, close in BOUNDS[asked]:
        allowed = bound(x, x.abs().amax(1, keepdim=True))
        assert (error <= allowed * (1 + 2**-15)).all()
        assert (error > close * allowed).any()


@pytest.mark.core
def test_scales_of_mxfp8_are_exponents_as_torch_reads_them() -> None:
    x = _samples()
    largest = x.view(-1, 32).abs().amax(1)
    scales = block_scales(x, MX)[: largest.numel()].view(torch.float8_e8m0fnu).float()
    assert (scales >= largest / 448).all(), "no element is beyond the largest number"
    assert (scales < 2 * largest / 448).all(), "and the next power of two is too small"
    elements = quantize(x, block_scales(x, MX), MX).view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(
        there_and_back(x, MX), (elements.view(-1, 32) * scales[:, None]).view(-1), rtol=0, atol=0
    )


@pytest.mark.core
def test_nvfp4_is_off_by_about_a_sixth_of_the_blocks_largest() -> None:
    x = _samples().view(-1, 16)
    x = x[(x.abs().amax(1) < 1e3) & (x.abs().amax(1) > 1e-6)]
    x = x[: len(x) // 16 * 16]
    largest = x.abs().amax(1, keepdim=True)
    error = (there_and_back(x.reshape(-1), FOUR).view(-1, 16) - x).abs()
    bound = (largest * 17 / 96 + x.abs().max() / 2**18) * (1 + 2**-15)
    assert (error <= bound).all()
    assert (error > 0.9 * bound).any()


def test_all_numbers_of_four_bits_arrive() -> None:
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    # 448 * 6 makes the scale of the shard 1, and 448 that of its block.
    x = torch.tensor([*numbers, *(-n for n in numbers), *([448 * 6.0] + [0.0] * 15)])
    assert torch.equal(there_and_back(x, FOUR), x)
    scales = block_scales(x, FOUR)
    assert scales[-4:].view(torch.float32).item() == 1.0
    assert scales[:2].view(torch.float8_e4m3fn).tolist() == [1.0, 448.0]
    low, high = quantize(x, scales, FOUR)[:8] & 15, quantize(x, scales, FOUR)[:8] >> 4
    assert torch.stack([low, high], 1).view(-1).tolist() == [*range(8), 0, *range(9, 16)]
    between = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, *([0.0] * 7), 6.0] + [448 * 6.0] + [0.0] * 15)
    assert there_and_back(between, FOUR)[:8].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -4.0], "ties go to even"


@pytest.mark.parametrize("sent", [INT8, FP8, MX])
def test_zeros_tiny_and_broken_blocks(sent: Asked) -> None:
    x = torch.randn(4, BLOCK)
    x[0] = 0.0
    x[1] *= 1e-38
    x[2, 7] = float("inf")
    x[3, 7] = float("nan")
    got = there_and_back(x.view(-1), sent).view(4, BLOCK)
    assert torch.equal(got[:2], torch.zeros(2, BLOCK))
    # Blocks of 32 are broken by themselves.
    broken = got.view(4, -1, ASKED[sent].block)[:, 0]
    assert broken[2:].isnan().all()


@pytest.mark.parametrize("broken", [float("inf"), float("nan")])
def test_one_number_that_is_none_breaks_a_shard_of_four_bits(broken: float) -> None:
    assert torch.equal(there_and_back(torch.zeros(BLOCK), FOUR), torch.zeros(BLOCK))
    assert torch.equal(there_and_back(torch.full((BLOCK,), 1e-38), FOUR), torch.zeros(BLOCK))
    x = torch.randn(BLOCK)
    x[:16] = 0.0
    assert torch.equal(there_and_back(x, FOUR)[:16], torch.zeros(16))
    x[100] = broken
    assert there_and_back(x, FOUR).isnan().all()


class Wide(nn.Module):
    """Two large weights, of which ranks have uneven rows, and small biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(96, 129)
        self.down = nn.Linear(129, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def as_sent(weight: torch.Tensor, sent: Asked, world: int) -> torch.Tensor:
    """The full weight as every rank gets it: each rank's rows by themselves, in blocks from the first element on."""
    rows = -(-weight.shape[0] // world)
    parts = []
    for part in weight.detach().split(rows):
        flat = part.new_zeros(-(-rows * weight.shape[1] // 256) * 256)
        flat[: part.numel()] = part.reshape(-1)
        parts.append(there_and_back(flat, sent)[: part.numel()].view(part.shape))
    return torch.cat(parts)


@pytest.mark.core
@long.parametrize("sent", [INT8, FP8, MX, FOUR], always=[INT8, FOUR])
@long.parametrize("lower", ["eager", "inductor"], always=["eager"])
@on_ranks()
def test_training_equals_quantizing_by_hand(sent: Asked, lower: str) -> None:
    sides = WithOneProcess(
        Wide,
        shard=functools.partial(fully_shard, mp_policy=MixedPrecision(gather_dtype=sent)),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),
        shape=96,
        rows=4,
        twice=False,
        lower=lower,
    )

    def quantized(batch: torch.Tensor) -> torch.Tensor:
        """The plain model with the weights as they are sent, whose gradients are those of the plain weights."""
        weights = {name: p for name, p in sides.reference.named_parameters() if p.dim() > 1}
        sent_as = {name: p + (as_sent(p, sent, dist.get_world_size()) - p).detach() for name, p in weights.items()}
        output: torch.Tensor = torch.func.functional_call(sides.reference, sent_as, batch)
        return output

    sides.train(other=quantized, steps=4)


@on_ranks()
def test_uncompiled_forwards_gather_as_fsdp2_does() -> None:
    torch.manual_seed(0)
    model = Wide()
    wanted = model.up.weight.detach().clone()
    fully_shard(model, mp_policy=MixedPrecision(gather_dtype=INT8))
    seen: list[torch.Tensor] = []
    model.up.register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
    model(torch.ones(2, 96))
    torch.testing.assert_close(seen[0], wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("asked", "up", "down", "scales", "biases"),
    [
        # Rows of one rank, up to a multiple of 128 elements; 49 scales of 4 bytes, too.
        (INT8, 65 * 96 + 32, 48 * 129 + 80, 256, 2 * 128),
        # Both up to a multiple of 256 elements, which are 128 bytes; 400 scales and a float32.
        (FOUR, 6400 // 2, 6400 // 2, 512, 2 * 256),
    ],
)
def test_the_wire_has_bytes_and_scales(asked: Asked, up: int, down: int, scales: int, biases: int) -> None:
    policy = MixedPrecision(torch.bfloat16, gather_dtype=asked)
    forward, _ = capture(Wide, [torch.ones(4, 96)], World(2, policy=policy))
    sent: dict[tuple[str, ...], list[tuple[torch.dtype, int]]] = {}
    for gather in forward.nodes(Role.GATHER):
        for message in gather.all_input_nodes:
            value = message.meta["val"]
            sent.setdefault(message.meta["fsdp"].parameters, []).append((value.dtype, value.numel()))
    assert sent == {
        ("up.weight",): [(torch.uint8, up), (torch.uint8, scales)],
        ("down.weight",): [(torch.uint8, down), (torch.uint8, scales)],
        ("up.bias", "down.bias"): [(torch.bfloat16, biases)],
    }


def test_explain_counts_the_bytes_that_travel() -> None:
    def sent_bytes(policy: MixedPrecision) -> float:
        plan = explain(Wide(), torch.ones(4, 96), world_size=2, options={"mp_policy": policy})
        return sum(c.sent_bytes for graph in plan.graphs for c in graph.collectives if c.kind.value == "all-gather")

    plain = sent_bytes(MixedPrecision(torch.bfloat16))
    assert 0.5 < sent_bytes(MixedPrecision(torch.bfloat16, gather_dtype=INT8)) / plain < 0.56
    assert 0.28 < sent_bytes(MixedPrecision(torch.bfloat16, gather_dtype=FOUR)) / plain < 0.36


@pytest.mark.parametrize("asked", [torch.int16, "int8", "mxfp4"])
def test_other_formats_are_refused(asked: Asked) -> None:
    with pytest.raises(ConfigError, match=r"one of torch.int8, torch.float8_e4m3fn, 'mxfp8', 'nvfp4', or None"):
        MixedPrecision(gather_dtype=asked)


@on_ranks(world_size=1)
def test_one_rank_sends_nothing_and_rounds_nothing() -> None:
    model = fully_shard(Wide(), mp_policy=MixedPrecision(gather_dtype=INT8))
    assert all(not slot.spec.gather_format for unit in units(model) for group in unit.groups for slot in group.params)
