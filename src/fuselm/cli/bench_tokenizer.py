"""`fuselm bench tokenizer`: reads the command line, prints a table, writes files. bench/tokenizer.py measures.

fuselm bench tokenizer --quick
fuselm bench tokenizer --corpus owt.txt --gpt2-vocab gpt2/ --json | tail -1
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuselm.cli.bench_show import check_folder, no_plots, print_table, progress
from fuselm.cli.paths import typed_path

if TYPE_CHECKING:
    from fuselm.bench.tokenizer import Plan
    from fuselm.bench.tokenizer_rows import Results

# Megabytes of text, and of the long text that is streamed: of a file, of the built-in stories, with --quick.
SIZES = {"file": (100, 1000), "stories": (10, 20), "quick": (2, 2)}

HELP = """Time the tokenizer against tiktoken and Hugging Face tokenizers.

Training with all threads, and its peak memory; encoding into a list, into an array, and, of a str and of bytes, in
several threads; decoding;
the memory that a long text takes when it is encoded as it comes; and what a call with 40 characters costs. All in one
run, with the same text, vocabulary and threads, in turns, and every library must give the same ids. tokenizers, which
is slow, encodes and decodes a tenth of the text. A library that is not installed is left out.

Files: rows.csv, rows.json and tokenizer.png. Measure on a machine that does nothing else.

Examples:

  fuselm bench tokenizer --quick

  fuselm bench tokenizer --corpus owt.txt --megabytes 100 --threads 8

  fuselm bench tokenizer --corpus owt.txt --gpt2-vocab gpt2/ --json | tail -1
"""


def tokenizer(
    corpus: Annotated[
        Path | None, typer.Option(parser=typed_path, help="A text file in UTF-8. Default: built-in stories.")
    ] = None,
    gpt2_vocab: Annotated[
        Path | None,
        typer.Option(
            parser=typed_path,
            help="Folder with encoder.json and vocab.bpe, or vocab.json and merges.txt, to encode with. "
            "Default: the vocabulary that the run trains.",
        ),
    ] = None,
    megabytes: Annotated[
        float | None, typer.Option(help="How much of the corpus to use. Default: 100, of the stories 10.")
    ] = None,
    stream_megabytes: Annotated[
        float | None,
        typer.Option(
            help="Length of the long text, the corpus again and again. Default: 1000, of stories 20; 0: none."
        ),
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=257, help="Entries of the vocabulary that is trained.")] = 10_000,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads for all. Default: one for each core.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each is measured; medians count.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="2 megabytes: shows that it works, not how fast.")] = False,
    label: Annotated[str, typer.Option(help="What to call this machine in files and plot. Default: its CPU.")] = "",
    out: Annotated[
        Path, typer.Option(parser=typed_path, help="Folder to write into; made when it is not there.")
    ] = Path("results/tokenizer"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Time the tokenizer; the help text is HELP."""
    from fuselm.bench.tokenizer import Mismatch, Plan, run, steps
    from fuselm.bench.tokenizer_rows import Results
    from fuselm.text.blocks import thread_count

    sizes = SIZES["quick" if quick else "file" if corpus else "stories"]
    size = _megabytes(megabytes, sizes[0], "--megabytes")
    long = _megabytes(stream_megabytes, sizes[1], "--stream-megabytes", zero=True)
    plan = Plan(size, thread_count(threads), corpus, gpt2_vocab, vocab_size, repeats, long, label)
    _check(plan)
    check_folder(out)
    _check_compiled()
    results, ending, code = Results(), "", 0
    try:
        with tempfile.TemporaryDirectory(dir=out, prefix=".bench-") as folder, progress(steps(plan)) as on_step:
            run(plan, Path(folder), results, on_step)
    except KeyboardInterrupt:
        ending, code = "interrupted: what was measured until then is kept", 130
    except Mismatch as error:
        ending, code = f"the libraries do not agree, so their speeds do not compare. {error}", 1
    header = _header(plan, results)
    written = _write(out, header, results)
    _print(header, results, written, ending, as_json)
    broken = any(note["impl"] == "fuselm" for note in results.notes)
    raise typer.Exit(code or int(broken))


# --- what was asked for ----------------------------------------------------------------------------------------------


