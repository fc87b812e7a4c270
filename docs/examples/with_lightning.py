"""Lightning's Trainer: shard and compile in `configure_model`.

python docs/examples/with_lightning.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule

import fsdp_compile

torch.manual_seed(0)


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Task(LightningModule):
    """Compile the model inside the LightningModule, not the LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Model()
        self.losses = []

    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            fsdp_compile.fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
            self.net.compile(backend="fsdp")

    def training_step(self, batch, _):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":  # Lightning starts the other ranks with this file
    inputs = torch.randn(128, 16)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    task = Task()
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = Trainer(
        accelerator="auto", devices=2, strategy=strategy, max_epochs=2, gradient_clip_val=1.0, logger=False
    )
    trainer.fit(task, torch.utils.data.DataLoader(data, batch_size=4))
    trainer.print(f"loss {task.losses[0]:.3f} -> {task.losses[-1]:.3f}")
