"""Lightning Fabric; by its DDP strategy, or sharded by this package."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import fsdp_compile
from tests.integrations.programs.report import report, run

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def main(how: str, precision: Any) -> None:
    """Trains two epochs, with a checkpoint that is loaded between them; reports losses and gradient norms."""
    fabric: Any = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision=precision)
    fabric.launch()
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randn(64, 4))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=4))
    file, found = f"{how}.ckpt", []
    for epoch in range(2):
        torch.manual_seed(epoch)  # the values of the second model are those of the checkpoint
        model: Any = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        if how == "fsdp":
            fsdp_compile.fully_shard(model)
            model.compile(backend="fsdp", options={"lower": "eager"})
            optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))
        else:
            model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))
        if epoch and how == "fsdp":
            state = fabric.load(file)
            set_model_state_dict(model, state["model"], options=FULL)
            set_optimizer_state_dict(model, optimizer.optimizer, state["optimizer"], options=FULL)
        elif epoch:
            fabric.load(file, {"model": model, "optimizer": optimizer})
        for number, (x, y) in enumerate(loader):
            is_last = number % 2 == 1
            held = fsdp_compile.no_sync(model) if how == "fsdp" else fabric.no_backward_sync(model)
            with contextlib.nullcontext() if is_last else held:
                with fabric.autocast():
                    loss = nn.functional.mse_loss(model(x).float(), y)
                fabric.backward(loss / 2)
            found.append({"loss": fabric.all_reduce(loss.detach()).item()})
            if is_last:
                found[-1]["norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
                optimizer.step()
                optimizer.zero_grad()
        if how == "fsdp":
            state = {"model": get_model_state_dict(model, options=FULL)}
            state["optimizer"] = get_optimizer_state_dict(model, optimizer.optimizer, options=FULL)
        else:
            state = {"model": model, "optimizer": optimizer}
        fabric.save(file, state)
    report(found)


if __name__ == "__main__":
    run(main)
