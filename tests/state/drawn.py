"""State of model and optimizer, saved by one layout and loaded by another one: rows of pairs of what may matter."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    MixedPrecisionPolicy,
    ShardedOptimStateDictConfig,
)

from fsdp_compile import (
    flat_step,
    full_tensors,
    no_sync,
    optim_state_dict,
    optim_state_dict_to_load,
    step_in_backward,
    units,
)
from tests.fsdp2.decoder import VOCABULARY, Decoder, Tied, cross_entropy, gathered_by_hooks
from tests.fsdp2.models import assert_same
from tests.numerics.fsdp2.options import LAYOUTS
from tests.pairwise import Row, Value
from tests.two_sides import mean_over_ranks, mesh_of, share, whole


def _frozen() -> Decoder:
    model = Decoder()
    model.blocks[0].requires_grad_(requires_grad=False)
    return model


def _adamw(parameters: list[nn.Parameter]) -> optim.Optimizer:
    return optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


def _sgd(parameters: list[nn.Parameter]) -> optim.Optimizer:
    return optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9)


UNITS = {name: LAYOUTS[name][1] for name in ("automatic", "blocks", "nested", "lists", "plain")}
MESHES = {"2": (2,), "4": (4,), "2x2": (2, 2)}
OFFLOADS = {"device": None, "host": CPUOffloadPolicy(pin_memory=False)}
FULL = StateDictOptions(full_state_dict=True)
OF_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
TO_ALL = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
AXES: dict[str, dict[str, Any]] = {
    "model": {"decoder": Decoder, "tied": Tied, "frozen": _frozen},
    "units": UNITS,
    "mesh": MESHES,
    "offload": OFFLOADS,
    "form": dict.fromkeys(("module", "in place", "uncompiled")),
    "dtype": {"float32": torch.float32, "bfloat16 policy": None, "bfloat16": torch.bfloat16},
    "optimizer": {
        "AdamW": _adamw,
        "SGD": _sgd,
        "flat": lambda parameters: flat_step(_adamw(parameters)),
        "in backward": lambda parameters: step_in_backward(_adamw(parameters)),
    },
    "moment": dict.fromkeys(("after steps", "before a step", "between microbatches", "after microbatches")),
    "kind": dict.fromkeys(("full", "full of rank 0", "sharded", "FSDP1, full", "FSDP1, sharded")),
    "units then": UNITS,
    "mesh then": {"1": (1,), **MESHES},
    "offload then": OFFLOADS,
}
"""What saves, in which form, and what loads ("then")."""
_CONTRADICT: list[tuple[str, set[str], str, set[str]]] = [
    # It is an error to compile a plain model in place, and nothing shards one that is not compiled.
    ("units", {"plain"}, "form", {"in place", "uncompiled"}),
    ("units then", {"plain"}, "form", {"in place", "uncompiled"}),
    # FSDP2's own error for a parameter of two units, where nothing is compiled.
    ("model", {"tied"}, "units", {"lists"}),
    ("model", {"tied"}, "units then", {"lists"}),
    # FSDP1's functions take a sharded model; what they save of an optimizer without state has none, as with FSDP1.
    ("units then", {"plain"}, "kind", {"FSDP1, full", "FSDP1, sharded"}),
    ("units", {"plain"}, "moment", {"before a step"}),
    ("kind", {"FSDP1, full", "FSDP1, sharded"}, "moment", {"before a step"}),
]


def contradictions() -> set[frozenset[Value]]:
    """Pairs that no row has."""
    return {frozenset({(a, x), (b, y)}) for a, its, b, others in _CONTRADICT for x in its for y in others}


def world(row: Row, then: str = "") -> int:
    """How many ranks save, or load."""
    return int(torch.Size(AXES["mesh" + then][row["mesh" + then]]).numel())


class _Side:
    """A model, its optimizer, and what runs forward and backward."""

    def __init__(self, row: Row, then: str = "", seed: int = 0) -> None:
        torch.compiler.reset()
        torch.manual_seed(seed)
        value = {axis: AXES[axis][name] for axis, name in row.items()}
        self.row = row
        self.model: Any = value["model"]()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if value["dtype"] is None else None
        if value["dtype"] is not None:
            self.model.to(value["dtype"])
        given = {"mesh": mesh_of(value["mesh" + then]), "offload_policy": value["offload" + then], "mp_policy": policy}
        settings = {name: setting for name, setting in given.items() if setting is not None}
        value["units" + then](self.model, **settings)
        self.call = self.model
        is_plain = row["units" + then] == "plain"
        compiles: Any = {"backend": "fsdp", "options": {"lower": "eager", **(settings if is_plain else {})}}
        if row["form"] == "module":
            self.call = torch.compile(self.model, **compiles)
        elif row["form"] == "in place":
            self.model.compile(**compiles)
        self.optimizer: optim.Optimizer = value["optimizer"](list(self.model.parameters()))

    def begin(self, step: int) -> list[float]:
        """The microbatches of a step but the last one; their losses."""
        if "microbatches" not in self.row["moment"]:
            return []
        with no_sync(self.model):
            return [self._backward(step + 100)]

    def end(self, step: int) -> list[float]:
        """The last microbatch, and the update."""
        loss = self._backward(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss]

    def _backward(self, number: int) -> float:
        tokens = torch.randint(0, VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(number))
        with gathered_by_hooks() as titles:
            loss = cross_entropy(self.call, share(tokens))
            loss.backward()
        if self.row["form"] != "uncompiled":
            assert not titles, f"FSDP2's hooks gathered {titles}"
            assert all(unit.compiled_regions for unit in units(self.model))
        return float(mean_over_ranks(loss))

    def save(self, folder: Path) -> None:
        kind, state, model, optimizer = self.row["kind"], {}, self.model, self.optimizer
        if kind in ("full", "full of rank 0"):
            options = FULL if kind == "full" else OF_RANK_0
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))
        elif kind == "FSDP1, full":
            config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
            state = {"optimizer": optim_state_dict(model, optimizer, config=config)}
            state["model"] = get_model_state_dict(model, options=OF_RANK_0)
        else:
            dcp.save(self._sharded(), checkpoint_id=folder)
            return
        if dist.get_rank() == 0:
            torch.save(state, folder / "state.pt")

    def load(self, folder: Path) -> None:
        kind, model, optimizer = self.row["kind"], self.model, self.optimizer
        if kind in ("sharded", "FSDP1, sharded"):
            if kind == "FSDP1, sharded":  # an optimizer with state has places for what is loaded
                self.begin(7)
                self.end(7)
            state = self._sharded()
            dcp.load(state, checkpoint_id=folder)
        else:
            has_state = kind == "full" or dist.get_rank() == 0
            state = torch.load(folder / "state.pt") if has_state else {"model": {}, "optimizer": {}}
        options = {"sharded": None, "FSDP1, sharded": None, "full": FULL}.get(kind, TO_ALL)
        set_model_state_dict(model, state["model"], options=options)
        if kind in ("sharded", "full", "full of rank 0"):
            set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
            return
        config = (
            ShardedOptimStateDictConfig() if kind == "FSDP1, sharded" else FullOptimStateDictConfig(rank0_only=True)
        )
        optimizer.load_state_dict(optim_state_dict_to_load(model, optimizer, state["optimizer"], config=config))

    def _sharded(self) -> dict[str, Any]:
        own = functools.partial(optim_state_dict, config=ShardedOptimStateDictConfig())
        of_optimizer: Any = own if self.row["kind"] == "FSDP1, sharded" else get_optimizer_state_dict
        return {"model": get_model_state_dict(self.model), "optimizer": of_optimizer(self.model, self.optimizer)}


def all_values(model: Any, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Every value of model and optimizer, full, by name."""
    names = {p: name for name, p in model.named_parameters()}
    found: dict[str, Any] = {f"model {name}": value.clone() for name, value in full_tensors(model)}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{key} of {names[parameter]}"] = copy.deepcopy(whole(value))
    for number, group in enumerate(optimizer.param_groups):
        settings = {k: list(v) if isinstance(v, tuple) else v for k, v in group.items() if k != "params"}
        found[f"group {number}"] = (settings, [names[p] for p in group["params"]])
    return found


