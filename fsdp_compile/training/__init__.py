"""`fsdp-compile train`: a Llama-style language model trained on real text, one concern per file.

The way of one run:

| file | does |
|---|---|
| `config.py` | what is trained: every option, checked; the learning rate of every step |
| `job.py` | one run: its options, its folder, new or resumed |
| `launch.py` | starts the local ranks, or joins an existing `torchrun` |
| `world.py` | this rank, its device, its process group |
| `data.py` | text as bytes; which windows of it each step and rank reads |
| `model.py` | the model, and text that it writes |
| `trainer.py` | `torch.compile(model, backend="fsdp")`, AdamW, one step, the held-out loss |
| `nonfinite.py` | which unit's gradient was the first that is not finite |
| `state_bytes.py` | bytes of training state of a rank and of an unsharded one |
| `checkpoint_folder.py`, `checkpoint.py` | which checkpoints are complete and kept; how ranks write and load them |
| `run_lock.py` | one run at a time in a folder |
| `metrics.py` | what a run leaves in its folder, and what it shows |
| `loop.py` | the run itself |
"""
