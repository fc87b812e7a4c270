"""Options, layouts and ways to train, drawn together: a few rows in which each pair of values meets."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from fsdp_compile import FSDPOptions, flat_step, fully_shard, no_sync, step_in_backward
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.errors import FSDPCompileError
from tests.fsdp2.decoder import Decoder, Tied, batch, gathered_by_hooks
from tests.pairwise import Row, Value, with_defaults
from tests.two_sides import BITS, Within, adamw, close, compare_gradients, compare_parameters, mesh_of

_OF_KERNELS = {
    True: Within((1e-4, 1e-4), (1e-4, 1e-4), (0.0, 4e-2)),
    False: Within((2e-2, 2e-2), (1e-1, 5e-2), (0.0, 4e-2)),
}
"""Of Inductor's fused kernels, whether in float32; AdamW may go the other way where a gradient is nearly 0."""


def _by_hand(model: Decoder, **settings: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)


def _nested(model: Decoder, **settings: Any) -> None:
    for block in model.blocks:
        assert isinstance(block.a, nn.Module)
        fully_shard(block.a, **settings)
    _by_hand(model, **settings)


def _lists(model: Decoder, **settings: Any) -> None:
    fully_shard(list(model.blocks), **settings)
    fully_shard([model.norm, model.head], **settings)
    fully_shard(model, **settings)


def _freeze(model: Decoder) -> Decoder:
    model.embedding.requires_grad_(requires_grad=False)
    model.blocks[0].requires_grad_(requires_grad=False)
    return model


