"""TRL's SFTTrainer: accumulation, clipping, evaluation, checkpoints; by DDP, or by FSDPCallback."""

from __future__ import annotations

from typing import Any

import torch
import trl.trainer.utils
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from tests.integrations.programs import llama
from tests.integrations.programs.report import run

SPECIAL: dict[str, Any] = {"vocab_size": 63, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
"""Of a model with this tokenizer."""
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


def texts(seed: int, count: int) -> list[str]:
    """Sentences of 3 to 14 words, so that rows are padded and ranks have different numbers of tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 15, (count,), generator=generator).tolist()
    rows = [torch.randint(0, len(WORDS), (length,), generator=generator).tolist() for length in lengths]
    return [" ".join(WORDS[i] for i in row) for row in rows]


def main(how: str, loss: str) -> None:
    """Trains a small Llama and reports losses, gradient norms, evaluation losses and TRL's own metrics."""
    trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = 24  # so that a vocabulary of 63 has three parts
    torch.manual_seed(0)
    model = llama.model(**SPECIAL)
    data = Dataset.from_dict({"text": texts(1, 64)})
    callbacks = llama.callbacks(how, model)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=how,
            save_only_model=how == "fsdp",
            pad_to_multiple_of=16,
            **llama.FOUR_STEPS,
            **LOSSES[loss],
        ),
        train_dataset=data,
        eval_dataset=data.select(range(16)),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )
    llama.train(trainer, ("loss", "grad_norm", "eval_loss", "entropy", "mean_token_accuracy", "num_tokens"))


if __name__ == "__main__":
    run(main)
