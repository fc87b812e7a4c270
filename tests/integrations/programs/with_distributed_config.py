"""A transformers model that `from_pretrained` shards while it loads: as it is, by FSDP2, or taken over."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

from tests.integrations.programs import llama
from tests.integrations.programs.report import report, run

FOLDER = Path("a_small_llama")


def main(how: str) -> None:
    """Trains four steps, takes over before the third, and reports losses, gradient norms, what `generate` makes."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        torch.manual_seed(0)
        llama.model().save_pretrained(FOLDER)
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(FOLDER, distributed_config=DistributedConfig(fsdp_size=2))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    found = []
    for step in range(4):
        if how == "fsdp" and step == 2:
            model.compile(backend="fsdp", options={"lower": "eager"})
        rows = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(step)).chunk(2)[rank]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
        found.append({"loss": loss.item(), "norm": norm.item()})
    model.save_pretrained(FOLDER / "trained")
    dist.barrier()
    again = LlamaForCausalLM.from_pretrained(FOLDER / "trained")
    report([*found, {name: p.norm().item() for name, p in again.named_parameters()}])


if __name__ == "__main__":
    run(main)
