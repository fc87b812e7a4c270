"""nanoGPT's `train.py`, with its names and its order, for a small model; by DDP, or sharded by this package.

`docs/frameworks.md` lists the lines that differ: here they are those below `if sharded:`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  nanoGPT's name

gradient_accumulation_steps = 2
batch_size, eval_iters, eval_interval, max_iters = 2, 2, 2, 4
learning_rate, weight_decay, grad_clip = 1e-2, 0.1, 1.0
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclasses.dataclass
class GPTConfig:
    block_size: int = 8
    vocab_size: int = 32
    n_layer: int = 1
    n_head: int = 2
    n_embd: int = 16


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head, self.n_embd = config.n_head, config.n_embd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = (part.view(b, t, self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(self.n_embd, 2))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: torch.Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return projected


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        mixed: torch.Tensor = x + self.c_proj(nn.functional.gelu(self.c_fc(self.ln_2(x))))
        return mixed


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            "ln_f": nn.LayerNorm(config.n_embd),
        })  # fmt: skip
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # type: ignore[union-attr]
        self.apply(self._init_weights)
        for pn, p in self.named_parameters():
            if pn.endswith("c_proj.weight"):
                torch.nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[Any, Any]:
        parts: Any = self.transformer
        x = parts.wte(idx) + parts.wpe(torch.arange(0, idx.size(1), device=idx.device))
        for block in parts.h:
            x = block(x)
        x = parts.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        param_dict = {pn: p for pn, p in self.named_parameters() if p.requires_grad}
        decay_params = [p for n, p in param_dict.items() if p.dim() >= 2]
        nodecay_params = [p for n, p in param_dict.items() if p.dim() < 2]
        optim_groups: list[dict[str, Any]] = [
            {"params": decay_params, "weight_decay": weight_decay},
            {"params": nodecay_params, "weight_decay": 0.0},
        ]
        assert "fused" in inspect.signature(torch.optim.AdamW).parameters
        return torch.optim.AdamW(optim_groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-3)


def train(how: str, out_dir: str, *, resume: bool = False) -> list[float]:  # noqa: C901, PLR0912, PLR0915  as nanoGPT's
    """Trains four iterations, or what a checkpoint has left of them; returns rank 0's losses and gradient norms."""
    sharded = how == "fsdp"
    ddp_rank, ddp_world_size = dist.get_rank(), dist.get_world_size()
    master_process = ddp_rank == 0
    seed_offset = ddp_rank  # each process gets a different seed
    assert gradient_accumulation_steps % ddp_world_size == 0
    accumulation_steps = 2 * gradient_accumulation_steps // ddp_world_size
    torch.manual_seed(1337 + seed_offset)
    data = torch.randint(0, 32, (512,), generator=torch.Generator().manual_seed(0))
    # nanoGPT draws both from one generator; here ranks that evaluate, or do not, train on the same rows.
    drawn = {split: torch.Generator().manual_seed(1337 + seed_offset) for split in ("train", "val")}

    def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        ix = torch.randint(len(data) - 8, (batch_size,), generator=drawn[split]).tolist()
        return torch.stack([data[i : i + 8] for i in ix]), torch.stack([data[i + 1 : i + 9] for i in ix])

    model: Any = GPT(GPTConfig())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    first_iter, best_val_loss = 0, 1e9
    if resume:
        checkpoint = torch.load(Path(out_dir, f"{how}.pt"))
        model.load_state_dict(checkpoint["model"])
        first_iter, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
    optimizer = model.configure_optimizers()
    if resume and sharded:
        set_optimizer_state_dict(model, optimizer, checkpoint["optimizer"], options=FULL)
    elif resume:
        optimizer.load_state_dict(checkpoint["optimizer"])
    if sharded:
        raw_model = model
        options: Any = {"sync_module_states": True, "lower": "eager"}
        model = torch.compile(model, backend="fsdp", options=options)
    else:
        model = torch.compile(model, backend="eager")
        model = DDP(model)
        raw_model = model.module._orig_mod

    @torch.no_grad()
    def estimate_loss() -> float:
        model.eval()
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            x, y = get_batch("val")
            _, loss = model(x, y)
            losses[k] = loss.item()
        model.train()
        return losses.mean().item()

    found = []
    x, y = get_batch("train")
    for iter_num in range(first_iter, max_iters):
        if iter_num % eval_interval == 0 and (sharded or master_process):
            losses = [estimate_loss()]
            if sharded:
                dist.broadcast_object_list(losses)
            found += losses
            if losses[0] < best_val_loss:
                best_val_loss = losses[0]
                if iter_num > 0:
                    checkpoint = {"iter_num": iter_num, "best_val_loss": best_val_loss}
                    if sharded:
                        checkpoint["model"] = get_model_state_dict(raw_model, options=FULL)
                        checkpoint["optimizer"] = get_optimizer_state_dict(raw_model, optimizer, options=FULL)
                    else:
                        checkpoint |= {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
                    if master_process:
                        torch.save(checkpoint, Path(out_dir, f"{how}.pt"))
        for micro_step in range(accumulation_steps):
            model.require_backward_grad_sync = micro_step == accumulation_steps - 1
            _, loss = model(x, y)
            loss = loss / accumulation_steps
            x, y = get_batch("train")
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        found.append(loss.item() * accumulation_steps)
    return found
