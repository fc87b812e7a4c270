"""The small Llama, and how transformers' Trainer and those of TRL train it in these programs."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, Trainer, TrainerCallback

from tests.integrations.programs.report import report
from tests.models import llama

ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-3,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}
"""What all trainers are given."""
config, model = llama.config, llama.model
FOUR_STEPS: dict[str, Any] = {
    **ARGUMENTS,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "max_grad_norm": 0.5,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
}


def callbacks(how: str, model: PreTrainedModel) -> list[TrainerCallback]:
    """None for DDP."""
    if how != "fsdp":
        return []
    from fsdp_compile.integrations.transformers import FSDPCallback

    return [FSDPCallback(model, options={"lower": "eager"})]


def train(trainer: Trainer, shown: tuple[str, ...], resume_from: str | None = None) -> None:
    """Trains, and reports some of what the trainer logs."""
    trainer.train(resume_from_checkpoint=resume_from)
    report([{k: v for k, v in entry.items() if k in shown} for entry in trainer.state.log_history])
