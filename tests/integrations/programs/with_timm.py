"""timm's training loop: models, tasks, optimizers, schedules, moving averages; compiled, or in eager code."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask
from timm.utils import NativeScaler, distribute_bn, reduce_tensor, unwrap_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import fsdp_compile
from tests.integrations.programs.report import report, run

MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)},
    "resnet10t": {},
}
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
STEPS, ACCUMULATED = 4, 2


def _save(task: ClassificationTask, optimizer: torch.optim.Optimizer, file: Path) -> None:
    """Writes what timm's `CheckpointSaver` does, as it was before: full values."""
    model, averaged = unwrap_model(task.get_trainable_module()), task.trainable_module_ema.module
    state = {
        "state_dict": get_model_state_dict(model, options=FULL),
        "state_dict_ema": get_model_state_dict(averaged, options=FULL),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FULL),
    }
    if dist.get_rank() == 0:
        torch.save(state, file)
    dist.barrier()


def _evaluate(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(images), labels)
    return reduce_tensor(loss, dist.get_world_size()).item()


def main(how: str, name: str, optimizer_name: str, clip_mode: str) -> None:
    """Trains four steps and reports losses, learning rates, evaluations of both models, and norms of what is saved."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, drop_path_rate=0.0, **MODELS[name])
    task = ClassificationTask(model, criterion_kwargs={"smoothing": 0.1}, verbose=False)
    averaged = task.setup_ema(decay=0.9, use_warmup=True)
    averaged.foreach = False  # torch takes no list of DTensors and tensors, parameters and buffers
    fsdp_compile.fully_shard(model)
    fsdp_compile.fully_shard(averaged.module)
    if how == "fsdp":
        task.compile(backend="fsdp", options={"lower": "eager"})
    optimizer = create_optimizer_v2(model, opt=optimizer_name, lr=1e-2, weight_decay=0.05, momentum=0.9, eps=1e-3)
    schedule, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=4, warmup_epochs=2, step_on_epochs=False, updates_per_epoch=2
    )
    scaler = NativeScaler(device="cpu")
    generator = torch.Generator().manual_seed(rank)
    found: list[dict[str, float]] = []
    task.get_trainable_module().train()
    for update in range(1, STEPS + 1):
        losses = []
        for micro in range(ACCUMULATED):
            last = micro == ACCUMULATED - 1
            images = torch.randn(2, 3, 32, 32, generator=generator)
            labels = torch.randint(0, 10, (2,), generator=generator)
            with contextlib.nullcontext() if last else task.no_sync():
                loss = task(images, labels)["loss"] / ACCUMULATED
                parameters = task.get_clip_parameters(exclude_head=clip_mode == "agc")
                scaler(loss, optimizer, clip_grad=0.1, clip_mode=clip_mode, parameters=parameters, need_update=last)
            losses.append(loss.detach())
        optimizer.zero_grad()
        task.update_ema(step=update)
        mean = reduce_tensor(torch.stack(losses).sum(), dist.get_world_size())
        found.append({"loss": mean.item(), "lr": optimizer.param_groups[0]["lr"]})
        schedule.step_update(num_updates=update)
    images, labels = torch.randn(4, 3, 32, 32, generator=generator), torch.randint(0, 10, (4,), generator=generator)
    assert isinstance(next(model.parameters()), DTensor)
    both = task.get_trainable_module(), averaged
    for each in both:
        distribute_bn(each, dist.get_world_size(), reduce=True)
    found.append({"evaluated": _evaluate(both[0], images, labels), "averaged": _evaluate(both[1], images, labels)})
    file = Path(f"{how}.pt")
    _save(task, optimizer, file)
    saved = torch.load(file)
    norms = [
        {name: value.double().norm().item() for name, value in saved[key].items()}
        for key in ("state_dict", "state_dict_ema")
    ]
    report([*found, *norms])


if __name__ == "__main__":
    run(main)
