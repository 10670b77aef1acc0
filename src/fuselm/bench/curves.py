"""Loss curves of training runs as one PNG, drawn of their logs. Knows log.jsonl, config.json and matplotlib; no model.

Training loss is the thin line, validation loss the one with markers, its best value a star. A run alone also gets a
panel with its learning rate and its speed. Logs of runs under way, cut off or with losses that are no numbers will do.
Runs whose tokenizers differ are drawn in bits per byte, where their evaluations say these.

    curve([Path("runs/demo")], Path("runs/demo/curve.png"))
    curve([Path("runs/a"), Path("runs/b")], Path("compare.png"), x="tokens", log_y=True)
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fuselm.files import write_whole
from fuselm.torchlm.log import LOG, read_log

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
# What losses are in: of runs with one tokenizer, or unknown ones; of others; of others that do not all say bits.
NATS, BITS, MIXED = "nats per token", "bits per byte", "nats per token, of different tokens"
AXES = {"step": "step", "tokens": "tokens trained on", "seconds": "training time"}
# Told apart by the colour-blind too (Okabe and Ito's palette, without its yellow, which is too pale for a line).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
QUIET = "#666666"
WIDTH, DPI = 8.0, 160  # inches, dots per inch: 1280 pixels, and letters that can still be read at 800
LONGEST_TITLE = 80  # letters

Record = Mapping[str, Any]


# --- reading ---------------------------------------------------------------------------------------------------------


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records of a run that say of which step they are."""
    path = folder / LOG
    if not path.is_file():
        found = "is a file" if folder.is_file() else f"has no {LOG}" if folder.is_dir() else "is not there"
        raise FileNotFoundError(f"A run is a folder with {LOG}; {folder} {found}. Give the folder of a run.")
    return [record for record in read_log(path) if math.isfinite(number(record.get("step")))]


def read_config(folder: Path) -> dict[str, dict[str, Any]]:
    """What config.json says under "model", "train" and "data"; empty where it says nothing or is not there."""
    path = folder / CONFIG
    document: Any = {}
    if path.is_file():
        try:
            document = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is JSON; it cannot be read ({error}). Undo what was edited in it.") from None
    parts = document if isinstance(document, dict) else {}
    return {name: part if isinstance(part := parts.get(name), dict) else {} for name in ("model", "train", "data")}


