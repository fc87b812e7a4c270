"""TRL's DPOTrainer, RewardTrainer and GRPOTrainer on rows of different lengths; by DDP, or by FSDPCallback."""

from __future__ import annotations

import copy
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, LlamaForSequenceClassification
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

from tests.integrations.programs import llama
from tests.integrations.programs.report import run
from tests.integrations.programs.with_trl import SPECIAL, WORDS, texts, tokenizer

SHOWN = ("loss", "grad_norm", "reward", "reward_std", "rewards/chosen", "rewards/margins", "accuracy", "margin")


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(int(word[1:]) for word in text.split() if word in WORDS) % 7) for text in completions]


def main(how: str, kind: str) -> None:
    """Trains a small Llama for three steps and reports losses, gradient norms and rewards."""
    torch.manual_seed(0)
    of_kind = LlamaForSequenceClassification if kind == "reward" else LlamaForCausalLM
    model: Any = of_kind(llama.config(**SPECIAL, num_labels=1))
    reference = copy.deepcopy(model)
    callbacks = llama.callbacks(how, model)
    common = {**llama.ARGUMENTS, "output_dir": how, "max_steps": 3, "save_strategy": "no"}
    given: dict[str, Any] = {"model": model, "processing_class": tokenizer(), "callbacks": callbacks}
    data = {"prompt": texts(1, 32), "chosen": texts(2, 32), "rejected": texts(3, 32)}
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
    llama.train(trainer, SHOWN)


if __name__ == "__main__":
    run(main)
