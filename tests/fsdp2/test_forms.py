"""Which models are compiled block by block if no option says it, and which as a whole, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_compile
from fsdp_compile.capture.forms import LIKE_UNITS, choose_form
from fsdp_compile.errors import ConfigError
from tests.fsdp2.decoder import (
    WIDTH,
    Block,
    Decoder,
    batch,
    cross_entropy,
    gathered_by_hooks,
    pair_of,
    progress_lines,
    shard,
    shard_lists,
    through_a_function,
)
from tests.ranks import on_ranks
from tests.two_sides import compile_eagerly, compile_in_place, made, shard_blocks, taken_over

pytestmark = pytest.mark.core


class _Many(Decoder):
    def __init__(self, number: int = LIKE_UNITS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.block() for _ in range(number)])


class _Unlike(_Many):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[::2]:
            block.a.bias = None  # type: ignore[union-attr]


class _Layers(nn.Module):
    """Layers without parts, behind each of which Python computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LIKE_UNITS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def _prefetch_lists(model: Any) -> None:
    shard(model)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])


def _hook_of_root(model: Any) -> None:
    shard(model)
    fsdp_compile.register_comm_hook(model, lambda *_: None)


def _in_8_bits(model: Any) -> None:
    model.table = nn.Parameter(torch.zeros(256, 256))
    policy = fsdp_compile.MixedPrecision(gather_dtype=torch.int8)
    shard_blocks(model, mp_policy=policy)


BLOCKS = f"block by block: {LIKE_UNITS} units of Block"
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object], str]] = {
    "deep": (_Many, shard, BLOCKS),
    "deep, of our own call": (_Many, fsdp_compile.fully_shard, BLOCKS),
    "shallow": (lambda: _Many(LIKE_UNITS - 1), shard, "whole: it has fewer than 12 like units"),
    "unlike": (_Unlike, shard, "whole: it has fewer than 12 like units"),
    "layers": (_Layers, fsdp_compile.fully_shard, "whole: it has fewer than 12 like units"),
    "not sharded": (_Many, id, "whole: it has fewer than 12 like units"),
    "a unit of two modules": (_Many, shard_lists, "whole: unit norm+head has several modules"),
    "lists": (_Many, _prefetch_lists, "whole: unit blocks.0 has lists of what to prefetch"),
    "open": (
        _Many,
        lambda model: fsdp_compile.fully_shard(model, reshard_after_forward="auto"),
        BLOCKS,
    ),
    "8 bits in the root": (_Many, _in_8_bits, "whole: unit (root) is in no block, and has a gather_dtype"),
    "a hook of the root": (_Many, _hook_of_root, "whole: unit (root) is in no block, and has a gather_dtype or a comm"),
}
COMPILES: list[tuple[dict[str, Any], str]] = [
    ({"regions": "whole"}, "whole: options={'regions': 'whole'}"),
    ({"regions": "blocks"}, "block by block: options={'regions': 'blocks'}"),
    ({"memory_budget_gb": 1.0}, "whole: options={'memory_budget_gb': ...}"),
    ({"bucket_mb": 1}, "whole: options={'bucket_mb': ...}"),
    ({"artifacts": "folder"}, "whole: options={'artifacts': ...}"),
    ({"poison": True}, "whole: options={'poison': ...}"),
    ({"stop_after": "bucket"}, "whole: options={'stop_after': ...}"),
    ({"embedding": "sharded"}, BLOCKS),
    ({"prefetch": 2}, BLOCKS),
    ({"inductor": {"triton.cudagraphs": True}}, "whole: a CUDA graph"),
]


def _form(model: nn.Module, **how: Any) -> str:
    compiled: Any = torch.compile(model, backend="fsdp", **how)
    blocks, why = choose_form(compiled)
    return f"{'block by block' if blocks else 'as a whole'}: {why}"


@on_ranks()
def test_the_form_and_why() -> None:
    for name, (make, prepare, wanted) in MODELS.items():
        model = made(make)
        prepare(model)
        assert wanted in _form(model), name
    deep = made(_Many)
    shard(deep)
    for options, wanted in COMPILES:
        assert wanted in _form(deep, options=options), options
    assert "fullgraph" in _form(deep, fullgraph=True)
    assert "CUDA graph" in _form(deep, mode="reduce-overhead")
    table_in_root = made(_Many)
    shard_blocks(table_in_root, fully_shard)
    assert "a table that is in no block" in _form(table_in_root, options={"embedding": "sharded"})
    undivided = made(_Many)
    fully_shard(undivided)
    with pytest.raises(ConfigError, match="no unit below its root"):
        _form(undivided, options={"regions": "blocks"})


def _regions(model: nn.Module) -> set[int]:
    return {region.number for unit in taken_over(model).units for region in unit.compiled_regions.values()}


@on_ranks()
def test_a_deep_model_is_compiled_block_by_block() -> None:
    pair = pair_of(_Many)
    with progress_lines() as lines:
        pair.compiled(fullgraph=False)
        pair.train(steps=2)
    assert _regions(pair.model) == {0, 1, 2}
    said = [line for line in lines if " is compiled " in line]
    assert said == ([] if dist.get_rank() else [f"_Many is compiled {BLOCKS} are like one another"])


class _Numbered(Block):
    number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / (1 + self.number)


class _ManyNumbered(_Many):
    block = _Numbered

    def __init__(self) -> None:
        super().__init__(20)
        for number, block in enumerate(self.blocks):
            block.number = number  # type: ignore[assignment]


@pytest.mark.long
@on_ranks()
def test_blocks_whose_code_reads_their_number_are_all_compiled() -> None:
    """Dynamo would leave those past its limit of graphs for one code to Python."""
    pair = pair_of(_ManyNumbered)
    with gathered_by_hooks() as titles:
        pair.train(pair.compiled(fullgraph=False), steps=2)
    assert set(titles) == {"(root)"}


@on_ranks()
def test_a_deep_plain_model() -> None:
    model = made(_Many)
    call = compile_eagerly(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        cross_entropy(call, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert _regions(model) == {0, 1, 2}
    assert not all(torch.equal(old, new.full_tensor()) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.long
@on_ranks()
def test_functions_and_compiles_in_place_are_whole() -> None:
    in_place = pair_of(_Many)
    compile_in_place(in_place.model)
    in_place.train(steps=1)
    assert _regions(in_place.model) == {0}

    pair = pair_of(_Many)
    pair.train(steps=1, loss=through_a_function(pair)[1])
    assert _regions(pair.model) == {0}


@pytest.mark.long
@on_ranks()
def test_both_forms_of_one_model() -> None:
    """One model in both forms: its blocks stay compiled, and graphs of the whole read through them."""
    pair = pair_of(_Many)
    model = pair.model
    call = pair.compiled(fullgraph=False)
    pair.train(steps=1)
    _, loss = through_a_function(pair)
    whole = compile_eagerly(model, regions="whole", fullgraph=True)
    for _ in range(2):
        pair.train(call, steps=1)
        pair.train(whole, steps=1)
        pair.train(model, steps=1)
        pair.train(model, steps=1, loss=loss)
