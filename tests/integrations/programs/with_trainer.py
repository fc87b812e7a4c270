"""transformers' Trainer: accumulation, clipping, evaluation, checkpoints; by DDP, or by FSDPCallback."""

from __future__ import annotations

import torch
from transformers import Trainer, TrainingArguments

from tests.integrations.programs import llama
from tests.integrations.programs.report import run


def main(how: str, folder: str, smoothing: str = "0", resume_from: str | None = None) -> None:
    """Trains a small Llama and reports losses, gradient norms and evaluation losses."""
    torch.manual_seed(0)
    model = llama.model(attention_dropout=0.1)
    rows = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    if folder.endswith("replicated"):
        from torch.distributed.device_mesh import init_device_mesh

        from fsdp_compile import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    callbacks = llama.callbacks(how, model)
    arguments = TrainingArguments(
        output_dir=folder, label_smoothing_factor=float(smoothing), save_only_model=how == "fsdp", **llama.FOUR_STEPS
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:16], callbacks=callbacks)
    llama.train(trainer, ("loss", "grad_norm", "eval_loss"), resume_from)


if __name__ == "__main__":
    run(main)
