"""TRL's SFTTrainer: accumulation, clipping, evaluation, checkpoints; by DDP, or by FSDPCallback."""

from __future__ import annotations

from typing import Any

import torch
import trl.trainer.utils
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from tests.integrations.programs.report import report, run

WORDS = [f"w{i}" for i in range(60)]
LOSSES: dict[str, dict[str, Any]] = {
    "nll": {},  # projected to logits part by part, as all that TRL trains by itself
    "dft": {"loss_type": "dft"},
    "whole_logits": {"label_smoothing_factor": 0.1},
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Of whole words."""
    names = ["<pad>", "<eos>", "<unk>", *WORDS]
    tokens = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokens.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _texts() -> Dataset:
    """Sentences of 3 to 14 words, so that ranks have different numbers of tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 15, (64,), generator=generator).tolist()
    rows = [torch.randint(0, len(WORDS), (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict({"text": [" ".join(WORDS[i] for i in row) for row in rows]})


def _arguments(folder: str, loss: str, *, bf16: bool, sharded: bool) -> SFTConfig:
    return SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=1,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        max_grad_norm=0.5,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_only_model=sharded,
        report_to=[],
        use_cpu=True,
        bf16=bf16,
        disable_tqdm=True,
        pad_to_multiple_of=16,
        **LOSSES[loss],
    )


def main(how: str, loss: str, precision: str, folder: str, resume_from: str | None = None) -> None:
    """Trains a small Llama and reports losses, gradient norms, evaluation losses and TRL's own metrics."""
    trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = 24  # so that a vocabulary of 63 has three parts
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=63, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip
    callbacks: list[TrainerCallback] = []
    if how == "fsdp":
        from fsdp_compile.integrations.transformers import FSDPCallback

        callbacks.append(FSDPCallback(model, options={"lower": "eager"}))
    texts = _texts()
    trainer = SFTTrainer(
        model=model,
        args=_arguments(folder, loss, bf16=precision == "bf16", sharded=how == "fsdp"),
        train_dataset=texts,
        eval_dataset=texts.select(range(16)),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume_from)
    shown = ("loss", "grad_norm", "eval_loss", "entropy", "mean_token_accuracy", "num_tokens")
    report([{k: v for k, v in entry.items() if k in shown} for entry in trainer.state.log_history])


if __name__ == "__main__":
    run(main)
