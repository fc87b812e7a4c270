"""Lightning's Trainer: accumulation, clipping, validation, checkpoints; by DDP, or sharded by this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule

import fsdp_compile
from tests.integrations.programs.report import report, run


class Task(LightningModule):
    """Its training, as users of Lightning write it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.found: list[dict[str, float]] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]).float(), batch[1]), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.found.append({"step": float(self.global_step), "loss": self.trainer.callback_metrics["loss"].item()})

    def on_validation_epoch_end(self) -> None:
        self.found.append({"val_loss": self.trainer.callback_metrics["val_loss"].item()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class ShardedTask(Task):
    """The same, sharded: Lightning calls `configure_model` before it makes the optimizer."""

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        if not isinstance(self.net, FSDPModule):
            fsdp_compile.fully_shard(self.net, mesh=mesh["data_parallel"])
            self.net.compile(backend="fsdp", options={"lower": "eager"})


def main(how: str, precision: Any, folder: str, resume_from: str | None = None) -> None:
    """Trains two epochs and reports losses."""
    sharded = how == "fsdp"
    torch.manual_seed(0)
    task = ShardedTask() if sharded else Task()
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randn(64, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    strategy: Any = ModelParallelStrategy(2, 1) if sharded else DDPStrategy()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        precision=precision,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, loader, loader, ckpt_path=resume_from)
    assert not sharded or counters["frames"]["ok"] > 0, "nothing was compiled"
    assert Path(folder, "epoch=1.ckpt").is_dir() == sharded
    report(task.found)


if __name__ == "__main__":
    run(main)
