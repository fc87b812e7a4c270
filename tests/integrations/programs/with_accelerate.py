"""A loop with accelerate: accumulation, clipping, mixed precision, saving; by DDP, or sharded by this package."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fsdp_compile
from tests.integrations.programs.report import report, run


def main(how: str, mixed_precision: str) -> None:
    """Trains two epochs and reports losses, gradient norms and the norms of the full parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randn(64, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed_precision)
    if how == "fsdp":
        fsdp_compile.fully_shard(model)
        model.compile(backend="fsdp", options={"lower": "eager"})
        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer, loader = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), loader)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for x, y in [*loader, *loader]:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x).float(), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                found.append({"loss": accelerator.gather(loss.detach()).mean().item(), "norm": norm.item()})
            optimizer.step()
            optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(accelerator.unwrap_model(model), options=options)
    with fsdp_compile.full_params(accelerator.unwrap_model(model), writeback=False):
        accelerator.save_model(model, how)
    if accelerator.is_main_process:
        saved = load_file(Path(how) / "model.safetensors")
        assert saved.keys() == full.keys()
        assert all(torch.equal(saved[name], torch.as_tensor(value)) for name, value in full.items())
    report([*found, {name: torch.as_tensor(value).norm().item() for name, value in full.items()}])


if __name__ == "__main__":
    run(main)
