"""An FSDP2 script with hybrid sharding and bfloat16. Only the line with `torch.compile` was added.

torchrun --nproc-per-node 4 docs/examples/hsdp_bf16.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group()
torch.manual_seed(0)


class Model(nn.Module):
    """A small transformer encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(32, 64)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


model = Model().to(device)
# Shards within groups of 2 ranks; each group is a replica of the whole model.
mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
compiled = torch.compile(model, backend="fsdp")

generator = torch.Generator().manual_seed(dist.get_rank())  # each rank draws its own data
tokens = torch.randint(0, 64, (4, 16), generator=generator).to(device)
losses = []
for _ in range(5):
    loss = nn.functional.cross_entropy(compiled(tokens).flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if dist.get_rank() == 0:
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
dist.destroy_process_group()
