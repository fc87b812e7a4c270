"""TRL's DPOTrainer, RewardTrainer and GRPOTrainer on rows of different lengths; by DDP, or by FSDPCallback."""

from __future__ import annotations

import copy
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

from tests.integrations.programs.report import report, run
from tests.integrations.programs.with_trl import WORDS, tokenizer

SHOWN = ("loss", "grad_norm", "reward", "reward_std", "rewards/chosen", "rewards/margins", "accuracy", "margin")


def _texts(seed: int) -> list[str]:
    """Sentences of 3 to 14 words, so that rows are padded and ranks have different numbers of tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 15, (32,), generator=generator).tolist()
    rows = [torch.randint(0, len(WORDS), (length,), generator=generator).tolist() for length in lengths]
    return [" ".join(WORDS[i] for i in row) for row in rows]


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(int(word[1:]) for word in text.split() if word in WORDS) % 7) for text in completions]


def main(how: str, kind: str, folder: str) -> None:
    """Trains a small Llama for three steps and reports losses, gradient norms and rewards."""
    torch.manual_seed(0)
    made: Any = LlamaConfig
    config = made(
        vocab_size=63, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None, num_labels=1,
    )  # fmt: skip
    model: Any = (LlamaForSequenceClassification if kind == "reward" else LlamaForCausalLM)(config)
    reference = copy.deepcopy(model)
    callbacks: list[TrainerCallback] = []
    if how == "fsdp":
        from fsdp_compile.integrations.transformers import FSDPCallback

        callbacks.append(FSDPCallback(model, options={"lower": "eager"}))
    common: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    given: dict[str, Any] = {"model": model, "processing_class": tokenizer(), "callbacks": callbacks}
    data = {"prompt": _texts(1), "chosen": _texts(2), "rejected": _texts(3)}
    trainer: Any
    if kind == "dpo":
        trainer = DPOTrainer(
            ref_model=reference, args=DPOConfig(**common), train_dataset=Dataset.from_dict(data), **given
        )
    elif kind == "reward":
        pairs = {key: data[key] for key in ("chosen", "rejected")}
        trainer = RewardTrainer(args=RewardConfig(**common), train_dataset=Dataset.from_dict(pairs), **given)
    else:
        arguments = GRPOConfig(
            num_generations=4, max_completion_length=4, generation_kwargs={"min_new_tokens": 4}, **common
        )
        prompts = Dataset.from_dict({"prompt": data["prompt"]})
        trainer = GRPOTrainer(reward_funcs=_reward, args=arguments, train_dataset=prompts, **given)
    trainer.train()
    report([{k: v for k, v in entry.items() if k in SHOWN} for entry in trainer.state.log_history])


if __name__ == "__main__":
    run(main)
