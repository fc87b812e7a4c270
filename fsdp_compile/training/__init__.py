"""`fsdp-compile train`: a Llama-style language model trained on real text, one concern per file.

`config.py` has every option, `job.py` a run's folder, new or resumed; `placement.py`, `launch.py` and `world.py` have the
ranks; `data.py`, `model.py` and `trainer.py` what a step computes; `checkpoint_folder.py` and `checkpoint.py` what is
saved and loaded; `metrics.py` what is measured and shown; `loop.py` the run itself.
"""
