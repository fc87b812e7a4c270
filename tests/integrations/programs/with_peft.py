"""LoRA adapters of peft on a frozen model, saved as peft saves them; by DDP, or sharded by this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

import fsdp_compile
from tests.integrations.programs import llama
from tests.integrations.programs.report import report, run


def main(how: str) -> None:
    """Trains the adapters four steps, saves them and reports losses and the norms of the saved file."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = get_peft_model(llama.model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    called: Any = model
    if how == "fsdp":
        fsdp_compile.fully_shard(model)
        model.compile(backend="fsdp", options={"lower": "eager"})
    else:
        called = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(4):
        rows = torch.randint(0, 64, (2, 16), generator=generator)
        loss = called(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append({"loss": mean.item() / dist.get_world_size()})
    with fsdp_compile.full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        if dist.get_rank() == 0:
            model.save_pretrained(how)
            saved = load_file(Path(how, "adapter_model.safetensors"))
            found.append({name: value.norm().item() for name, value in saved.items()})
    report(found)


if __name__ == "__main__":
    run(main)
