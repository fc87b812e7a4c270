"""A Llama that starts on meta and loads a Hugging Face checkpoint: no rank ever holds the whole model.

torchrun --nproc-per-node 2 docs/examples/meta_safetensors.py [folder with config.json and *.safetensors]
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_compile

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group()

folder = sys.argv[1] if len(sys.argv) > 1 else "tiny-llama"
if len(sys.argv) == 1 and dist.get_rank() == 0:  # no folder was given: make a tiny checkpoint
    tiny = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )  # fmt: skip
    LlamaForCausalLM(tiny).save_pretrained(folder)
dist.barrier()

with torch.device("meta"):
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))  # shapes only
fsdp_compile.fully_shard(model)
fsdp_compile.materialize(model, param_init_fn=model._init_weights)  # also fills buffers, such as RoPE's
state = model.state_dict()
if model.config.tie_word_embeddings:
    del state["lm_head.weight"]  # the files have only one of the two names
load(state, storage_reader=HuggingFaceStorageReader(folder))  # each rank reads its shards

model.compile(backend="fsdp")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(dist.get_rank())  # each rank draws its own data
tokens = torch.randint(0, 64, (4, 16), generator=generator).to(device)
losses = []
for _ in range(5):
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if dist.get_rank() == 0:
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
dist.destroy_process_group()
