"""Save shards of model and optimizer, and resume on another number of ranks.

torchrun --nproc-per-node 4 docs/examples/resume.py
torchrun --nproc-per-node 2 docs/examples/resume.py    # continues from the checkpoint
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import fsdp_compile

FOLDER = "checkpoint"
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group()
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).to(device)
fsdp_compile.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
compiled = torch.compile(model, backend="fsdp")


def state():
    """Sharded values by name: each rank saves and loads its part."""
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer), "step": step}


step = 0
if Path(FOLDER, ".metadata").exists():
    saved = state()
    dcp.load(saved, checkpoint_id=FOLDER)
    set_model_state_dict(model, saved["model"])
    set_optimizer_state_dict(model, optimizer, saved["optimizer"])
    step = saved["step"]

world, rank = dist.get_world_size(), dist.get_rank()
x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).chunk(world)[rank].to(device)  # this rank's rows
losses = []
for _ in range(5):
    step += 1
    loss = nn.functional.mse_loss(compiled(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
dcp.save(state(), checkpoint_id=FOLDER)
if rank == 0:
    print(f"{world} ranks, step {step}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
dist.destroy_process_group()