LAYOUTS: dict[str, tuple[Callable[[], Decoder], Callable[..., object]]] = {
    "automatic": (Decoder, fully_shard),
    "plain": (Decoder, lambda *_, **__: None),
    "blocks": (Decoder, _by_hand),
    "nested": (Decoder, _nested),
    "lists": (Decoder, _lists),
    "tied": (Tied, fully_shard),
    "tied, plain": (Tied, lambda *_, **__: None),
    "frozen": (lambda: _freeze(Decoder()), _by_hand),
}
"""How models are made, and sharded before they are compiled."""
SETTINGS: dict[str, dict[str, Any]] = {
    "mp_policy": {
        "float32": None,
        "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    },
    "reshard_after_forward": {"default": None, "kept": False, "auto": "auto", "again": True},
    "offload_policy": {"device": None, "host": CPUOffloadPolicy(pin_memory=False)},
    "separate_reduce_group": {"one group": False, "own group": True},
    "sync_module_states": {"alike": False, "of rank 0": True},
}
"""Arguments of `fully_shard` that are options for a plain model."""


def _columns(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.ndim - 1)


PLACEMENTS: dict[str, dict[str, Any]] = {"shard_placement_fn": {"rows": None, "columns": _columns}}
"""An argument of `fully_shard` alone."""
OPTIONS: dict[str, dict[str, Any]] = {
    "lower": {"eager": "eager", "inductor": "inductor"},
    "regions": {"whole": "whole", "one by one": "blocks"},
    "prefetch": {"auto": "auto", "0": 0, "2": 2, "FSDP1": "BACKWARD_PRE+forward_prefetch", "none": "none"},
    "memory_budget_gb": {"none": None, "1 GB": 1.0},
    "activations": {"auto": "auto", "saved": "saved"},
    "hardware": {"found": None, "named": hardware("cpu", "ethernet-1")},
    "reduce_layout": {"aligned": "aligned", "fsdp2": "fsdp2"},
    "bucket_mb": {"auto": "auto", "0": 0, "1": 1},
    "embedding": {"gathered": "gathered", "sharded": "sharded"},
    "poison": {"off": False, "on": True},
}
"""Options of a compile."""
WAYS: dict[str, dict[str, Any]] = {
    "form": dict.fromkeys(("module", "in place", "blocks", "function", "step")),
    "optimizer": {"plain": lambda optimizer: optimizer, "flat": flat_step, "in backward": step_in_backward},
    "microbatches": {"one": (), "two": (no_sync,)},
    "dynamic": {"unset": None, "dynamic": True},
    "rows": {"same": (2, 2), "none on one": (2, 0), "by rank": (2, 3)},
    "frozen later": {"nothing": False, "a block": True},
}
"""How the model is compiled and trained."""
AXES: dict[str, dict[str, Any]] = {"layout": LAYOUTS, **SETTINGS, **OPTIONS, **WAYS}


class _Checkpointed(Decoder):
    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _wrapped() -> Decoder:
    model = Decoder()
    model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
    return model


@contextlib.contextmanager
def _without_replicas(model: Any) -> Iterator[None]:
    model.set_requires_all_reduce(False)
    yield
    model.set_requires_all_reduce(True)


FOUR_RANKS: dict[str, dict[str, Any]] = {
    "layout": {name: LAYOUTS[name] for name in ("automatic", "blocks", "nested", "lists")},
    "blocks": {"kept": Decoder, "checkpointed": _Checkpointed, "wrapped": _wrapped},
    **PLACEMENTS,
    "mesh": {"2x2": (2, 2)},  # gloo's sums of more than two ranks depend on the place in a message
    "mp_policy": SETTINGS["mp_policy"],
    "reshard_after_forward": SETTINGS["reshard_after_forward"],
    "offload_policy": SETTINGS["offload_policy"],
    "form": dict.fromkeys(("module", "in place", "blocks", "step")),
    "optimizer": WAYS["optimizer"],
    "microbatches": {**WAYS["microbatches"], "three": (no_sync, no_sync), "scattered": (_without_replicas,)},
}
"""Axes of a second drawing: hybrid sharding, offloading, checkpointed blocks and accumulation."""
NOT_DRAWN = {
    "inductor": "settings of Inductor",
    "artifacts": "changes no graph",
    "stop_after": "leaves passes out",
    "mesh": "tests/numerics/fsdp2/test_matrix.py has the meshes",
    "sharding_strategy": "the same",
    "auto_wrap_policy": "tests/sharding/test_wrap.py compares the units",
    "module": "what is sharded",
    "ignored_params": "tests/sharding/test_wrap.py leaves them out of units",
    "param_init_fn": "tests/sharding/test_values.py; no step knows of it",
    "device_id": "the same",
    "dp_mesh_dims": "tests/fsdp2/test_meshes.py has the meshes",
}
"""Options, and arguments of `fully_shard`, that no row has, and why."""


_PLANNED = "no effect on a schedule that is not planned"
_AVERAGED = "averaged by no rank|no rank would average"
REFUSED: list[tuple[str, Collection[str], str, Collection[str], str]] = [
    ("prefetch", {"0", "2", "FSDP1", "none"}, "memory_budget_gb", {"1 GB"}, _PLANNED),
    ("prefetch", {"0", "2", "FSDP1", "none"}, "hardware", {"named"}, _PLANNED),
    ("layout", {"plain", "tied, plain"}, "form", {"in place", "blocks", "function", "step"}, _AVERAGED),
    ("layout", {"tied", "tied, plain"}, "embedding", {"sharded"}, "its weight is read in other ways"),
    ("memory_budget_gb", {"1 GB"}, "form", {"blocks"}, "the graph is a part of its model"),
    ("memory_budget_gb", {"1 GB"}, "regions", {"one by one"}, "the graph is a part of its model"),
    ("rows", {"none on one"}, "lower", {"inductor"}, "Inductor computes nothing of an empty input"),
    (
        "regions",
        {"one by one"},
        "form",
        {"in place", "blocks", "function", "step"},
        "blocks are compiled one by one by",
    ),
]
"""Values of one axis that contradict those of another one, and what the error says."""


def refused() -> dict[frozenset[Value], str]:
    """Each such pair, and what the error says."""
    return {
        frozenset({(one, a), (other, b)}): says
        for one, its, other, others, says in REFUSED
        for a, b in itertools.product(its, others)
    }


def fields() -> set[str]:
    """The names of all options and of all arguments of `fully_shard`."""
    return {field.name for field in dataclasses.fields(FSDPOptions)} | {*inspect.signature(fully_shard).parameters}


def train(rows: list[Row]) -> list[str]:
    """Trains each row beside FSDP2: "" if all bits are the same, else the error by name in the first call."""
    return [_train(with_defaults(AXES, row.items())) for row in rows]


def _train(row: Row) -> str:
    torch.compiler.reset()
    value = {axis: {**AXES.get(axis, {}), **FOUR_RANKS.get(axis, {})}[name] for axis, name in row.items()}
    make, shard = value["layout"]
    make = value.get("blocks", make)
    settings: dict[str, Any] = {name: value.get(name) for name in (*SETTINGS, *PLACEMENTS)}
    settings = {name: given for name, given in settings.items() if given not in (None, False)}
    if "mesh" in value:
        settings["mesh"] = mesh_of(value["mesh"])
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    if row["sync_module_states"] == "of rank 0" and dist.get_rank():
        for parameter in model.parameters():
            parameter.data.fill_(7)
    options = {name: value[name] for name in OPTIONS if value[name] != getattr(FSDPOptions(), name)}
    is_plain = row["layout"].endswith("plain")
    (fully_shard if is_plain else shard)(reference, **settings)
    calls: list[torch.Tensor] = []
    try:
        shard(model, **settings)
        options |= settings if is_plain else {}
        call = _compiled(model, row["form"], options=options, dynamic=value["dynamic"])
        mine, theirs = value["optimizer"](adamw(list(model.parameters()))), adamw(list(reference.parameters()))
        with gathered_by_hooks() as titles:
            _steps((model, reference), call, (mine, theirs), value, calls)
        is_whole = row["form"] != "blocks" and row["regions"] == "whole"
        assert not [title for title in titles if is_whole or title.startswith("blocks")]
    except (FSDPCompileError, BackendCompilerFailed) as error:
        named = getattr(error, "inner_exception", error)
        if calls or not isinstance(named, FSDPCompileError):
            raise
        return f"{type(named).__name__}: {named}"
    return ""


def _compiled(model: Any, form: str, **given: Any) -> Any:
    """What runs forward and backward of a batch, and returns its loss."""
    arguments = {"backend": "fsdp", **given}
    if form == "in place":
        model.compile(**arguments)
    if form == "blocks":
        for block in model.blocks:
            block.compile(**arguments)
    if form == "module":
        compiled = torch.compile(model, **arguments)
        return lambda tokens: _backward(_loss(compiled, tokens))
    if form == "function":
        loss = torch.compile(lambda tokens: _loss(model, tokens), **arguments)
        return lambda tokens: _backward(loss(tokens))
    if form == "step":
        return torch.compile(lambda tokens: _backward(_loss(model, tokens)), **arguments)
    return lambda tokens: _backward(_loss(model, tokens))


def _loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """A sum, which is a number for a rank without rows, too."""
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten(), reduction="sum") / 10


def _backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss.detach()


def _steps(
    pair: tuple[Any, Any], call: Any, optimizers: tuple[Any, Any], value: dict[str, Any], calls: list[torch.Tensor]
) -> None:
    within = BITS if value["lower"] == "eager" else _OF_KERNELS[value["mp_policy"] is None]
    rows = value["rows"][dist.get_rank() % 2]
    for step in range(2):
        for number, unreduced in enumerate((*value["microbatches"], contextlib.nullcontext)):
            tokens = batch(3 * step + number, (rows, 5))
            with unreduced(pair[0]), unreduced(pair[1]):
                ours, expected = call(tokens), _backward(_loss(pair[1], tokens))
            calls.append(ours)
            close(ours, expected, f"loss of step {step}", within.loss)
        if value["optimizer"] is not step_in_backward:
            compare_gradients(*pair, within.gradient)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for model in pair if value["frozen later"] else ():
            model.blocks[1].requires_grad_(requires_grad=False)
    compare_parameters(*pair, within.parameter)
