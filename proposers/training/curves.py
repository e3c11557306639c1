"""Draws how a run went."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_curves(reports: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Loss and overlap of each draft, and mean length on held-out texts, by step, as a PNG.

    Args: reports: of run_folder.RunFolder.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needed here alone, and slow to import
    from matplotlib.figure import Figure

    trained = [entry for entry in reports if entry["what"] == "train"]
    measured = [entry for entry in reports if entry["what"] == "heldout"]
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    loss, overlap, length = figure.subplots(1, 3)
    for axes, name in ((loss, "loss"), (overlap, "overlap")):
        for draft in range(len(trained[0][name]) if trained else 0):
            steps = [entry["step"] for entry in trained]
            axes.plot(steps, [entry[name][draft] for entry in trained], label=f"draft {draft + 1}", linewidth=1)
    for name in measured[0]["mean_length"] if measured else ():
        steps = [entry["step"] for entry in measured]
        length.plot(steps, [entry["mean_length"][name] for entry in measured], marker=".", label=name)
    loss.set(title="loss", xlabel="step", ylabel="cross-entropy, nats")
    overlap.set(title="drawn drafts that would be kept", xlabel="step", ylabel="probability")
    length.set(title="held-out texts", xlabel="step", ylabel="tokens a step")
    for axes in (loss, overlap, length):
        axes.grid(visible=True, alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize="small")
    FigureCanvasAgg(figure)
    figure.savefig(path)
