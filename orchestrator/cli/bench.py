"""`gemmfleet bench`: several backends on the same shapes, interleaved on the same device."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import DriveOptions, FamilyOpt, InventoryOpt, RunOptions

if TYPE_CHECKING:
    from orchestrator.paths import RunPaths
    from orchestrator.run.prepare import Prepared, RunRequest
    from worker.protocol.bench import Side


def bench(
    shapes: Annotated[
        Path | None,
        typer.Argument(metavar="[SHAPES.csv]", help="The GEMM shapes to bench; default: the guide's 15 FP4 shapes."),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "-b",
            "--backend",
            help="torch, aiter, aiter-triton, aiter-gluon, aiter-batched; repeatable or with commas; default:"
            " aiter-triton and aiter-gluon where AITER is, else torch.",
            metavar="B,...",
        ),
    ] = None,
    inventory: InventoryOpt = None,
    family: FamilyOpt = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            help="A software stack to alternate with others on the same slot: an interpreter on the node, or an image"
            " of the worker, with switches of its own; repeatable.",
            metavar="NAME=[PYTHON|IMAGE][,VAR=VALUE...]",
        ),
    ] = None,
    config_set: Annotated[
        list[str] | None,
        typer.Option(
            "--config-set",
            help="Configs of AITER's Triton GEMMs to alternate with others: a tree's, or a run's configs/aiter;"
            " repeatable. NAME= is the node's own.",
            metavar="NAME=DIR",
        ),
    ] = None,
    db: Annotated[Path | None, typer.Option(help="Tuned table in force for the backend aiter.", metavar="CSV")] = None,
    gluon_from: Annotated[
        Path | None,
        typer.Option(help="Gluon kernel and configuration that overlay a scratch copy of AITER.", metavar="DIR"),
    ] = None,
    timer: Annotated[str, typer.Option(help="events: device events; rocprof: rocprofv3's kernel times.")] = "events",
    kernel: Annotated[
        str, typer.Option(help="Timer rocprof: count only kernels with a matching name.", metavar="REGEX")
    ] = "",
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, max=20, help="Measurements of a shape that must agree.")
    ] = 3,
    extra: Annotated[int, typer.Option(min=0, max=20, help="Further measurements where they disagree.")] = 2,
    stability: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Largest spread, (max - min) / mean, of measurements that agree.")
    ] = 0.05,
    sample: Annotated[float, typer.Option(min=0.001, max=60.0, help="Longest time of one measurement.")] = 0.2,
    err_ratio: Annotated[float, typer.Option(min=0.0, max=1.0, help="Largest share of wrong elements.")] = 0.05,
    option: Annotated[
        list[str] | None,
        typer.Option("-O", "--tuner-option", help="rotate_mb or seed, repeatable.", metavar="NAME=VALUE"),
    ] = None,
    *,
    run: RunOptions,
    drive: DriveOptions,
) -> None:
    """Measure several backends on the same shapes, interleaved.

    All backends of a shape run in turn on the same device, so that drift affects each of them alike.
    """
    from orchestrator.bench import request
    from orchestrator.cli import tuning
    from orchestrator.run.prepare import prepare
    from worker.protocol.bench import lodge

    sides = request.sides(env or [], config_set or [])
    options = request.options(
        sides, backend or [], db, gluon_from, timer=timer, kernel=kernel, runs=repeats, extra=extra, within=stability,
        sample_s=sample, **tuning.parse_options(option or []),
    )  # fmt: skip
    if shapes is None:
        shapes, family = request.suite(), family or request.SUITE_FAMILY
        print(f"note: no shapes file: the FP4 guide's 15 shapes ({shapes}), family {family}", file=sys.stderr)
    options, texts = lodge(options)
    asked = tuning.run_request(
        run, drive, shapes=shapes, inventory=inventory, family=family, tuner=request.TUNER, err_ratio=err_ratio,
        options=options, texts=texts, bench=True,
    )  # fmt: skip
    prepared = prepare(asked)
    if any(s.image for s in sides):
        raise typer.Exit(_passes(prepared, asked, sides, run))
    raise typer.Exit(tuning.start(prepared, run))


def _passes(prepared: Prepared, asked: RunRequest, sides: Sequence[Side], run: RunOptions) -> int:
    """Bench two or more images in turn, print how it went, return the exit code. Raises what a run raises."""
    from orchestrator.bench.request import refuse_other_engines, run_passes
    from orchestrator.cli import tuning
    from orchestrator.cli.output.run_end import finish_bench
    from orchestrator.cli.output.status import make_view
    from orchestrator.errors import InputError
    from orchestrator.run.drive import drive

    if run.detach:
        raise InputError("--detach: with images the controller has several runs to drive; leave it out")
    refuse_other_engines(prepared)
    if run.plan:
        tuning.show_plan(prepared, json_=run.json_)
        return 0
    tuning.show_notes(prepared, quiet=run.json_)

    def drive_pass(paths: RunPaths, what: str) -> str:
        print(f"{what}: run {paths.run}", file=sys.stderr if run.json_ else sys.stdout, flush=True)
        with contextlib.closing(make_view()) as view:
            return drive(paths, view).state

    found, state = run_passes(prepared, asked, sides, drive_pass)
    found.write()
    return finish_bench(found, state, json_=run.json_)
