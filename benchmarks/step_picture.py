"""README's picture, `docs/step.svg`: one unit in a step, by FSDP2's rules and by a plan.

`python -m benchmarks.step_picture` writes it. Both timelines are estimates of `explain` for one model, world and link:
nothing is run.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp_compile
from benchmarks import models
from benchmarks.command import quiet
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.explain.plan import Plan
from fsdp_compile.ir.graph import Phase

PICTURE: Final = Path(__file__).parents[1] / "docs" / "step.svg"
LAYERS, RANKS, GB_PER_S = 6, 64, 75.0
SHOWN: Final = "model.layers.3"
"""The unit whose way through the step is coloured."""
_WIDTH, _LEFT, _BAR, _GAP, _PANEL = 960, 96, 30, 8, 120
_COLOURS: Final = {"all-gather": "#2b7bba", "reduce-scatter": "#c2571a", "compute": "#3a923a"}
_STYLE: Final = (
    "text{font:13px sans-serif;fill:#222}.small{font-size:11px}.on{fill:#fff;font-size:11px}"
    "@media(prefers-color-scheme:dark){svg{background:#fff}}"
)


@dataclasses.dataclass(frozen=True)
class Bar:
    """A stretch of one lane, in us from the start of the step."""

    lane: str
    kind: str
    shown: bool
    begin_us: float
    end_us: float


def plans() -> Mapping[str, Plan]:
    """The two plans, by the title of their timelines."""
    size = dataclasses.replace(models.LLAMA_3_8B, layers=LAYERS)
    task = models.llama(size, device="meta")
    common = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "bucket_mb": 0}
    fsdp2: dict[str, Any] = {
        "prefetch": "BACKWARD_PRE+forward_prefetch",
        "auto_wrap_policy": ModuleWrapPolicy({task.block}),
    }

    def plan(options: Mapping[str, Any]) -> Plan:
        torch.compiler.reset()
        link = hardware("h100-sxm", GB_PER_S)
        return fsdp_compile.explain(
            task.make(), world_size=RANKS, options={**common, **options}, hardware=link, **task.inputs[1]
        )

    return {"FSDP2's rules": plan(fsdp2), "fsdp_compile": plan({})}


def bars(plan: Plan) -> Iterator[Bar]:
    """Everything in the two lanes of a plan."""
    offset = 0.0
    for graph in plan.graphs:
        for span in graph.spans:
            shown = span.where == SHOWN or span.where.startswith(SHOWN + ".")
            yield Bar("compute", "compute", shown, offset + span.begin_us, offset + span.end_us)
        for one in graph.collectives:
            yield Bar("network", one.kind.value, SHOWN in one.units, offset + one.begin_us, offset + one.end_us)
        offset += graph.end_us


def draw(found: Mapping[str, Plan]) -> str:
    """The picture as SVG."""
    longest = max(plan.step_us for plan in found.values())
    scale = (_WIDTH - _LEFT - 16) / longest
    height = len(found) * _PANEL + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>One unit of {LAYERS} in a step</title><style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for number, (title, plan) in enumerate(found.items()):
        parts += _timeline(title, plan, 8 + number * _PANEL, scale)
    parts += _legend(height - 46)
    assumed = (
        f"Llama-3-8B with {LAYERS} layers, {RANKS} H100, {GB_PER_S:g} GB/s per rank: estimates of fsdp-compile explain."
    )
    parts.append(f'<text class="small" x="{_LEFT}" y="{height - 10}">{assumed}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _timeline(title: str, plan: Plan, top: float, scale: float) -> Iterator[str]:
    waits = f"{plan.step_us / 1e3:.0f} ms, of which compute waits {plan.exposed_us / 1e3:.0f} ms"
    yield f'<text x="{_LEFT}" y="{top + 16}"><tspan font-weight="bold">{title}</tspan>: {waits}</text>'
    forward = sum(graph.end_us for graph in plan.graphs if graph.phase is Phase.FORWARD) * scale + _LEFT
    lanes = {"network": top + 26, "compute": top + 26 + _BAR + _GAP}
    for lane, y in lanes.items():
        yield f'<text class="small" x="8" y="{y + 19}">{lane}</text>'
        yield f'<rect x="{_LEFT}" y="{y}" width="{plan.step_us * scale:.1f}" height="{_BAR}" fill="#f4f4f4"/>'
    for bar in sorted(bars(plan), key=lambda bar: bar.shown):
        x, width = _LEFT + bar.begin_us * scale, max((bar.end_us - bar.begin_us) * scale - 0.5, 0.5)
        colour = _COLOURS[bar.kind] if bar.shown else "#cfcfcf"
        yield f'<rect x="{x:.1f}" y="{lanes[bar.lane]}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>'
    bottom = lanes["compute"] + _BAR
    yield f'<path d="M{forward:.1f} {top + 22}V{bottom + 4}" stroke="#222" stroke-dasharray="3 3"/>'
    yield f'<text class="small" x="{forward + 4:.1f}" y="{bottom + 14}">backward</text>'
    yield f'<text class="small" x="{_LEFT}" y="{bottom + 14}">forward</text>'


def _legend(top: float) -> Iterator[str]:
    x = _LEFT
    words = {
        "all-gather": "layer 3: its shards are gathered",
        "compute": "it computes",
        "reduce-scatter": "its gradient is reduced",
    }
    for kind, text in words.items():
        yield f'<rect x="{x}" y="{top}" width="14" height="14" fill="{_COLOURS[kind]}"/>'
        yield f'<text class="small" x="{x + 20}" y="{top + 11}">{text}</text>'
        x += 48 + 6 * len(text)
    yield f'<rect x="{x}" y="{top}" width="14" height="14" fill="#cfcfcf"/>'
    yield f'<text class="small" x="{x + 20}" y="{top + 11}">other layers</text>'


def main() -> int:
    """Writes the picture."""
    quiet()
    PICTURE.write_text(draw(plans()), encoding="utf-8")
    print(f"wrote {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
