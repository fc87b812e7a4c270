"""State that is saved and loaded, and parameters that are converted, swapped, frozen or written to."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from fsdp_compile.errors import UnsupportedModelError
from tests.fsdp2.decoder import WIDTH, Decoder, batch, case, cross_entropy, pair_of, through_a_function, trains
from tests.two_sides import adamw

# State.


@case("state")
def loaded_between_steps() -> None:
    pair = pair_of()
    compiled = pair.compiled()
    pair.train(compiled, steps=1)
    saved = {key: value.clone() for key, value in pair.model.state_dict().items()}
    pair.train(compiled, steps=1)
    pair.change(lambda model: model.load_state_dict(saved))
    pair.train(compiled, steps=1)
    pair.change(lambda model: model.load_state_dict({key: value.clone() for key, value in saved.items()}, assign=True))
    pair.optimizers.clear()
    pair.train(compiled)
    for each in pair:
        for parameter in each.parameters():
            parameter.data = parameter.data * 0.9
    pair.train(compiled, steps=1)
    pair.train(pair.model, steps=1)


@contextlib.contextmanager
def _shared_folder() -> Iterator[str]:
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    yield folder[0]
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)


@case("state")
def saved_by_dcp() -> None:
    pair = pair_of()
    pair.train(pair.compiled())
    own, theirs = pair.optimizers[0]
    with _shared_folder() as folder:
        model_state, optimizer_state = get_state_dict(pair.model, own)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        loaded = pair_of()
        loaded.reference = loaded.other = pair.reference
        loaded.steps = pair.steps
        optimizer = adamw(list(loaded.model.parameters()))
        model_state, optimizer_state = get_state_dict(loaded.model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        set_state_dict(loaded.model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    loaded.optimizers.append((optimizer, theirs))
    loaded.train(loaded.compiled())
    full = get_model_state_dict(loaded.model, options=StateDictOptions(full_state_dict=True))
    weight = full["blocks.0.a.weight"]
    assert isinstance(weight, torch.Tensor)
    assert weight.shape == (2 * WIDTH, WIDTH)


class _Reads(Decoder):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + torch.stack([p.sum() for p in self.norm.parameters()]).sum()


trains("state", "read_in_a_forward", _Reads)


# Parameters that are converted, swapped and frozen.


@case("changes")
def swapped_tensors() -> None:
    pair = pair_of()
    compiled = pair.compiled()
    pair.train(compiled, steps=1)
    for each in pair:
        parameter = each.blocks[0].a.weight
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 2))
        each.load_state_dict(each.state_dict())
    if dist.get_rank() >= 0:
        for ours in (compiled, pair.model):
            pair.zero_grad()
            cross_entropy(ours, batch(1)).backward()
            assert pair.model.blocks[0].a.weight.grad is not None


@case("changes")
def before_a_compiled_function_again() -> None:
    pair = pair_of()
    model = pair.model
    step, loss = through_a_function(pair)

    pair.train(model, steps=1, loss=loss)
    for each in pair:
        each.blocks[0].requires_grad_(requires_grad=False)
    pair.train(model, steps=1, loss=loss)
    for each in pair:
        each.blocks[0].requires_grad_(requires_grad=True)
    with pytest.raises(UnsupportedModelError, match="frozen are trained now, and a compiled function"):
        step(batch(2))
    pair.train(model, loss=loss)
