"""Your own model, sharded by one line: data split over ranks, AdamW, clipping, evaluation, save and load.

torchrun --nproc-per-node 2 docs/examples/own_model.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group()
torch.manual_seed(0)  # every rank makes the same model and the same data


class Model(nn.Module):
    """A stack of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return self.head(x)


inputs = torch.randn(256, 32)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))  # each rank gets its own rows

model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
compiled = torch.compile(model, backend="fsdp")  # shards the model at the first call

losses = []
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.mse_loss(compiled(x.to(device)), y.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))  # on all ranks
if dist.get_rank() == 0:
    torch.save(state, "model.pt")

state = torch.load("model.pt") if dist.get_rank() == 0 else {}
set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
with torch.no_grad():
    evaluated = nn.functional.mse_loss(compiled(inputs[:16].to(device)), inputs[:16].sum(1, keepdim=True).to(device))
if dist.get_rank() == 0:
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, evaluated {evaluated.item():.3f}")
dist.destroy_process_group()
