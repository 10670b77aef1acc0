"""What a comparison of learners is written as: rows and curves as CSV, all of it as JSON, a picture for each preset.

Knows judged rows (learning.py) and, for pictures, matplotlib. Files are whole or not there.

    write(Path("results/train"), header, rows, notes)
    pictures(Path("results/train"), rows, title="NVIDIA H200")
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fuselm.bench.learners import LEARNERS, Row
from fuselm.bench.learning import APART, BASE, NUDGED, has_other_masks, smoothed
from fuselm.bench.report import to_csv, to_json
from fuselm.bench.step_profile import REST
from fuselm.config import PRESETS
from fuselm.files import write_whole

# seconds: all steps, the first one from building the model on; step_ms and tokens_per_second: without the first six;
# p10, p90: of spans of ten steps. peak_memory_gib: what torch took of a GPU, what the process held on a CPU. gap: from
# torch's running mean, rms over the steps; noise: the nudged run's; agrees: gap is at most APART times noise. None: not
# known.
FIELDS = (
    "preset", "learner", "precision", "steps", "tokens_per_step", "tokens_per_second", "step_ms", "step_ms_p10",
    "step_ms_p90", "first_step_s", "seconds", "process_s", "peak_memory_gib", "mfu", "micro_batch", "last_loss", "gap",
    "noise", "agrees",
)  # fmt: skip
KERNEL_FIELDS = ("preset", "learner", "kind", "kernel", "calls", "ms")
CURVE_FIELDS = ("preset", "learner", "step", "loss", "mean_loss")
# By learner, told apart by the colour-blind too (Okabe and Ito's palette, with greys).
COLOURS = {
    "plain-compile": "#000000",
    "plain-cudnn": "#8B4513",
    "torch": "#999999",
    "torch-compile": "#E69F00",
    "liger-norm": "#009E73",
    "fused-norm": "#56B4E9",
    "fused": "#0072B2",
    "fused-graph": "#CC79A7",
    "fused-compile": "#D55E00",
    "fused-deterministic": "#F0E442",
    "nudged": "#cccccc",
}

WIDE, DASH = 2.2, 4.0  # points; the length of a dash in widths of its line


def as_rows(rows: Sequence[Row]) -> list[Row]:
    """The fields of rows.csv; a curve's end stands for the curve."""
    full = [{**row, "last_loss": round(smoothed(row["losses"])[-1], 5)} for row in rows]
    return [{name: _plain(row.get(name)) for name in FIELDS} for row in full]


def _plain(value: Any) -> Any:
    """A float with five digits; None for one that is no number, which JSON has not."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None


def curve_rows(rows: Sequence[Row]) -> list[Row]:
    """A row for each step of each learner."""
    return [
        dict(zip(CURVE_FIELDS, (row["preset"], row["learner"], step, loss, mean), strict=True))
        for row in rows
        for step, (loss, mean) in enumerate(zip(row["losses"], smoothed(row["losses"]), strict=True), 1)
    ]


def kernel_rows(rows: Sequence[Row]) -> list[Row]:
    """A row for each kernel of a profiled step, calls and milliseconds of one step, and for what is of no kernel."""
    found = []
    for row in rows:
        if profile := row.get("profile"):
            of_none = {words: profile[name] for name, words in REST.items() if name in profile}
            rest = [{"kind": words, "kernel": "", "calls": "", "ms": ms} for words, ms in of_none.items()]
            whose = {"preset": row["preset"], "learner": row["learner"]}
            found += [{**whose, **kernel} for kernel in (*profile["kernels"], *rest)]
    return found


def write(folder: Path, header: Mapping[str, Any], rows: Sequence[Row], notes: Sequence[Row]) -> list[Path]:
    """rows.csv, curves.csv, rows.json and, of a profile, kernels.csv."""
    table, kernels = as_rows(rows), kernel_rows(rows)
    texts = {
        "rows.csv": to_csv(table, FIELDS),
        "curves.csv": to_csv(curve_rows(rows), CURVE_FIELDS),
        "rows.json": to_json({**header, "rows": table, "notes": list(notes)}),
    }
    texts |= {"kernels.csv": to_csv(kernels, KERNEL_FIELDS)} if kernels else {}
    for old in _written_before(folder):
        old.unlink(missing_ok=True)  # it would seem to be of this comparison
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]


def _written_before(folder: Path) -> list[Path]:
    """What a comparison before this one may have made that this one does not write over; no file of anybody else's."""
    try:
        rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))["rows"]
        names = {row["preset"] for row in rows if row["learner"] in LEARNERS}
    except (OSError, ValueError, KeyError, TypeError):  # there was none, or rows.json is of something else
        return []
    pictures = [folder / f"{name}.png" for name in PRESETS if name in names]
    return [folder / "kernels.csv", *pictures] if names else []


