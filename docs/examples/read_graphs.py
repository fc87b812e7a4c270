"""Read the transformed graphs: where does the all-gather of layer 1 start, and where is it waited for?

torchrun --nproc-per-node 2 docs/examples/read_graphs.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fsdp_compile

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group()
torch.manual_seed(0)

model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))).to(device)
for layer in model:
    fsdp_compile.fully_shard(layer)  # one unit per layer, named "0" to "3"
fsdp_compile.fully_shard(model)
# `lower="eager"` runs the graphs as they are written; `bucket_mb=0` keeps these tiny units in collectives of their own.
options = {"lower": "eager", "bucket_mb": 0, "artifacts": "graphs"}
compiled = torch.compile(model, backend="fsdp", options=options)
compiled(torch.randn(8, 64, device=device)).square().mean().backward()
dist.barrier()

# The first rank has written the graph before and after each pass: graph00-forward/0-captured.txt and so on.
if dist.get_rank() == 0:
    files = [file for file in Path("graphs/graph00-forward").iterdir() if file.name.count(".") == 1]
    last = max(files, key=lambda file: int(file.name.partition("-")[0]))
    for number, line in enumerate(last.read_text().splitlines()):
        # A node that a pass inserted names its role and its unit.
        if "unit=1," in line and ("role=gather," in line or "role=gather_wait," in line):
            print(f"{last.name}, line {number}: {line}")
dist.destroy_process_group()
