"""Train in float16: loss scaling, accumulation over two microbatches, and an average of the parameters.

torchrun --nproc-per-node 2 docs/examples/fp16_tools.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import EMA, ConfigError, FSDPOptions, GradScaler, fully_shard, no_sync

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group()
torch.manual_seed(0)

try:  # options can be checked before anything is started
    FSDPOptions.from_dict({"memory_budget_gb": -1})
except ConfigError as error:
    if dist.get_rank() == 0:
        print(error)

model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(device)
fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32))
compiled = torch.compile(model, backend="fsdp")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = GradScaler(device.type, init_scale=2.0**10)  # all ranks leave out a step together
average = EMA(model, decay=0.9)

generator = torch.Generator().manual_seed(dist.get_rank())  # each rank draws its own data
inputs = torch.randn(16, 32, generator=generator).to(device)
losses = []


def backward(half: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.mse_loss(compiled(half).float(), half) / 2
    scaler.scale(loss).backward()
    return loss.detach()


for _ in range(10):
    with no_sync(model):  # this backward reduces nothing
        loss = backward(inputs[:8])
    loss += backward(inputs[8:])  # this one reduces the sum
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    average.update()
    losses.append(loss.item())

with average.swapped_in(), torch.no_grad():
    averaged = nn.functional.mse_loss(compiled(inputs).float(), inputs)
if dist.get_rank() == 0:
    print(f"with averaged parameters {averaged.item():.3f}, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
dist.destroy_process_group()
