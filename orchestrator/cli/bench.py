"""`gemmfleet bench`: several backends on the same shapes, interleaved on the same device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import DriveOptions, FamilyOpt, InventoryOpt, RunOptions

if TYPE_CHECKING:
    from orchestrator.bench import request
    from orchestrator.paths import RunPaths
    from orchestrator.run.prepare import RunRequest


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
    from orchestrator.bench import alternation, request
    from orchestrator.cli import tuning

    wanted = request.BenchRequest(
        backends=backend or (["aiter-triton"] if config_set else []), envs=env or [],
        config_sets=config_set or [], timer=timer, kernel=kernel, runs=repeats, extra=extra,
        stability=stability, sample_s=sample, table=db, gluon_from=gluon_from,
        more=tuning.parse_options(option or []),
    )  # fmt: skip
    if shapes is None:
        shapes, family = request.suite(), family or request.SUITE_FAMILY
        print(f"note: no shapes file: the FP4 guide's 15 shapes ({shapes}), family {family}", file=sys.stderr)
    run_request = tuning.run_request(
        run, drive, shapes=shapes, inventory=inventory, family=family, tuner=request.TUNER, err_ratio=err_ratio
    )
    named = request.stacks(wanted.envs)
    if any(s.image for s in named):
        raise typer.Exit(_alternate(run_request, wanted, named, run))
    raise typer.Exit(tuning.start(alternation.prepared(run_request, wanted), run))


def _alternate(
    run_request: RunRequest, wanted: request.BenchRequest, stacks: Sequence[request.Stack], run: RunOptions
) -> int:
    """Bench two or more images in turn, print how it went, return the exit code. Raises what a run raises."""
    from orchestrator.bench import alternation
    from orchestrator.cli import tuning
    from orchestrator.cli.output.run_end import finish_bench
    from orchestrator.cli.output.status import make_view
    from orchestrator.errors import InputError
    from orchestrator.results.bench import write_files
    from orchestrator.run.drive import drive

    if run.detach:
        raise InputError("--detach: with images the controller has several runs to drive; leave it out")
    first = alternation.prepared(run_request, wanted)
    alternation.refuse_other_engines(first)
    if run.plan:
        tuning.show_plan(first, json_=run.json_)
        return 0
    tuning.show_notes(first, quiet=run.json_)
    of = alternation.alternation_of(first, run_request, wanted, stacks)

    def drive_pass(paths: RunPaths, what: str) -> str:
        print(f"{what}: run {paths.run}", flush=True)
        view = make_view()
        try:
            return drive(paths, view).state
        finally:
            view.close()

    passes = alternation.Passes(of, drive_pass)
    state = passes.go(first.listed.shapes)
    found = passes.found()
    write_files(of.family, of.root, found, passes.stacks)
    return finish_bench(of.root, of.family, found, passes.stacks, state, len(first.listed.shapes), json_=run.json_)
