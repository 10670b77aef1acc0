"""`fuselm build`: compile the native libraries now instead of on first use.

For container images, clusters whose compute nodes have no compiler, and anyone who wants to see the compiler at work.
It knows how to ask and how to print; kernels/build.py does the building.

    fuselm build                        # for the GPUs here, every library this environment can use
    fuselm build --arch all --json      # for every supported GPU; one JSON object on stdout
"""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

HELP = """Build the CUDA kernels and their PyTorch and JAX bindings now.

Without it they are built when the first CUDA tensor arrives. What is built lies in a cache and is not built again.

Examples:

  fuselm build

  fuselm build --arch all --json

  fuselm build --arch 90a --target torch --verbose
"""


def build(
    arch: Annotated[str, typer.Option(help="auto (the GPUs here), all, or a list such as 75,90a,ptx120.")] = "auto",
    target: Annotated[str, typer.Option(help="core, torch, jax, or all that this environment can use.")] = "all",
    verbose: Annotated[bool, typer.Option("--verbose", help="Show every compiler command.")] = False,
    clean: Annotated[bool, typer.Option("--clean", help="Empty the build cache first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Build; the help text is HELP."""
    from fuselm.kernels import build as native
    from fuselm.kernels.toolchain import label_of, parse_architectures

    if target not in (*native.LIBRARIES, "all"):
        raise typer.BadParameter(f"a target is core, torch, jax or all; got {target!r}", param_hint="--target")
    try:
        architectures = parse_architectures(arch)
        if clean:
            native.clean()
        rows = [_build_one(name, target, architectures, verbose) for name in _names(target, native.LIBRARIES)]
    except native.BuildError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps({"architectures": architectures, "libraries": rows}))
        return
    typer.echo(f"architectures: {label_of(architectures)}")
    for row in rows:
        typer.echo(_sentence(row))


def _names(target: str, libraries: tuple[str, ...]) -> tuple[str, ...]:
    return libraries if target == "all" else (target,)


def _build_one(name: str, target: str, architectures: tuple[str, ...], verbose: bool) -> dict[str, Any]:
    from fuselm.kernels import build as native

    start, already = time.monotonic(), native.is_built(name, architectures)
    try:
        path = native.library(name, architectures, verbose=verbose)
    except native.Unavailable as reason:
        # `all` means all that can be used here: an environment without JAX is not a failed build.
        if target == name:
            raise
        return {"target": name, "state": "skipped", "reason": str(reason)}
    seconds = round(time.monotonic() - start, 1)
    return {"target": name, "state": "cached" if already else "built", "path": str(path), "seconds": seconds}


def _sentence(row: dict[str, Any]) -> str:
    if row["state"] == "skipped":
        return f"{row['target']}: skipped. {row['reason']}"
    how = "was built already" if row["state"] == "cached" else f"built in {row['seconds']:.1f} s"
    return f"{row['target']}: {how}: {row['path']}"
