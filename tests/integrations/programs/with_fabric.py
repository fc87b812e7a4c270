"""Lightning Fabric; by its DDP strategy, or sharded by this package."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

import fsdp_compile
from tests.integrations.programs.report import report, run


def main(how: str, precision: Any) -> None:
    """Trains one epoch and reports losses and gradient norms."""
    fabric: Any = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision=precision)
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randn(64, 4))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=4))
    if how == "fsdp":
        fsdp_compile.fully_shard(model)
        model.compile(backend="fsdp", options={"lower": "eager"})
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))
    else:
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))
    found = []
    for x, y in loader:
        with fabric.autocast():
            loss = nn.functional.mse_loss(model(x).float(), y)
        fabric.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append({"loss": fabric.all_reduce(loss.detach()).item(), "norm": norm.item()})
    report(found)


if __name__ == "__main__":
    run(main)
