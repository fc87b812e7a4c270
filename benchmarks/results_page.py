"""The tables of `docs/results.md` with their pictures, and README's, out of `benchmarks/results/`.

Each number on the page comes from a file, and beside it stand the command, the machine and the versions of the file.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import readme_table
from benchmarks.command import RESULTS, mib, ms, percent

Row = Mapping[str, Any]
Document = Mapping[str, Any]
Write = Callable[[Any], str]
DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "results.md"
_BEGIN, _END = "<!-- written by `python -m benchmarks.results_page` -->\n", "<!-- end -->\n"


@dataclasses.dataclass(frozen=True)
class Section:
    """How the results of one benchmark are shown.

    Attributes:
        benchmark: Its name, and that of its file.
        title: Heading.
        about: What is to be seen.
        columns: Field of a row to heading and how it is written.
        rows: Takes the rows out of the document.
        draw: Draws them into the axes of a figure; `None` for a table alone.
    """

    benchmark: str
    title: str
    about: str
    columns: Mapping[str, tuple[str, Write]]
    rows: Callable[[Document], list[Row]] = lambda document: list(document["results"])
    draw: Callable[[Any, Sequence[Row]], None] | None = None

    @property
    def picture(self) -> Path:
        """Where its figure is."""
        return DOCS / f"results_{self.benchmark}.png"

    def text(self, document: Document) -> str:
        """The section as Markdown."""
        rows = self.rows(document)
        shown = [name for name in self.columns if any(row.get(name) is not None for row in rows)]
        head = [self.columns[name][0] for name in shown]
        cells = [[_cell(row, name, self.columns[name][1]) for name in shown] for row in rows]
        lines = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *cells)]
        picture = [f"![{self.title}]({self.picture.name})", ""] if self.draw is not None else []
        parts = [f"## {self.title}", "", self.about, "", *picture, *lines, "", _where(document)]
        return "\n".join(parts) + "\n"


def _cell(row: Row, name: str, write: Write) -> str:
    value = row.get(name)
    if value is not None:
        return write(value)
    return "does not run" if row.get("error") and name != "contender" else ""


def _where(document: Document) -> str:
    """Command, machine and versions."""
    machine, settings = document["environment"], document["settings"]
    packages = ", ".join(f"{name} {machine['packages'][name]}" for name in ("torch", "transformers"))
    settled = ", ".join(f"{key} {_plain(value)}" for key, value in settings.items() if _is_telling(key, value))
    devices = "".join(f", {device}" for device in machine["devices"])
    return (
        f"`python -m benchmarks.{document['benchmark']}` ({settled}), {machine['time'][:10]}, commit "
        f"{machine['commit'][:10]}: {machine['cores']} cores of an {machine['processor']}{devices}, {packages}, "
        f"CPython {machine['python']}.{document.get('note', '')}"
    )


def _is_telling(key: str, value: object) -> bool:
    return value not in (None, [], False) and not isinstance(value, dict) and key not in ("benchmark", "out")


def _plain(value: object) -> str:
    if isinstance(value, list):
        return "/".join(map(_plain, value))
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _times(ratio: float) -> str:
    return f"{ratio:.2f} x"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s"


def _ranks(ranks: int) -> str:
    return f"{ranks:,}"


def _steps(document: Document) -> list[Row]:
    """One row for each contender at each ratio."""
    return [
        {"communication_over_compute": section["communication_over_compute"], **row}
        for section in document["results"]
        for row in section["contenders"]
    ]


def _with(field: str) -> Callable[[Document], list[Row]]:
    """Rows that have a field: of a file with two kinds of them."""
    return lambda document: [row for row in document["results"] if field in row]


def _colour(contender: str) -> str:
    """A colour for FSDP2, one for this package, lighter ones for their variants, and greys for everything else."""
    shades = {"fsdp2": ("#c2571a", "#e5a47e"), "fsdp_compile": ("#2b7bba", "#8fc1e6")}
    for name, (dark, light) in shades.items():
        if contender.startswith(name):
            return dark if contender == name else light
    return {"unsharded": "#e2e5ea", "ddp": "#c3c9d2", "fsdp1": "#98a2b3"}.get(contender, "#667085")


def _draw_bars(field: str, scale: float, label: str) -> Callable[[Any, Sequence[Row]], None]:
    """One bar for each contender, with its number; `scale` takes the field to the unit of the label."""

    def draw(axes: Any, rows: Sequence[Row]) -> None:
        shown = [row for row in rows if row.get(field) is not None]
        colours = [_colour(row["contender"]) for row in shown]
        bars = axes.barh([_name(row) for row in shown], [row[field] * scale for row in shown], color=colours)
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        axes.margins(x=0.1)
        axes.invert_yaxis()
        axes.set_xlabel(label)

    return draw


def _name(row: Row) -> str:
    budget = row.get("budget_bytes")
    return row["contender"] if budget is None else f"{row['contender']}, {mib(budget)}"


def _draw_steps(axes: Any, rows: Sequence[Row]) -> None:
    """Steps as bars, and the lower bound of each as a line across it."""
    names = list(dict.fromkeys(row["contender"] for row in rows if "median_s" in row))
    ratios = list(dict.fromkeys(row["communication_over_compute"] for row in rows))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        named = {r["communication_over_compute"]: r for r in rows if r["contender"] == name and "median_s" in r}
        for index, ratio in enumerate(ratio for ratio in ratios if ratio in named):
            at, row = index + (place - (len(names) - 1) / 2) * width, named[ratio]
            label = name if index == 0 else None
            axes.bar(at, 1e3 * row["median_s"], width, label=label, color=_colour(name), edgecolor="white")
            axes.plot(at, 1e3 * row["bound_s"], linestyle="", marker="_", color="black", markersize=7)
    axes.set_xticks(range(len(ratios)), [f"{ratio:g}" for ratio in ratios])
    axes.set_xlabel("communication / compute")
    axes.set_ylabel("step (ms); ticks: lower bound")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_scaling(axes: Any, rows: Sequence[Row]) -> None:
    """Steps over ranks, and the larger of compute and link in each."""
    ranks = [row["ranks"] for row in rows]
    axes.plot(ranks, [1e3 * row["step_s"] for row in rows], marker="o", label="step")
    busy = [1e3 * row["step_s"] * row["share_of_busy"] for row in rows]
    axes.plot(ranks, busy, linestyle="--", label="larger of compute and link")
    axes.set(xscale="log", xlabel="ranks", ylabel="step (ms)", ylim=(0, None))
    axes.set_xticks(ranks, map(_ranks, ranks))
    axes.minorticks_off()
    axes.legend()


_CONTENDER: dict[str, tuple[str, Write]] = {"contender": ("contender", lambda name: f"`{name}`")}
SECTIONS = (
    Section(
        "step_time",
        "Step time",
        "Forward and backward on the emulated network, beside two times: the larger of compute and of what the bytes "
        "that this contender sent take, and the lower bound over all schedules that hold as much as it does "
        "([both](#lower-bounds-of-a-step)).",
        {
            "communication_over_compute": ("communication / compute", lambda ratio: f"{ratio:g}"),
            **_CONTENDER,
            "median_s": ("median", ms),
            "busy_s": ("compute or bytes sent", ms),
            "share_of_busy": ("share of it", percent),
            "bound_s": ("lower bound", ms),
            "share_of_bound": ("share of the bound", percent),
            "total_sent_bytes": ("sent", mib),
        },
        _steps,
        _draw_steps,
    ),
    Section(
        "two_links",
        "FSDP and tensor parallelism on two links",
        "Two hosts of two ranks: a Llama split inside of each host and sharded between them, beside the largest of "
        "compute and of what the bytes on each link take ([how](#meaning-of-each-number)).",
        {
            "between": ("between hosts / compute", lambda ratio: f"{ratio:g}"),
            "inside": ("inside / compute", lambda ratio: f"{ratio:g}"),
            **_CONTENDER,
            "median_s": ("median", ms),
            "busy_s": ("compute or bytes sent", ms),
            "share_of_busy": ("share of it", percent),
            "between_bytes": ("sent between hosts", mib),
            "inside_bytes": ("inside", mib),
        },
    ),
    Section(
        "sent_bytes",
        "Bytes sent",
        "What one rank sends in a step, and the least in any schedule that holds as much.",
        {
            **_CONTENDER,
            "total_sent_bytes": ("sent", mib),
            "least_bytes": ("least", mib),
            "least_share": ("least / sent", percent),
            "padding": ("padding", lambda share: f"{share:.3%}"),
        },
    ),
    Section(
        "memory",
        "Peak memory",
        "Measured, and predicted before the model is sharded; `fsdp_compile` without a budget, and with two.",
        {
            **_CONTENDER,
            "budget_bytes": ("budget", mib),
            "peak_bytes": ("peak", mib),
            "predicted_bytes": ("predicted", mib),
            "prediction_error": ("error", percent),
        },
        draw=_draw_bars("peak_bytes", 1e-6, "peak (MB)"),
    ),
    Section(
        "activations",
        "Budgets that do not hold the activations",
        "A Llama with most of its memory in activations: no budget, the least that holds all of them, the least that is"
        " enough when blocks are computed again in backward, and halfway. The model is the same, without a change.",
        {
            "budget": ("budget", str),
            "budget_bytes": ("size", mib),
            "predicted_bytes": ("predicted peak", mib),
            "peak_bytes": ("peak", mib),
            "prediction_error": ("error", percent),
            "median_s": ("median step", ms),
            "over_unlimited": ("/ unlimited", _times),
        },
    ),
    Section(
        "cost_model",
        "The cost model",
        "Predicted beside measured.",
        {
            "what": ("what", str),
            "predicted": ("predicted", lambda value: f"{value:,.0f}"),
            "measured": ("measured", lambda value: f"{value:,.0f}"),
            "unit": ("unit", str),
            "prediction_error": ("error", percent),
        },
    ),
    Section(
        "compile_time",
        "Compile time",
        "The first step with empty caches; warm: with what an earlier start has left in Inductor's folder.",
        {
            "layers": ("layers", str),
            "nodes": ("nodes", str),
            "plain_s": ("plain `torch.compile`", _seconds),
            "fsdp_compile_s": ("`fsdp_compile`", _seconds),
            "blocks_s": ("`fsdp_compile`, by blocks", _seconds),
            "fsdp2_blocks_s": ("FSDP2, compiled blocks", _seconds),
            "blocks_warm_s": ("`fsdp_compile`, by blocks, warm", _seconds),
            "fsdp2_blocks_warm_s": ("FSDP2, compiled blocks, warm", _seconds),
            "passes_s": ("passes and verifier", _seconds),
            "passes_share": ("passes / plain", percent),
        },
    ),
    Section(
        "first_step",
        "The first step",
        "New processes, gloo, one host: with an empty folder of Inductor's (cold), and with what that left (warm).",
        {
            "ranks": ("ranks", str),
            "kind": ("caches", str),
            "step_s": ("first step", _seconds),
            "over_one": ("/ one rank", _times),
            "over_cold": ("/ cold", _times),
            "processor_s": ("processor time of all ranks", _seconds),
            "compiled": ("graphs that each rank compiled", str),
        },
    ),
    Section(
        "overhead",
        "Step overhead",
        "40 tiny layers, 200 parameters, a group that does nothing.",
        {
            **_CONTENDER,
            "step_s": ("forward and backward", ms),
            "step_ratio": ("/ plain", _times),
            "optimizer_s": ("AdamW", ms),
            "optimizer_ratio": ("/ plain tensors", _times),
        },
        draw=_draw_bars("step_s", 1e3, "forward and backward (ms)"),
    ),
    Section(
        "scaling",
        "Scaling with ranks",
        "Estimated step of Llama-3-8B, out of one trace.",
        {
            "ranks": ("ranks", _ranks),
            "step_s": ("step", ms),
            "share_of_busy": ("larger of compute and link / step", percent),
            "share_of_bound": ("lower bound / step", percent),
            "replanned_s": ("planned again in", _seconds),
        },
        _with("ranks"),
        _draw_scaling,
    ),
    Section(
        "slow_network",
        "A real slow network",
        "Two gloo ranks in network namespaces at 1 Gbit/s.",
        {**_CONTENDER, "median_s": ("median", ms), "faster_than_fsdp2": ("FSDP2's / median", _times)},
    ),
)


def documents() -> dict[str, Document]:
    """The committed results, by the names of their files: a benchmark's, or that with other arguments."""
    read = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    return {name: document for name, document in read.items() if not document["smoke"]}