def number(value: Any) -> float:
    """A finite number as it is; NaN for all else, the null that logs have for a loss that is none among it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # an integer beyond every float
        return math.nan


def of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    """The records of one kind, in the order of the log."""
    return [record for record in records if record["kind"] == kind]


def best_evaluation(records: Sequence[Record]) -> Record | None:
    """The evaluation with the lowest loss, the first of equals; None where no loss is a number."""
    finite = [record for record in of_kind(records, "eval") if math.isfinite(number(record.get("loss")))]
    return min(finite, key=lambda record: number(record["loss"]), default=None)


@dataclass(frozen=True)
class _Track:
    """A run as it is drawn: records of steps and evaluations, and where on the x axis each stands."""

    folder: Path
    steps: list[Record]
    evaluations: list[Record]
    best: Record | None
    place: Callable[[Record], float]
    name: str = ""
    colour: Any = None
    unit: str = NATS
    scale: float = 1.0  # what a loss in nats per token is in that unit

    def points(self, records: Sequence[Record], field: str) -> tuple[list[float], list[float]]:
        placed = [(self.place(record), self.value(record, field)) for record in records]
        return [x for x, _ in placed], [y for _, y in placed]

    def value(self, record: Record, field: str = "loss") -> float:
        return number(record.get(field)) * (self.scale if field == "loss" else 1.0)


def _track(folder: Path, x: str) -> _Track:
    records = read_records(folder)
    steps, evaluations = of_kind(records, "step"), of_kind(records, "eval")
    shown = [record for record in (*steps, *evaluations) if math.isfinite(number(record.get("loss")))]
    if not shown:
        how_many = "records, but no loss that is a number" if records else "no records yet"
        raise ValueError(
            f"A curve is drawn of losses; {folder / LOG} has {how_many}. Let the run go on, or leave it out."
        )
    place = _place(x, steps)
    if not any(math.isfinite(place(record)) for record in shown):
        raise ValueError(f"The x axis is {x}; {folder / LOG} says nothing of it. Draw it over steps.")
    return _Track(folder, steps, evaluations, best_evaluation(records), place)


def _place(x: str, steps: Sequence[Record]) -> Callable[[Record], float]:
    """How to find where on the axis a record stands."""
    if x != "tokens":
        return lambda record: number(record.get(x))
    # Evaluations do not say how many tokens there were; all steps of a run are of the same size.
    sizes = (number(record.get("tokens")) / record["step"] for record in steps if record["step"])
    size = next((size for size in sizes if math.isfinite(size)), math.nan)
    return lambda record: float(record["step"]) * size


def _comparable(tracks: Sequence[_Track]) -> list[_Track]:
    """In bits per byte where tokenizers differ, if all runs have an evaluation that says how many there are.

    These are a loss times a number that is one for all evaluations of a run, since they are of the same text. Training
    losses are taken by that number too: their text is like that of validation.
    """
    files = [track.folder / TOKENIZER for track in tracks]
    if len({file.read_bytes() for file in files if file.is_file()}) <= 1:
        return list(tracks)
    scales = [next(_bits_per_nat(track.evaluations), None) for track in tracks]
    known = [scale for scale in scales if scale is not None]
    if len(known) < len(tracks):
        return [replace(track, unit=MIXED) for track in tracks]
    return [replace(track, unit=BITS, scale=scale) for track, scale in zip(tracks, known, strict=True)]


def _bits_per_nat(evaluations: Sequence[Record]) -> Iterator[float]:
    for record in evaluations:
        loss, bits = number(record.get("loss")), number(record.get("bits_per_byte"))
        if loss > 0 and math.isfinite(bits):
            yield bits / loss


# --- drawing ---------------------------------------------------------------------------------------------------------


def curve(runs: Sequence[Path], out: Path, *, x: str = "step", log_y: bool = False) -> str:
    """Draw the losses of one run or of several over steps, tokens or seconds into a PNG; in which unit they are."""
    if not runs:
        raise ValueError("A curve is of one run or more; got none. Name the folder of a run.")
    if x not in AXES:
        raise ValueError(f"The x axis is one of {', '.join(AXES)}; got {x!r}. Choose one.")
    if out.suffix.lower() != ".png" or out.is_dir():
        found = "is a folder" if out.is_dir() else "does not"
        raise ValueError(f"The picture is a file whose name ends in .png; {out} {found}. Name another.")
    _check_matplotlib()
    tracks = _comparable(_styled([_track(run, x) for run in runs]))
    if log_y and not any(loss > 0 for track in tracks for loss in _losses(track)):
        raise ValueError("A logarithmic axis is for losses above 0; there are none here. Draw it without.")
    figure = _draw(tracks, x, log_y)
    picture = io.BytesIO()
    # No software version in the file: the same logs give the same bytes wherever the same matplotlib is.
    figure.savefig(picture, format="png", dpi=DPI, metadata={"Software": None})
    write_whole(out, picture.getvalue())
    return tracks[0].unit


def _check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("Curves are drawn by matplotlib, which is not installed. Install fuselm[train].") from None


def _styled(tracks: Sequence[_Track]) -> list[_Track]:
    """A name and a colour for each: the folder's name, the whole path where two folders have the same name."""
    from matplotlib import colormaps

    names = [track.folder.name or track.folder.resolve().name for track in tracks]
    colours: Sequence[Any] = COLOURS
    if len(tracks) > len(COLOURS):
        colours = [colormaps["turbo"](0.05 + 0.9 * at / (len(tracks) - 1)) for at in range(len(tracks))]
    styled = []
    for track, name, colour in zip(tracks, names, colours, strict=False):
        unique = name if names.count(name) == 1 else str(track.folder)
        # matplotlib leaves a label out that begins with an underscore.
        styled.append(replace(track, name=f"./{unique}" if unique.startswith("_") else unique, colour=colour))
    return styled


def _losses(track: _Track) -> list[float]:
    return track.points([*track.steps, *track.evaluations], "loss")[1]


