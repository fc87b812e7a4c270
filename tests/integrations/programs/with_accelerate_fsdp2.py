"""accelerate's plugin for FSDP2: accumulation, clipping, checkpoints; as it is, or taken over when it is compiled."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from tests.integrations.programs import llama
from tests.integrations.programs.report import report, run


def _train(accelerator: Accelerator, called: Any, model: Any, optimizer: Any, batches: list[Any]) -> list[Any]:
    found = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = called(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm: Any = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                found.append({"loss": accelerator.gather(loss.detach()).mean().item(), "norm": whole.item()})
            optimizer.step()
            optimizer.zero_grad()
    return found


def main(how: str, mixed_precision: str, state_dict_type: str, tied: str) -> None:
    """Trains four steps, saves after two, loads, and trains the last two again; reports losses, norms and weights."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type=state_dict_type,
    )
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed_precision, fsdp_plugin=plugin
    )
    # accelerate sets these on accelerators alone: on a CPU it forgets the plugin and takes DDP.
    for state in (accelerator.state, PartialState()):
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    rows: Any = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=4)
    torch.manual_seed(0)
    model: Any = llama.model(tie_word_embeddings=tied == "tied", use_cache=False)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    called = model
    if how == "in_place":
        model.compile(backend="fsdp", options={"lower": "eager"})
    elif how == "fsdp2_compiled":
        model.compile(backend="aot_eager")
    elif how == "function":
        called = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    batches = list(loader)
    found = _train(accelerator, called, model, optimizer, batches[:4])
    assert any(isinstance(module, FSDPModule) for module in model.modules())
    accelerator.save_state("state")
    for _ in range(2):
        found += _train(accelerator, called, model, optimizer, batches[4:])
        accelerator.load_state("state")
    found += _train(accelerator, called, model, optimizer, batches[4:6])
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    report([*found, {name: torch.as_tensor(value).double().norm().item() for name, value in full.items()}])


if __name__ == "__main__":
    run(main)