def page(found: Mapping[str, Document]) -> str:
    """The sections of what was measured, as Markdown; those of whole graphs and of blocks follow each other."""
    blocks = [
        dataclasses.replace(each, benchmark=f"{each.benchmark}_blocks", title=f"{each.title}, by blocks", draw=None)
        for each in SECTIONS
    ]
    both = itertools.chain.from_iterable(zip(SECTIONS, blocks, strict=True))
    return "\n" + "\n".join(section.text(found[section.benchmark]) for section in both if section.benchmark in found)


def replaced(text: str, found: Mapping[str, Document]) -> str:
    """The page's text with the sections of these results; it goes on with how they were measured."""
    before, _, rest = text.partition(_BEGIN)
    return before + _BEGIN + page(found) + _END + rest.partition(_END)[2]


def draw(found: Mapping[str, Document]) -> list[Path]:
    """Draws the pictures of the page, and says where they are."""
    from matplotlib.figure import Figure

    drawn = []
    for section in SECTIONS:
        if section.benchmark in found and section.draw is not None:
            figure = Figure(figsize=(8, 3.5), layout="constrained")
            axes = figure.add_subplot()
            section.draw(axes, section.rows(found[section.benchmark]))
            axes.grid(visible=True, alpha=0.3)
            figure.savefig(section.picture, dpi=110)
            drawn.append(section.picture)
    return drawn


def main() -> int:
    """Writes the page, and the table of README.md."""
    found = documents()
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    readme = readme_table.README
    readme.write_text(readme_table.replaced(readme.read_text(encoding="utf-8"), found), encoding="utf-8")
    for path in (PAGE, readme, *draw(found)):
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