def _megabytes(given: float | None, default: float, option: str, zero: bool = False) -> float:
    if given is None:
        return default
    if not math.isfinite(given) or given < 0 or (given == 0 and not zero):
        raise typer.BadParameter(f"a size is a number above 0; got {given}", param_hint=option)
    return given


def _check(plan: Plan) -> None:
    """Read what is to be read: a wrong file is refused now, not after the first ten minutes."""
    from fuselm.bench.tokenizer import read_corpus
    from fuselm.text.tokenizer import Tokenizer

    if plan.corpus:
        try:
            read_corpus(plan.corpus, plan.megabytes)
        except OSError as error:
            words = f"cannot read {plan.corpus}: {error.strerror}; name a text file"
            raise typer.BadParameter(words, param_hint="--corpus") from None
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--corpus") from None
    if plan.vocabulary:
        try:
            kind = Tokenizer.load(plan.vocabulary).kind
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error), param_hint="--gpt2-vocab") from None
        if kind != "bpe":
            words = f"the libraries have byte-level BPE in common; {plan.vocabulary} is of another kind: {kind}"
            raise typer.BadParameter(words, param_hint="--gpt2-vocab")


def _check_compiled() -> None:
    """Build and load the library now: no clock may run meanwhile, and plain Python is not worth one."""
    from fuselm.compiler import BuildError
    from fuselm.text import native

    try:
        native.library()
    except (BuildError, OSError) as error:
        typer.echo(f"The tokenizer is measured as compiled code, and cannot be compiled here. {error}", err=True)
        raise typer.Exit(1) from None


# --- what is shown ---------------------------------------------------------------------------------------------------


def _header(plan: Plan, results: Results) -> dict[str, Any]:
    from fuselm.bench import machine, tokenizer_peers

    found = machine.describe("cpu")
    return {
        "label": plan.label,
        "cpu": found["cpu"],
        "threads": plan.threads,
        "corpus": plan.corpus.name if plan.corpus else "stories",
        "megabytes": results.megabytes,
        "vocabulary": plan.vocabulary.name if plan.vocabulary else "trained in the run",
        "vocab_size": plan.vocab_size,
        "versions": {**found["versions"], **tokenizer_peers.versions()},
        "date": found["date"],
        "commit": found["commit"],
    }


def _write(out: Path, header: dict[str, Any], results: Results) -> list[Path]:
    from fuselm.bench.tokenizer_rows import write_rows

    written = write_rows(out, header, results)
    if results.rows:
        try:
            from fuselm.bench import plots

            plots.tokenizer(results.rows, out / "tokenizer.png", header["label"] or header["cpu"])
            written.append(out / "tokenizer.png")
        except ImportError:
            no_plots()
    return written


def _print(header: dict[str, Any], results: Results, written: list[Path], ending: str, as_json: bool) -> None:
    from fuselm.bench.tokenizer_rows import summary

    figures = summary(results.rows)
    if as_json:
        tables = {"rows": results.rows, "notes": results.notes}
        document = {**header, "ending": ending, **figures, **tables, "files": [str(path) for path in written]}
        typer.echo(json.dumps(document))
        return
    print_table("task|library|threads|MB|time|MB/s|RSS MB|speedup", [_cells(row, figures) for row in results.rows])
    if figures:
        typer.echo("speedup: fuselm's MB/s over that library's. RSS: before, and at most.")
    for note in results.notes:
        typer.echo(": ".join(["note", *(note[key] for key in ("task", "impl", "note") if note[key])]), err=True)
    typer.echo(f"wrote {', '.join(map(str, written))}")
    if ending:
        typer.echo(ending, err=True)


def _cells(row: dict[str, Any], figures: dict[str, float]) -> tuple[str, ...]:
    """Few and short enough for 80 columns; the files have the rest."""
    from fuselm.bench.tokenizer_rows import speedup_name

    times = figures.get(speedup_name(row["task"], row["impl"]))
    peak = row["peak_rss_mb"]
    return (
        row["task"],
        row["impl"],
        str(row["threads"]),
        f"{row['megabytes']:.3g}",
        f"{row['us_per_call']:.3g} µs" if row["us_per_call"] else f"{row['seconds']:.3g} s",
        f"{row['mb_per_s']:.3g}",
        "" if peak is None else f"{row['start_rss_mb']:.0f} to {peak:.0f}",
        "" if times is None else f"{times:.3g}",
    )