def _draw(tracks: Sequence[_Track], x: str, log_y: bool) -> Any:
    # The object interface with its own canvas: no pyplot, so no global state and no display is looked for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    label = AXES[x]
    if x == "seconds":
        unit, seconds = _time_unit(tracks)
        tracks, label = [_slower(track, seconds) for track in tracks], f"{label} ({unit})"
    paces = _paces(tracks[0]) if len(tracks) == 1 else []
    figure = Figure(figsize=(WIDTH, 6.0 if paces else 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2 if paces else 1, 1, sharex=True, squeeze=False, height_ratios=[3, 1] if paces else [1])
    top, bottom = panels[0, 0], panels[-1, 0]
    for track in tracks:
        _draw_losses(top, track)
    if log_y:
        _make_logarithmic(top)
    top.set_ylabel(f"loss ({tracks[0].unit})")
    _clean(top)
    if paces:
        _draw_paces(bottom, tracks[0], paces)
    bottom.set_xlabel(label)
    _number_x(bottom, x)
    _name(figure, top, tracks)
    _legend(top, tracks)
    return figure


def _time_unit(tracks: Sequence[_Track]) -> tuple[str, int]:
    records = (track.place(record) for track in tracks for record in (*track.steps, *track.evaluations))
    longest = max(place for place in records if math.isfinite(place))
    return ("h", 3600) if longest > 3 * 3600 else ("min", 60) if longest > 600 else ("s", 1)


def _slower(track: _Track, factor: int) -> _Track:
    return replace(track, place=lambda record: track.place(record) / factor)


def _draw_losses(axis: Any, track: _Track) -> None:
    xs, ys = track.points(track.steps, "loss")
    axis.plot(xs, ys, color=track.colour, linewidth=0.9, alpha=0.55)
    # A line through one point, or through one between two gaps, is no line: a dot then.
    lonely = [at for at in range(len(ys)) if _is_lonely(ys, at)]
    axis.plot([xs[at] for at in lonely], [ys[at] for at in lonely], ".", color=track.colour, alpha=0.55)
    xs, ys = track.points(track.evaluations, "loss")
    axis.plot(xs, ys, color=track.colour, linewidth=1.6, marker="o", markersize=4 if len(xs) <= 60 else 2.5)
    if track.best is not None:
        axis.plot([track.place(track.best)], [track.value(track.best)], **_star(track))


def _is_lonely(ys: Sequence[float], at: int) -> bool:
    neighbours = (ys[other] for other in (at - 1, at + 1) if 0 <= other < len(ys))
    return math.isfinite(ys[at]) and not any(map(math.isfinite, neighbours))


def _star(track: _Track) -> dict[str, Any]:
    look = {"linestyle": "none", "marker": "*", "markersize": 14, "markeredgecolor": "white"}
    return {**look, "color": track.colour, "zorder": 5}


def _paces(track: _Track) -> list[tuple[str, str, str]]:
    """Field, label and colour of what there is to draw below the losses."""
    known = [("learning_rate", "learning rate", "#009E73"), ("tokens_per_second", "tokens/s", "#D55E00")]
    return [pace for pace in known if any(map(math.isfinite, track.points(track.steps, pace[0])[1]))]


def _draw_paces(axis: Any, track: _Track, paces: Sequence[tuple[str, str, str]]) -> None:
    """The first on the left, the second on the right."""
    for field, label, colour in paces:
        side = axis if field == paces[0][0] else axis.twinx()
        xs, ys = track.points(track.steps, field)
        side.plot(xs, ys, color=colour, linewidth=1.2, marker="." if len(ys) == 1 else None)
        side.set_ylim(0, 1.15 * max(y for y in ys if math.isfinite(y)) or 1)
        side.set_ylabel(label, color=colour)
        _clean(side)
        if side is not axis:
            side.grid(visible=False)
            side.spines["right"].set_visible(True)
        side.tick_params(axis="y", colors=colour)
        _number_in_thousands(side.yaxis, "tokens" in field)


def _clean(axis: Any) -> None:
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=9)


