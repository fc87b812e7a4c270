"""`fsdp-compile train`: a Llama-style language model trained on real text, one concern per file.

`config.py` has every option, `job.py` a run's folder, `launch.py` its ranks; `data.py` and `model.py` say what is
computed, `checkpoint_folder.py` and `checkpoint.py` what is saved and loaded; `trainer.py` runs, `metrics.py` shows.
"""
