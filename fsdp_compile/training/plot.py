"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from fsdp_compile.training.metrics import Record, held_out_losses


def plot_losses(records: Sequence[Record], path: Path) -> bool:
    """Draw training and held-out loss over steps.

    Args:
        records: Metrics of a run.
        path: The PNG to write.

    Returns:
        Whether it was drawn: it is not where matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        return False
    # The object interface draws without a display and without global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per byte)")
    training = [(record.step, record.loss) for record in records if record.loss is not None]
    held_out = held_out_losses(records)
    axes.plot(*zip(*training, strict=True), linewidth=1, label="training batch")
    axes.plot(*zip(*held_out, strict=True), marker="o", label="held-out text")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    return True
