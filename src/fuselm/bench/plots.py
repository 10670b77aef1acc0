"""Pictures of rows: the roofline (share of a copy's speed), decode latency, the tokenizer. Knows rows and matplotlib.

roofline(rows, Path("roofline.png"), title="NVIDIA H200")
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fuselm.bench.report import Row, ops_of_arithmetic, shape_text
from fuselm.bench.tokenizer_rows import ALONE
from fuselm.files import write_whole

# One colour for each implementation, told apart by the colour-blind too (Okabe and Ito's palette).
COLOURS = {
    "fused": "#0072B2",
    "torch": "#999999",
    "compile": "#E69F00",
    "liger": "#009E73",
    "quack": "#CC79A7",
    "matmuls": "#56B4E9",
}
# Groups of bars of a panel, and panels side by side: of many ops a picture is to be looked at, and under a mebibyte.
MOST_GROUPS, COLUMNS = 8, 2
LIBRARY_COLOURS = {"fuselm": "#0072B2", "tiktoken": "#E69F00", "tokenizers": "#009E73", ALONE: "#56B4E9"}


def roofline(rows: Sequence[Row], path: Path, title: str) -> None:
    """Share of copy speed for each shape and implementation: a panel for each op and pass, with its largest shapes."""
    panels: dict[tuple[str, str], list[Row]] = {}
    bound = ops_of_arithmetic(rows)
    for row in rows:
        if row["share_of_copy"] is not None and row["op"] not in bound:
            panels.setdefault((row["op"], row["pass"]), []).append(row)
    shown = {key: _largest(members, MOST_GROUPS) for key, members in panels.items()}
    figure, axes = _figure(len(panels), COLUMNS if len(panels) > COLUMNS else 1)
    for axis, ((op, which), members) in zip(axes, shown.items(), strict=False):
        _bars(axis, members, lambda row: 100 * row["share_of_copy"], group=_case_and_dtype)
        axis.axhline(100, color="black", linewidth=0.8, linestyle="--")
        left_out = len({_case_and_dtype(row) for row in panels[op, which]} - {_case_and_dtype(row) for row in members})
        axis.set_title(f"{op} {which}" + (f" (and {left_out} smaller ones)" * bool(left_out)), loc="left", fontsize=10)
        axis.set_ylabel("% of copy speed")
    figure.suptitle(f"Share of the speed of a copy of the same bytes: {title}")
    _save(figure, path)


def decode(rows: Sequence[Row], path: Path, title: str) -> None:
    """Median latency of small calls inside a CUDA graph, with the 99th percentile as a whisker: a panel for each op."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(row["op"], []).append(row)
    figure, axes = _figure(len(panels))
    for axis, (op, members) in zip(axes, panels.items(), strict=False):
        _bars(axis, members, lambda row: row["p50_us"], whisker=lambda row: max(row["p99_us"] - row["p50_us"], 0.0))
        axis.axhline(members[0]["empty_us"], color="black", linewidth=0.8, linestyle="--")
        axis.set_title(f"{op} {members[0]['dtype']}; dashed: an empty kernel")
        axis.set_ylabel("µs per call, p50 (whisker: p99)")
    figure.suptitle(f"Latency of small calls inside a CUDA graph: {title}")
    _save(figure, path)


def tokenizer(rows: Sequence[Row], path: Path, title: str) -> None:
    """MB/s of each library in each task, on a logarithmic axis: between a call and a batch lie three orders."""
    figure, (axis,) = _figure(1)
    _bars(axis, rows, lambda row: row["mb_per_s"], group=_task, colours=LIBRARY_COLOURS)
    for bars in axis.containers:
        axis.bar_label(bars, fmt="%.3g", fontsize=6)
    axis.set_yscale("log")
    axis.set_ylim(bottom=min(row["mb_per_s"] for row in rows) / 3)  # the slowest has a bar to be seen too
    axis.set_ylabel("MB/s")
    figure.suptitle(f"Tokenizer: {title}")
    _save(figure, path)


def _figure(panels: int, columns: int = 1) -> tuple[Any, list[Any]]:
    # The object interface with its own canvas: no pyplot, so no global state and no display is looked for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = -(-max(panels, 1) // columns)
    figure = Figure(figsize=(11 if columns == 1 else 8 * columns, 3 * lines + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(lines, columns, index + 1) for index in range(max(panels, 1))]


def _bars(
    axis: Any,
    rows: Sequence[Row],
    height: Callable[[Row], float],
    whisker: Callable[[Row], float] | None = None,
    group: Callable[[Row], str] | None = None,
    colours: Mapping[str, str] = COLOURS,
) -> None:
    """Bars in groups, by case and shape unless told otherwise, one for each implementation that has a row there."""
    group = group or _case
    groups = list(dict.fromkeys(group(row) for row in rows))
    present = [name for name in colours if any(row["impl"] == name for row in rows)]
    width = 0.8 / max(len(present), 1)
    for index, name in enumerate(present):
        own = [row for row in rows if row["impl"] == name]
        places = [groups.index(group(row)) - 0.4 + width * (index + 0.5) for row in own]
        spread = None if whisker is None else [[0.0] * len(own), [whisker(row) for row in own]]
        heights = [height(row) for row in own]
        axis.bar(places, heights, width, yerr=spread, label=name, color=colours[name], error_kw={"linewidth": 0.8})
    axis.set_xticks(range(len(groups)), groups, fontsize=7)
    axis.set_xlim(-0.6, max(len(groups), 4) - 0.4)  # a lone group must not be as wide as the panel
    axis.legend(fontsize=7, ncols=len(present), loc="lower right", bbox_to_anchor=(1, 1), frameon=False)


def _case(row: Row) -> str:
    return f"{row['case']}\n{shape_text(row['shape'])}"


def _case_and_dtype(row: Row) -> str:
    """bf16 is what most rows have, and goes without saying."""
    return _case(row) if row["dtype"] == "bfloat16" else f"{row['case']} {row['dtype']}\n{shape_text(row['shape'])}"


def _largest(rows: Sequence[Row], groups: int) -> list[Row]:
    """The rows of those groups that move most bytes, in the order in which they came."""
    sizes = {_case_and_dtype(row): row["bytes"] for row in rows}
    kept = sorted(sizes, key=lambda name: -sizes[name])[:groups]
    return [row for row in rows if _case_and_dtype(row) in kept]


def _task(row: Row) -> str:
    return f"{row['task']}\n{row['threads']} thread{'s' * (row['threads'] > 1)}"


def _save(figure: Any, path: Path) -> None:
    picture = io.BytesIO()
    # No software version in the file: the same rows give the same bytes wherever the same matplotlib is.
    figure.savefig(picture, format="png", dpi=90, metadata={"Software": None})
    write_whole(path, picture.getvalue())
