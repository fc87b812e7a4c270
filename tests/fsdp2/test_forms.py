"""Which models are compiled block by block if no option says it, and which as a whole, and why."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_compile
from fsdp_compile.capture.forms import LIKE_UNITS, choose_form
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.take_over import model_of
from fsdp_compile.progress import LOGGER
from tests.fsdp2.decoder import WIDTH, Block, Decoder, batch, cross_entropy, gathered_by_hooks, pair_of, shard
from tests.ranks import run_ranks
from tests.two_sides import compile_eagerly, compile_in_place, made

pytestmark = pytest.mark.core


class _Many(Decoder):
    def __init__(self, number: int = LIKE_UNITS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.block() for _ in range(number)])


class _Unlike(Decoder):
    """As many blocks, of which half have no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.block() for _ in range(LIKE_UNITS)])
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


def _list_unit(model: Any) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard([model.norm, model.head])
    fully_shard(model)


def _blocks_and_root(model: Any) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def _prefetch_lists(model: Any) -> None:
    shard(model)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])


def _hook_of_root(model: Any) -> None:
    shard(model)
    fsdp_compile.register_comm_hook(model, lambda *_: None)


def _in_8_bits(model: Any) -> None:
    """A root with a table that is sent in 8 bits."""
    model.table = nn.Parameter(torch.zeros(256, 256))
    policy = fsdp_compile.MixedPrecision(gather_dtype=torch.int8)
    for module in (*model.blocks, model):
        fsdp_compile.fully_shard(module, mp_policy=policy)


BLOCKS = f"block by block: {LIKE_UNITS} units of Block"
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object], str]] = {
    "deep": (_Many, shard, BLOCKS),
    "deep, of our own call": (_Many, fsdp_compile.fully_shard, BLOCKS),
    "shallow": (lambda: _Many(LIKE_UNITS - 1), shard, "whole: it has fewer than 12 like units"),
    "unlike": (_Unlike, shard, "whole: it has fewer than 12 like units"),
    "layers": (_Layers, fsdp_compile.fully_shard, "whole: it has fewer than 12 like units"),
    "not sharded": (_Many, id, "whole: it has fewer than 12 like units"),
    "a unit of two modules": (_Many, _list_unit, "whole: unit norm+head has several modules"),
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


def _choices() -> None:
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
    _blocks_and_root(table_in_root)
    assert "a table that is in no block" in _form(table_in_root, options={"embedding": "sharded"})
    undivided = made(_Many)
    fully_shard(undivided)
    with pytest.raises(ConfigError, match="no unit below its root"):
        _form(undivided, options={"regions": "blocks"})


def test_the_form_and_why() -> None:
    run_ranks(_choices)


@contextlib.contextmanager
def _said() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(logging.NOTSET)


def _regions(model: nn.Module) -> set[int]:
    taken = model_of(model)
    assert taken is not None
    return {region.number for unit in taken.units for region in unit.compiled_regions.values()}


def _by_default() -> list[str]:
    pair = pair_of(_Many)
    with _said() as lines:
        pair.compiled(fullgraph=False)
        pair.train(steps=2)
    assert _regions(pair.model) == {0, 1, 2}
    return [line for line in lines if " is compiled " in line]


def test_a_deep_model_is_compiled_block_by_block() -> None:
    first, second = run_ranks(_by_default)
    assert first == [f"_Many is compiled {BLOCKS} are like one another"]
    assert second == []


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


def _numbered() -> None:
    pair = pair_of(_ManyNumbered)
    with gathered_by_hooks() as titles:
        pair.train(pair.compiled(fullgraph=False), steps=2)
    assert set(titles) == {"(root)"}


@pytest.mark.long
def test_blocks_whose_code_reads_their_number_are_all_compiled() -> None:
    """Dynamo would leave those past its limit of graphs for one code to Python."""
    run_ranks(_numbered)


def _plain() -> None:
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


def test_a_deep_plain_model() -> None:
    run_ranks(_plain)


def _others_are_whole() -> None:
    in_place = pair_of(_Many)
    compile_in_place(in_place.model)
    in_place.train(steps=1)
    assert _regions(in_place.model) == {0}

    pair = pair_of(_Many)
    model = pair.model
    function = compile_eagerly(lambda tokens: cross_entropy(model, tokens), fullgraph=True)
    pair.train(steps=1, loss=lambda each, tokens: function(tokens) if each is model else cross_entropy(each, tokens))
    assert _regions(model) == {0}


@pytest.mark.long
def test_functions_and_compiles_in_place_are_whole() -> None:
    run_ranks(_others_are_whole)


def _in_turn() -> None:
    """One model in both forms: its blocks stay compiled, and graphs of the whole read through them."""
    pair = pair_of(_Many)
    model = pair.model
    call = pair.compiled(fullgraph=False)
    pair.train(steps=1)
    function = compile_eagerly(lambda tokens: cross_entropy(model, tokens), fullgraph=True)
    whole = compile_eagerly(model, regions="whole", fullgraph=True)
    for _ in range(2):
        pair.train(call, steps=1)
        pair.train(whole, steps=1)
        pair.train(model, steps=1)
        pair.train(steps=1, loss=lambda each, batch: function(batch) if each is call else cross_entropy(each, batch))


@pytest.mark.long
def test_both_forms_of_one_model() -> None:
    run_ranks(_in_turn)
