"""LoRA adapters of peft on a frozen, sharded Llama.

torchrun --nproc-per-node 2 docs/examples/lora.py
"""

import os

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_compile

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group()
torch.manual_seed(0)

config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)  # fmt: skip
base = LlamaForCausalLM(config).to(device)  # your model: LlamaForCausalLM.from_pretrained(...)
model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
fsdp_compile.fully_shard(model)  # frozen parameters are sharded, too
model.compile(backend="fsdp")
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

generator = torch.Generator().manual_seed(dist.get_rank())  # each rank draws its own data
tokens = torch.randint(0, 64, (2, 16), generator=generator).to(device)
losses = []
for _ in range(5):
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

with fsdp_compile.full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):  # on every rank
    if dist.get_rank() == 0:
        model.save_pretrained("adapters")
if dist.get_rank() == 0:
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
dist.destroy_process_group()
