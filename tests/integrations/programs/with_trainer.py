"""transformers' Trainer: accumulation, clipping, evaluation, checkpoints; by DDP, or by FSDPCallback."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tests.integrations.programs.report import report, run


def _arguments(folder: str, smoothing: float, *, sharded: bool) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=1,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        max_grad_norm=0.5,
        label_smoothing_factor=smoothing,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_only_model=sharded,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )


def main(how: str, folder: str, smoothing: str = "0", resume_from: str | None = None) -> None:
    """Trains a small Llama and reports losses, gradient norms and evaluation losses."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, attention_dropout=0.1,
        )
    )  # fmt: skip
    rows = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    callbacks: list[TrainerCallback] = []
    if how == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh

        from fsdp_compile import fully_shard
        from fsdp_compile.integrations.transformers import FSDPCallback

        if folder.endswith("replicated"):
            fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
        callbacks.append(FSDPCallback(model, options={"lower": "eager"}))
    arguments = _arguments(folder, float(smoothing), sharded=how == "fsdp")
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:16], callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume_from)
    shown = ("loss", "grad_norm", "eval_loss")
    report([{k: v for k, v in entry.items() if k in shown} for entry in trainer.state.log_history])


if __name__ == "__main__":
    run(main)
