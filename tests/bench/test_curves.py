"""Curves and reports of runs, made of small logs: what is drawn, what is counted, what is refused and how."""

from __future__ import annotations

import builtins
import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fuselm.bench import curves, run_report

pytest.importorskip("matplotlib")

Records = list[dict[str, Any]]
CONFIG = {
    "fuselm": "0.1",
    "model": {"vocab_size": 2048, "num_layers": 4, "width": 192, "num_heads": 6, "ffn_width": 512, "context": 256},
    "train": {"steps": 40, "batch_size": 16, "learning_rate": 0.003, "schedule": "cosine", "warmup": 5, "seed": 7},
    "data": {"corpus": "stories"},
}


def step(at: int, loss: float | None, **more: Any) -> dict[str, Any]:
    speed = {"tokens_per_second": 1000.0, "learning_rate": 1e-3, "tokens": at * 4096, "mfu": None}
    return {"kind": "step", "step": at, "seconds": at * 0.5, "loss": loss, **speed, **more}


def evaluation(at: int, loss: float | None) -> dict[str, Any]:
    bits = None if loss is None else loss / 4
    return {"kind": "eval", "step": at, "seconds": at * 0.5, "loss": loss, "bits_per_byte": bits, "best": False}


def whole_log() -> Records:
    return [
        step(10, 4.0, tokens_per_second=100.0),
        step(20, 3.0, tokens_per_second=900.0),
        evaluation(20, 3.2),
        {"kind": "skip", "step": 25, "seconds": 12.5, "reason": "loss nan, gradient norm nan", "loss_scale": 1.0},
        step(30, None, tokens_per_second=1100.0),
        evaluation(30, 2.5),
        {"kind": "sample", "step": 30, "seconds": 15.0, "text": "an early one"},
        step(40, 2.0, tokens_per_second=1000.0),
        evaluation(40, 2.75),
        {"kind": "sample", "step": 40, "seconds": 20.0, "text": "Once upon a time"},
        {"kind": "end", "step": 40, "seconds": 21.5, "reason": "done"},
    ]


