"""Muon for the matrices, AdamW for the other parameters.

Muon looks at whole matrices: with `whole_step` one rank updates each of them. AdamW is elementwise:
`flat_step` updates flat shards.

torchrun --nproc-per-node 2 docs/examples/muon.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import fsdp_compile

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group()
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).to(device)
fsdp_compile.fully_shard(model)
matrices = [p for p in model.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if p.ndim != 2]
optimizers = [
    fsdp_compile.whole_step(torch.optim.Muon(matrices, lr=1e-2)),
    fsdp_compile.flat_step(torch.optim.AdamW(others, lr=1e-2)),
]
compiled = torch.compile(model, backend="fsdp")

x = torch.randn(16, 32, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
losses = []
for _ in range(5):
    loss = nn.functional.mse_loss(compiled(x), x)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
if dist.get_rank() == 0:
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
dist.destroy_process_group()
