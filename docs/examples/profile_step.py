"""Compare a step with its plan: times and peak memory, planned and measured.

torchrun --nproc-per-node 2 docs/examples/profile_step.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import profile_step

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group()
torch.manual_seed(0)

layers = [nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)) for _ in range(4)]
model = nn.Sequential(*layers).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
compiled = torch.compile(model, backend="fsdp")
inputs = torch.randn(256, 512, device=device)


def step():
    loss = nn.functional.mse_loss(compiled(inputs), inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


step()
step()  # nothing is compiled from here on
profile = profile_step(compiled, step)  # on every rank: a step has collectives
if dist.get_rank() == 0:
    print(profile)
dist.destroy_process_group()