def _make_logarithmic(axis: Any) -> None:
    """Most losses lie within a decade or two: ticks at powers of ten would be one tick, or none."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axis.set_yscale("log", nonpositive="mask")
    lowest, highest = axis.get_ylim()
    subs = (1, 1.5, 2, 3, 4, 6, 8) if highest < 20 * lowest else (1, 2, 5) if highest < 1e4 * lowest else (1,)
    axis.yaxis.set_major_locator(MaxNLocator(6) if highest < 3 * lowest else LogLocator(subs=subs))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _number_x(axis: Any, x: str) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if x == "step":
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 2.5, 5, 10]))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value == round(value) else ""))
    else:
        _number_in_thousands(axis.xaxis, x == "tokens")


def _number_in_thousands(axis: Any, wanted: bool) -> None:
    """20k, 3M: counts of tokens are long."""
    from matplotlib.ticker import EngFormatter

    if wanted:
        axis.set_major_formatter(EngFormatter(sep=""))


# --- words -----------------------------------------------------------------------------------------------------------


def _name(figure: Any, axis: Any, tracks: Sequence[_Track]) -> None:
    """Which runs these are; a run alone also says what was trained, and how low its loss got."""
    title = f"{len(tracks)} runs: {', '.join(track.name for track in tracks)}"
    if len(tracks) == 1:
        title = f"Run {tracks[0].name}"
        subtitle = _shortened(describe(read_config(tracks[0].folder)))
        axis.set_title(subtitle, fontsize=9, color=QUIET, parse_math=False)
        _label_best(axis, tracks[0])
    figure.suptitle(_shortened(title), fontsize=12, fontweight="bold", parse_math=False)


def describe(config: Mapping[str, Mapping[str, Any]]) -> str:
    """A run in a line, as far as its config says: stories, 4 layers of width 192, context 256, batch 16."""
    model, train = config["model"], config["train"]
    corpus = config["data"].get("corpus")
    parts = [
        (corpus and Path(corpus).name, "{}"),  # of a path its last name
        (model.get("num_layers"), "{} layers"),
        (model.get("width"), "width {}"),
        (model.get("context"), "context {}"),
        (train.get("batch_size"), "batch {}"),
    ]
    return ", ".join(words.format(value) for value, words in parts if value is not None)


def _label_best(axis: Any, track: _Track) -> None:
    """The number alone, above its star: a longer text would cover the curve that rises on both sides of it."""
    if track.best is not None and math.isfinite(track.place(track.best)):
        axis.annotate(
            f"{track.value(track.best):.4f}",
            (track.place(track.best), track.value(track.best)),
            xytext=(0, 11),
            textcoords="offset points",
            ha="center",
            color=track.colour,
            fontweight="bold",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1},
            zorder=6,
        )


def _legend(axis: Any, tracks: Sequence[_Track]) -> None:
    """What the lines are and the best loss of each run; of several runs also which is whose."""
    from matplotlib.lines import Line2D

    is_alone = len(tracks) == 1
    colour = tracks[0].colour if is_alone else QUIET
    entries = []
    if any(track.steps for track in tracks):
        entries.append((Line2D([], [], color=colour, linewidth=0.9, alpha=0.55), "training"))
    if any(track.evaluations for track in tracks):
        entries.append((Line2D([], [], color=colour, linewidth=1.6, marker="o", markersize=4), "validation"))
    for track in tracks:
        words = [] if is_alone else [_shortened(track.name, 40)]
        words += [f"best {track.value(track.best):.4f} at step {track.best['step']:,}"] if track.best else []
        look = {**_star(track), "linestyle": "none" if is_alone else "-", "marker": "*" if track.best else ""}
        if words:
            entries.append((Line2D([], [], linewidth=1.6, **look), ": ".join(words)))
    size = 9 if len(entries) <= 12 else 6
    lines, labels = zip(*entries, strict=True)
    legend = axis.legend(lines, labels, fontsize=size, loc="upper right", framealpha=0.8, edgecolor="none")
    for text in legend.get_texts():
        text.set_parse_math(False)  # a folder's name may have a dollar in it


def _shortened(text: str, longest: int = LONGEST_TITLE) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