def make_run(folder: Path, records: Records, config: Mapping[str, Any] | None = None, tail: str = "") -> Path:
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "log.jsonl").write_text(lines + tail, encoding="utf-8")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def picture_size(path: Path) -> tuple[int, int]:
    """Width and height as the PNG's own header has them."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert data.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def drawn(runs: list[Path], x: str = "step", log_y: bool = False) -> Any:
    """The figure instead of its pixels."""
    return curves._draw(curves._comparable(curves._styled([curves._track(run, x) for run in runs])), x, log_y)


def lines_of(axis: Any) -> list[list[tuple[float, float]]]:
    return [list(zip(*line.get_data(), strict=True)) for line in axis.get_lines() if len(line.get_xdata())]


def legend_of(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.get_legend().get_texts()]


# --- the curve -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("x", "log_y"), [("step", False), ("tokens", True), ("seconds", False)])
def test_a_run_becomes_a_png_and_nothing_else(
    x: str, log_y: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # whoever imports it now fails
    run = make_run(tmp_path / "demo", whole_log(), CONFIG)
    curves.curve([run], tmp_path / "new" / "curve.png", x=x, log_y=log_y)
    assert picture_size(tmp_path / "new" / "curve.png") == (1280, 960)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["curve.png"]


@pytest.mark.parametrize("corpus", ["stories", "/some/long/way/to/the/folder/of/stories"])
def test_a_picture_names_the_corpus_and_not_the_way_to_it(corpus: str) -> None:
    assert curves.describe({**CONFIG, "data": {"corpus": corpus}}).startswith("stories, 4 layers")


def test_the_same_log_gives_the_same_bytes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo", whole_log()[2:3])
    for name in ("a.png", "b.png"):
        curves.curve([run], tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_run_alone_shows_losses_the_best_one_its_rate_and_its_speed(tmp_path: Path) -> None:
    figure = drawn([make_run(tmp_path / "demo", whole_log(), CONFIG)])
    losses, rate, speed = figure.axes
    training, lonely, validation, star = lines_of(losses)
    assert [x for x, _ in training] == [10, 20, 30, 40]
    assert lonely == [(40, 2.0)]  # it stands after a gap, so no line leads to it
    assert validation == [(20, 3.2), (30, 2.5), (40, 2.75)]
    assert star == [(30, 2.5)]
    assert [text.get_text() for text in losses.texts] == ["2.5000"]
    assert legend_of(losses) == ["training", "validation", "best 2.5000 at step 30"]
    assert figure.get_suptitle() == "Run demo"
    assert losses.get_title() == "stories, 4 layers, width 192, context 256, batch 16"
    assert losses.get_ylabel() == "loss (nats per token)"
    assert (rate.get_ylabel(), speed.get_ylabel(), rate.get_xlabel()) == ("learning rate", "tokens/s", "step")
    assert [y for _, y in lines_of(speed)[0]] == [100, 900, 1100, 1000]


def test_evaluations_stand_at_the_tokens_of_their_steps(tmp_path: Path) -> None:
    losses = drawn([make_run(tmp_path / "demo", [step(10, 4.0), evaluation(15, 3.0)])], x="tokens").axes[0]
    assert lines_of(losses)[-1] == [(15 * 4096, 3.0)]


@pytest.mark.parametrize(("seconds", "label", "place"), [(50, "(s)", 50), (1800, "(min)", 30), (36_000, "(h)", 10)])
def test_time_has_a_unit_that_fits(seconds: float, label: str, place: float, tmp_path: Path) -> None:
    records = [step(10, 4.0, seconds=0.0), step(20, 3.0, seconds=seconds)]
    figure = drawn([make_run(tmp_path / "demo", records)], x="seconds")
    assert figure.axes[1].get_xlabel() == f"training time {label}"
    assert lines_of(figure.axes[0])[0][-1] == (place, 3.0)


def test_several_runs_have_a_colour_each_and_their_best_in_the_legend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [make_run(Path(name), whole_log()) for name in ("a", "_b", "c$x$")]
    runs.append(make_run(Path("other", "a"), [step(10, 4.0)]))
    figure = drawn(runs)
    assert len(figure.axes) == 1
    best = "best 2.5000 at step 30"
    assert legend_of(figure.axes[0]) == [
        *("training", "validation"),
        *(f"a: {best}", f"./_b: {best}", f"c$x$: {best}", "other/a"),
    ]
    assert len({line.get_color() for line in figure.axes[0].get_lines()}) == 4
    curves.curve(runs, tmp_path / "compare.png")
    assert picture_size(tmp_path / "compare.png") == (1280, 800)


def with_tokenizer(run: Path, text: str) -> Path:
    (run / "tokenizer.json").write_text(text)
    return run


def test_runs_of_different_tokenizers_are_drawn_in_bits_per_byte(tmp_path: Path) -> None:
    bits = {"bits_per_byte": 1.5}
    letters = with_tokenizer(make_run(tmp_path / "a", [step(10, 2.0), evaluation(10, 1.0) | bits]), "letters")
    words = with_tokenizer(make_run(tmp_path / "b", [step(10, 8.0), evaluation(10, 6.0) | bits]), "words")
    [losses] = drawn([letters, words]).axes
    assert losses.get_ylabel() == "loss (bits per byte)"
    assert [y for line in lines_of(losses) for _, y in line] == [3.0, 3.0, 1.5, 1.5, 2.0, 2.0, 1.5, 1.5]
    assert legend_of(losses)[2:] == ["a: best 1.5000 at step 10", "b: best 1.5000 at step 10"]
    assert curves.curve([letters, words], tmp_path / "c.png") == curves.BITS
    assert curves.curve([letters], tmp_path / "c.png") == curves.NATS  # as the run itself says them


def test_where_not_all_say_bits_per_byte_the_axis_says_that_tokens_differ(tmp_path: Path) -> None:
    letters = with_tokenizer(make_run(tmp_path / "a", whole_log()), "letters")
    begun = with_tokenizer(make_run(tmp_path / "b", whole_log()[:2]), "words")
    same = with_tokenizer(make_run(tmp_path / "c", whole_log()[:2]), "letters")
    assert drawn([letters, begun]).axes[0].get_ylabel() == "loss (nats per token, of different tokens)"
    assert drawn([letters, same]).axes[0].get_ylabel() == "loss (nats per token)"
    assert drawn([letters, same]).axes[0].get_ylim()[1] > 3.9


def test_more_runs_than_named_colours_still_differ(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run-{at}", [step(10, 4.0), step(20, 3.0 + at)]) for at in range(12)]
    assert len({line.get_color() for line in drawn(runs).axes[0].get_lines()}) == 12


@pytest.mark.parametrize(
    "records",
    [
        [step(10, 4.0)],
        [evaluation(10, 4.0)],
        [{"kind": "step", "step": 10, "loss": 4.0}],
        [step(0, 4.0), step(10, 4.0)],
        [step(10, 4.0, learning_rate=0.0, tokens_per_second=0.0), step(20, None), evaluation(20, None)],
    ],
)
def test_little_is_enough(records: Records, tmp_path: Path) -> None:
    curves.curve([make_run(tmp_path / "demo", records)], tmp_path / "curve.png", log_y=True)
    assert picture_size(tmp_path / "curve.png")[0] == 1280


def test_an_evaluation_without_a_place_on_the_axis_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo", [step(10, 4.0), {"kind": "eval", "step": 10, "loss": 3.0}])
    curves.curve([run], tmp_path / "curve.png", x="seconds")
    assert not drawn([run], x="seconds").axes[0].texts


@pytest.mark.parametrize(
    "tail", ['{"kind": "step", "st', "\x00\x00\x00", '["kind"]\n', '{"kind": "step", "loss": 1}\n']
)
def test_a_last_line_that_was_cut_off_is_left_out(tail: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo", whole_log()[:2], tail=tail)
    assert lines_of(drawn([run]).axes[0])[0] == [(10, 4.0), (20, 3.0)]


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([], "has no records yet. Let the run go on"),
        ([step(10, None), evaluation(10, None)], "has records, but no loss that is a number"),
        ([step(10, float("nan"))], "has records, but no loss that is a number"),
    ],
)
def test_a_run_without_losses_is_refused(records: Records, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        curves.curve([make_run(tmp_path / "demo", records)], tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_what_is_no_run_is_refused_with_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, found in {"nowhere": "is not there", "empty": "has no log.jsonl", "file": "is a file"}.items():
        with pytest.raises(FileNotFoundError, match=f"{name} {found}. Give the folder of a run"):
            curves.curve([tmp_path / name], tmp_path / "curve.png")


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "demo", [evaluation(10, 0.0)]), tmp_path / "curve.png"
    with pytest.raises(ValueError, match="one of step, tokens, seconds; got 'epoch'"):
        curves.curve([run], out, x="epoch")
    with pytest.raises(ValueError, match=r"says nothing of it\. Draw it over steps"):
        curves.curve([run], out, x="tokens")
    with pytest.raises(ValueError, match="losses above 0"):
        curves.curve([run], out, log_y=True)
    with pytest.raises(ValueError, match=r"ends in \.png; .*curve\.pdf does not"):
        curves.curve([run], tmp_path / "curve.pdf")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match=r"folder\.png is a folder"):
        curves.curve([run], tmp_path / "folder.png")
    with pytest.raises(ValueError, match="got none"):
        curves.curve([], out)
    (run / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is JSON; it cannot be read"):
        curves.curve([run], out)


def test_without_matplotlib_a_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, real = make_run(tmp_path / "demo", whole_log()), builtins.__import__

    def lacking(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(ImportError, match=r"matplotlib, which is not installed. Install fuselm\[train\]"):
        curves.curve([run], tmp_path / "curve.png")


# --- the numbers -----------------------------------------------------------------------------------------------------


def test_summary_has_the_numbers_of_the_log(tmp_path: Path) -> None:
    assert run_report.summary(make_run(tmp_path / "demo", whole_log())) == {
        "steps": 40,
        "best_loss": 2.5,
        "best_step": 30,
        "bits_per_byte": 0.625,
        "last_loss": 2.0,
        "seconds": 21.5,
        "tokens_per_second": 950.0,
        "mfu": None,
        "skipped": 1,
        "finished": "done",
    }


def test_summary_of_an_empty_log_knows_nothing(tmp_path: Path) -> None:
    found = run_report.summary(make_run(tmp_path / "demo", []))
    assert (found.pop("steps"), found.pop("skipped")) == (0, 0)
    assert set(found.values()) == {None}


def test_a_run_that_went_on_after_a_stop_has_not_finished(tmp_path: Path) -> None:
    stopped = {"kind": "end", "step": 20, "seconds": 10.0, "reason": "stopped"}
    assert run_report.summary(make_run(tmp_path / "a", [step(20, 3.0), stopped]))["finished"] == "stopped"
    assert run_report.summary(make_run(tmp_path / "b", [step(20, 3.0), stopped, step(30, 2.0)]))["finished"] is None


def test_losses_that_are_no_numbers_are_never_the_best_or_the_last(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo", [evaluation(10, 3.0), evaluation(20, None), step(20, float("nan"))])
    found = run_report.summary(run)
    assert (found["best_loss"], found["best_step"], found["last_loss"]) == (3.0, 10, None)
    json.loads(json.dumps(found, allow_nan=False))


# --- the page --------------------------------------------------------------------------------------------------------

FACTS = {
    "preset": "demo",
    "parameters": 2_124_480,
    "train_tokens": 2_500_000,
    "valid_tokens": 130_000,
    "precision": "bf16",
    "device": "NVIDIA H200",
    "compile": False,
    "micro_batch": 8,
    "peak_memory_bytes": 1_234_000_000,
    "torch": "2.13.0",
    "command": ["fuselm", "train", "--out", "runs/my run"],
    "resume": "fuselm train --resume runs/demo",
}


def test_the_page_has_what_is_known(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo", [*whole_log()[:-1], step(40, 2.0, mfu=0.123), whole_log()[-1]], CONFIG)
    (run / "curve.png").touch()
    path = run_report.write_report(run, FACTS)
    assert path == run / "report.md"
    page = path.read_text(encoding="utf-8")
    for line in (
        "# Run demo",
        "| preset | demo |",
        "| parameters | 2,124,480 |",
        "| shape | 4 layers, width 192, 6 heads, feed-forward 512, context 256 |",
        "| vocabulary | 2,048 tokens |",
        "| corpus | stories |",
        "| trained on | 2,500,000 tokens |",
        "| batch | 16 rows of 256 tokens, 8 at once |",
        "| learning rate | 0.003, cosine, warm-up of 5 steps |",
        "| precision | bf16 |",
        "| device | NVIDIA H200 |",
        "| compile | no |",
        "| seed | 7 |",
        "| torch | 2.13.0 |",
        "| best validation loss | 2.5000 at step 30 |",
        "| bits per byte there | 0.6250 |",
        "| last training loss | 2.0000 |",
        "| steps | 40 of 40, 1 of them skipped |",
        "| ended | after the last step |",
        "| time | 21.5 s |",
        "| tokens a second, median | 1,000 |",
        "| MFU, median | 12.3% |",
        "| peak memory | 1.23 GB |",
        "![training and validation loss](curve.png)",
        "## A sample of step 40",
        "Once upon a time",
        "fuselm train --out 'runs/my run'",
        "fuselm train --resume runs/demo",
    ):
        assert line in page.splitlines(), line
    assert "an early one" not in page
    assert len(page.splitlines()) < 75


def test_the_page_leaves_out_what_nobody_knows(tmp_path: Path) -> None:
    page = run_report.write_report(make_run(tmp_path / "demo", [step(10, 4.0)]), {"device": None}).read_text()
    for word in ("parameters", "corpus", "device", "MFU", "memory", "best", "sample", "curve.png", "Commands", "None"):
        assert word not in page
    assert "| ended | not as far as the log says: it is under way, or was killed |" in page


def test_active_parameters_are_told_where_they_are_fewer(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo", [step(10, 4.0)])
    same = run_report.write_report(run, {"parameters": 1000, "active_parameters": 1000}).read_text()
    assert "| parameters | 1,000 |" in same
    fewer = run_report.write_report(run, {"parameters": 1000, "active_parameters": 400}).read_text()
    assert "| parameters | 1,000, of which a token meets 400 |" in fewer


@pytest.mark.parametrize("text", ["a ```\n# b\n``` c", "`````", "\n```text\n", "plain", "half \ud800 of one"])
def test_a_sample_cannot_leave_its_code_block(text: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo", [step(10, 4.0), {"kind": "sample", "step": 10, "seconds": 1.0, "text": text}])
    page = run_report.write_report(run, {}).read_text(encoding="utf-8")
    block = page[page.index("## A sample of step 10") :].split("\n", 2)[2]
    fence = block[: len(block) - len(block.lstrip("`"))]
    body, _, rest = block.removeprefix(f"{fence}text\n").partition(f"\n{fence}\n")
    assert fence not in text
    assert rest == ""
    assert body.rstrip("\n") == text.replace("\ud800", "?").rstrip("\n")


def test_a_long_sample_is_cut_and_says_so(tmp_path: Path) -> None:
    sample = {"kind": "sample", "step": 10, "seconds": 1.0, "text": "word " * 1000}
    page = run_report.write_report(make_run(tmp_path / "demo", [sample]), {}).read_text()
    assert "## A sample of step 10 (its first 2,000 letters)" in page
    assert page.count("word") == 400


def test_names_and_facts_stay_in_their_cells(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a_b*c", [step(10, 4.0)])
    page = run_report.write_report(run, {"corpus": "x | y\n<b>z</b>", "my_fact": [1]}).read_text()
    assert "# Run a\\_b\\*c" in page
    assert "| corpus | x \\| y &lt;b>z&lt;/b> |" in page
    assert "| my fact | \\[1\\] |" in page
