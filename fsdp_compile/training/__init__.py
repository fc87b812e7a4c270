"""`fsdp-compile train`: a Llama-style language model trained on real text, one concern per file.

`config.py` has every option, `job.py` a run's folder, new or resumed; `placement.py`, `launch.py`, `world.py` the ranks;
`data.py`, `model.py`, `trainer.py` what a step computes; `checkpoint_folder.py`, `checkpoint.py` saves and loads;
`metrics.py` what is measured and shown; `loop.py` the run itself.
"""
