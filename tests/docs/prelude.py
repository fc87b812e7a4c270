"""The names that pages take for granted (a model, its batches and optimizer), and the files that they read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

import fsdp_compile
from fsdp_compile.calibrate import calibrate, save
from fsdp_compile.formats.convert import ConvertOptions, Format, convert_checkpoint
from tests.models.context_parallel import PositionedLlama, sequences

CPU = torch.device("cpu")
VOCABULARY = 32
GRAPH = Path(__file__).parents[1] / "golden" / "schedule-prefetch" / "distance_0_leaves_every_gather_where_it_is.txt"


RANKS = {"explain": 0, "tensor_parallel": 32, "schedule": 8, "precision": 8}
"""The size of the world of pages that run in one process, whose other ranks do not exist."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class BlockWithExperts(nn.Module):
    """One whose tokens all go to all experts of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(self.norm(x))


class Experts(nn.Module):
    """Matrices of eight experts in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16, 16))

    def split(self, mesh: DeviceMesh) -> None:
        self.weight = nn.Parameter(distribute_tensor(self.weight.detach(), mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        return torch.einsum("bti,eio->bto", x, weight.to_local())


class MyModel(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(kind() for _ in range(3))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def names(heading: str, *, is_sharded: bool) -> dict[str, Any]:
    """Those of a section, with a new model."""
    torch.manual_seed(0)
    model = MyModel()
    if is_sharded:
        fsdp_compile.fully_shard(model)
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randint(VOCABULARY, (2, 4, 8))

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def step() -> None:
        loss_of(compiled(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    found: dict[str, Any] = {"torch": torch, "nn": nn, "dist": dist, "fsdp_compile": fsdp_compile, "MyModel": MyModel}
    found |= {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"]), "device": CPU}
    found |= {"model": model, "compiled": compiled, "optimizer": optimizer, "loss_of": loss_of, "step": step}
    found |= {"inputs": inputs, "batches": [(inputs, targets)] * 2, "steps": 1, "is_last_step": False}
    found |= {"loader": DataLoader(TensorDataset(inputs, targets)), "evaluate": lambda model: model(inputs)}
    found |= {"folder": "llama", "engine": SimpleNamespace(load_weight=Mock())}
    if heading.startswith("Experts"):
        found["model"] = MyModel(BlockWithExperts)
    elif heading == "Context parallelism":
        found |= {"model": PositionedLlama(layers=1), "batches": [sequences(seed=0)]}
    return found


def set_up(page: str) -> None:
    """Makes the world of a page, the environment of torchrun in it, and the files that the page reads."""
    rank, ranks = dist.get_rank(), RANKS.get(page, dist.get_world_size())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": max(ranks, 1), "TORCHELASTIC_RUN_ID": "docs"}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 0}
    os.environ |= {name: str(value) for name, value in variables.items()}
    if page in RANKS:
        dist.barrier()  # gloo fails on a rank that still connects to one that is gone
        dist.destroy_process_group()
    if RANKS.get(page):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    if rank == 0 and page in _FILES:
        _FILES[page]()
    if dist.is_initialized():
        dist.barrier()


def _hardware() -> None:
    save(calibrate(CPU, seconds=0.1), Path("hardware.json"))


def _pretrained() -> None:
    torch.save(MyModel().state_dict(), "pretrained.pt")


def _safetensors() -> None:
    _pretrained()
    convert_checkpoint(Path("pretrained.pt"), Path("hf"), ConvertOptions(Format.SAFETENSORS))


def _llama() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)).save_pretrained("llama")


def _graph() -> None:
    Path("graph.txt").write_text(GRAPH.read_text(encoding="utf-8").split("-----\n")[1], encoding="utf-8")


_FILES = {
    "checkpoints": _safetensors,
    "frameworks": _llama,
    "initialization": _pretrained,
    "pipeline": _graph,
    "schedule": _hardware,
}
