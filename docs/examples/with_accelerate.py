"""accelerate: shard and compile, then prepare the model without DDP.

torchrun --nproc-per-node 2 docs/examples/with_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch import nn

import fsdp_compile

torch.manual_seed(0)


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
model = Model().to(accelerator.device)
inputs = torch.randn(128, 16)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=4)

fsdp_compile.fully_shard(model)
model.compile(backend="fsdp")
model = accelerator.prepare_model(model, evaluation_mode=True)  # mixed precision only: no DDP
optimizer, loader = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2), loader)

losses = []
for x, y in [*loader, *loader]:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())

with fsdp_compile.full_params(model, writeback=False):  # on every rank
    accelerator.save_model(model, "accelerate")
accelerator.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
accelerator.end_training()
