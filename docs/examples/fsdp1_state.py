"""Optimizer state by FSDP1's functions: full or sharded, and from names to numbers.

torchrun --nproc-per-node 2 docs/examples/fsdp1_state.py
"""

import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType

import fsdp_compile

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group()
torch.manual_seed(0)
warnings.simplefilter(
    "ignore", FutureWarning
)  # FSDP1 calls most of these functions deprecated, and so does this package

model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
compiled = torch.compile(model, backend="fsdp")
inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)


def step():
    loss = nn.functional.mse_loss(compiled(inputs), inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


first = step()

# The functions that FSDP1 recommends: state by name, written by the first rank.
state = fsdp_compile.optim_state_dict(model, optimizer)
optimizer.load_state_dict(fsdp_compile.optim_state_dict_to_load(model, optimizer, state))
step()

# Full state on the first rank, which each rank receives its part of.
full = fsdp_compile.full_optim_state_dict(model, optimizer)
optimizer.load_state_dict(fsdp_compile.scatter_full_optim_state_dict(full or None, model, optim=optimizer))
step()

# Full state on all ranks, of which each keeps its part.
full = fsdp_compile.full_optim_state_dict(model, optimizer, rank0_only=False)
optimizer.load_state_dict(fsdp_compile.shard_full_optim_state_dict(full, model, optim=optimizer))
step()

# Sharded state.
sharded = fsdp_compile.sharded_optim_state_dict(model, optimizer)
optimizer.load_state_dict(fsdp_compile.flatten_sharded_optim_state_dict(sharded, model, optimizer))
last = step()

# A plain optimizer numbers its parameters.
numbered = fsdp_compile.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
if dist.get_rank() == 0:
    print(f"named {list(full['state'])}, numbered {list(numbered['state'])}, loss {first:.3f} -> {last:.3f}")
dist.destroy_process_group()