def verdict(row: Row) -> str:
    """Whether its curve agrees, for people."""
    if row["learner"] == BASE:
        return "base"
    if row["learner"] == NUDGED:
        return "noise"
    if row["agrees"] is None:
        return "other dropout" if has_other_masks(row) else "not known"
    return "agrees" if row["agrees"] else "DIFFERS"


# --- pictures --------------------------------------------------------------------------------------------------------


def pictures(folder: Path, rows: Sequence[Row], title: str) -> list[Path]:
    """One for each preset, named after it."""
    paths = []
    for name in dict.fromkeys(row["preset"] for row in rows):
        paths.append(folder / f"{name}.png")
        picture([row for row in rows if row["preset"] == name], paths[-1], f"{name}: {title}")
    return paths


def picture(rows: Sequence[Row], path: Path, title: str) -> None:
    """Curves, how far each is from torch's with noise as a band, and speed and memory as bars."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 2))
    curves = figure.add_subplot(grid[0, 0])
    gaps = figure.add_subplot(grid[1, 0], sharex=curves)
    _draw_curves(curves, rows)
    _draw_gaps(gaps, rows)
    timed = [row for row in rows if row["learner"] != NUDGED]
    _draw_bars(figure.add_subplot(grid[0, 1]), timed, "tokens_per_second", "tokens/s", EngFormatter(sep=""))
    _draw_bars(figure.add_subplot(grid[1, 1]), timed, "peak_memory_gib", "GiB at the peak", lambda x, _=0: f"{x:g}")
    figure.suptitle(f"{title}, {rows[0]['precision']}")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=90, metadata={"Software": None})
    write_whole(path, content.getvalue())


def _draw_curves(axis: Any, rows: Sequence[Row]) -> None:
    from matplotlib.lines import Line2D

    for turn, row in enumerate(rows):
        _draw_line(axis, row, smoothed(row["losses"]), turn, len(rows))
    axis.set_ylabel("running mean of the loss")
    lines = [Line2D([], [], color=COLOURS[row["learner"]], linewidth=WIDE) for row in rows]
    axis.legend(lines, [_title(row) for row in rows], fontsize=8, frameon=False)
    _clean(axis)


def _draw_line(axis: Any, row: Row, values: Sequence[float], turn: int, turns: int) -> None:
    """A thin line and wide dashes over it, which stand where no other's do: lines that meet show all their colours."""
    steps, colour = range(1, 1 + len(values)), COLOURS[row["learner"]]
    axis.plot(steps, values, color=colour, linewidth=0.8)
    dashes = (DASH * turn, (DASH, DASH * (turns - 1))) if turns > 1 else "solid"
    axis.plot(steps, values, color=colour, linewidth=WIDE, linestyle=dashes, zorder=3)


def _draw_gaps(axis: Any, rows: Sequence[Row]) -> None:
    """On a logarithmic axis: noise grows from step to step, by powers of ten."""
    base = next((smoothed(row["losses"]) for row in rows if row["learner"] == BASE), None)
    others = [row for row in rows if row["learner"] != BASE] if base is not None else []
    for turn, row in enumerate(others):
        apart = [abs(one - other) for one, other in zip(smoothed(row["losses"]), base or (), strict=True)]
        if row["learner"] == NUDGED and row["noise"] is not None:
            axis.axhline(APART * row["noise"], color="black", linewidth=0.8, linestyle="--", label="limit of the rms")
        if not any(apart):
            axis.plot([], [], color=COLOURS[row["learner"]], linewidth=WIDE, label=f"{_title(row)}: none at any step")
        # A gap of exactly 0 has no place there.
        _draw_line(axis, row, [value or math.nan for value in apart], turn, len(others))
    if axis.lines:
        axis.set_yscale("log", nonpositive="mask")
    else:
        axis.set_yticks([])
        axis.text(0.5, 0.5, "nothing to compare", transform=axis.transAxes, ha="center")
    axis.set_ylabel("distance from torch's ops")
    axis.set_xlabel("step")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, frameon=False, loc="lower right")
    _clean(axis)


def _draw_bars(axis: Any, rows: Sequence[Row], key: str, label: str, short: Callable[..., str]) -> None:
    places = range(len(rows), 0, -1)  # the first on top
    values = [row[key] for row in rows]
    bars = axis.barh(places, values, color=[COLOURS[row["learner"]] for row in rows])
    axis.bar_label(bars, [short(float(f"{value:.3g}")) for value in values], fontsize=8, padding=3)
    axis.set_yticks(places, [_title(row) for row in rows], fontsize=8)
    axis.set_ylim(min(0.4, len(rows) - 3.6), len(rows) + 0.6)  # a bar or two are not to be as thick as the panel
    axis.set_xlim(0, 1.2 * max(values, default=1) or 1)
    axis.xaxis.set_major_formatter(short)
    axis.set_xlabel(label)
    _clean(axis)


def _title(row: Row) -> str:
    return LEARNERS[row["learner"]].title


def _clean(axis: Any) -> None:
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