def save(rows: list[Row], folder: Path) -> list[dict[str, Any]]:
    """Trains and saves each row; returns what was saved, and what follows: losses and values after one more step."""
    return [_save(row, folder / str(number)) for number, row in enumerate(rows)]


def _save(row: Row, folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    side = _Side(row)
    for step in () if row["moment"] == "before a step" else (0, 1):
        side.begin(step)
        side.end(step)
    losses = side.begin(2)
    if row["moment"] == "after microbatches":
        losses += side.end(2)
    side.save(folder)
    saved = all_values(side.model, side.optimizer)
    if row["moment"] == "after microbatches":
        losses = side.begin(3)
    losses += side.end(3)
    return {"saved": saved, "losses": losses, "next": all_values(side.model, side.optimizer)}


def load(rows: list[Row], folder: Path, expected: list[dict[str, Any]]) -> list[str]:
    """Loads each row and takes the step that follows; "" where all is as expected, else what differs."""
    return [
        _load(row, folder / str(number), of_row)
        for number, (row, of_row) in enumerate(zip(rows, expected, strict=True))
    ]


def _load(row: Row, folder: Path, expected: dict[str, Any]) -> str:
    side = _Side(row, " then", seed=1)
    try:
        side.load(folder)
        assert_same(all_values(side.model, side.optimizer), expected["saved"])
        last = 3 if row["moment"] == "after microbatches" else 2
        losses = side.begin(last) + side.end(3)
        bound = 1e-4 if row["dtype"] == "float32" else 3e-2
        torch.testing.assert_close(losses, expected["losses"], rtol=bound, atol=bound)
        for name, value in all_values(side.model, side.optimizer).items():
            if isinstance(value, torch.Tensor) and row["dtype"] == "float32":
                torch.testing.assert_close(value, expected["next"][name], rtol=1e-3, atol=1e-3, msg=name)
    except AssertionError as error:
        return str(error)
    return ""
