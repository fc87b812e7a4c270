"""`fsdp-compile train`: a Llama-style language model trained on real text, one concern per file.

`config.py` has every option, `job.py` a run's folder; `placement.py`, `launch.py` and `world.py` its ranks;
`data.py` and `model.py` what is computed; `checkpoint_folder.py` and `checkpoint.py` what is saved and loaded;
`metrics.py` what is measured and shown; `trainer.py` the run itself.
"""
