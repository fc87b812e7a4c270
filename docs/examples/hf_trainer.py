"""transformers' Trainer: one callback shards and compiles the model.

torchrun --nproc-per-node 2 docs/examples/hf_trainer.py
"""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fsdp_compile.integrations.transformers import FSDPCallback

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)  # fmt: skip
model = LlamaForCausalLM(config)
rows = torch.randint(0, 8, (64, 16))
data = [{"input_ids": row, "labels": row} for row in rows]
arguments = TrainingArguments(
    output_dir="trainer",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=6,
    logging_steps=1,
    learning_rate=1e-2,
    save_steps=3,
    save_only_model=True,  # the callback saves the optimizer's shards
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
)
callback = FSDPCallback(model)  # before the Trainer is made
trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback])
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if dist.get_rank() == 0:
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
dist.destroy_process_group()
