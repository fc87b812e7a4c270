"""Text that a trained model writes."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: str,
    *,
    size_bytes: int,
    seq_len: int,
    temperature: float,
    seed: int,
    device: torch.device,
) -> str:
    """Continue a prompt byte by byte; every rank calls this, since each byte gathers the parameters.

    Args:
        model: Tokens (1, T) int64 to logits (1, T, 256), not compiled: each length of the growing text would
            be another shape to compile for.
        prompt: Text to continue, not empty.
        size_bytes: Bytes to add.
        seq_len: Bytes of context that the model takes.
        temperature: Divides the logits; 0 takes the likeliest byte.
        seed: Decides the dice, the same on every rank.
        device: Of the model.

    Returns:
        The prompt and what follows it; bytes that are not UTF-8 become U+FFFD.
    """
    dice = torch.Generator().manual_seed(seed)
    text = list(prompt.encode(errors="surrogateescape"))  # gives back bytes of the command line that are not UTF-8
    for _ in range(size_bytes):
        context = torch.tensor([text[-seq_len:]], device=device)
        logits = model(context)[0, -1].float().cpu()
        if temperature == 0:
            text.append(int(logits.argmax()))
        else:
            weights = torch.softmax(logits / temperature, dim=0)
            text.append(int(torch.multinomial(weights, 1, generator=dice)))
    return bytes(text).decode(errors="replace")
