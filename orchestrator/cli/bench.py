"""`gemmfleet bench`: measure backends side by side, or images in turn."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.bench import request as bench_request
from orchestrator.bench.image_passes import refuse_other_engines, run_passes
from orchestrator.cli.bench_page import bench_page
from orchestrator.cli.driving import make_request, start
from orchestrator.cli.live_view import make_view
from orchestrator.cli.options import FamilyOpt, InventoryOpt, RunFlags, SettingFlags, parse_tuner_options
from orchestrator.cli.plan_page import announce_run, plan_page, show_notes
from orchestrator.command_hints import command
from orchestrator.controller.drive import drive as drive_run
from orchestrator.controller.prepare import prepare
from orchestrator.controller.prepared_run import PreparedRun
from orchestrator.controller.request import RunRequest
from orchestrator.errors import InputError
from orchestrator.families import GUIDE_FAMILY
from orchestrator.pages import Page
from orchestrator.paths import RunPaths
from worker.protocol.bench import Side, take_texts_out

EXTRA_OPTIONS = ("rotate_mb", "seed")
"""Options of the tuner `bench` that the command has no option of its own for."""


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
            help="A software stack to alternate with others on the same slot: an interpreter on the node, or an image"
            " of the worker, with switches of its own; repeatable.",
            metavar="NAME=[PYTHON|IMAGE][,VAR=VALUE...]",
        ),
    ] = None,
    config_set: Annotated[
        list[str] | None,
        typer.Option(
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
    repeats: Annotated[int, typer.Option(min=1, max=20, help="Measurements of a shape that must agree.")] = 3,
    extra: Annotated[int, typer.Option(min=0, max=20, help="Further measurements where they disagree.")] = 2,
    stability: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Largest spread, (max - min) / mean, of measurements that agree.")
    ] = 0.05,
    warmup: Annotated[int, typer.Option(min=0, max=1000, metavar="N", help="With --iters: calls before.")] = 0,
    iters: Annotated[
        int,
        typer.Option(
            min=0, max=10_000, metavar="N", help="Instead: the plain mean of N calls, as in the FP4 guide; noisier."
        ),
    ] = 0,
    sample: Annotated[float, typer.Option(min=0.001, max=60.0, help="Longest time of one measurement.")] = 0.2,
    err_ratio: Annotated[float, typer.Option(min=0.0, max=1.0, help="Largest share of wrong elements.")] = 0.05,
    option: Annotated[
        list[str] | None,
        typer.Option("-O", "--tuner-option", help="rotate_mb or seed, repeatable.", metavar="NAME=VALUE"),
    ] = None,
    *,
    run: RunFlags,
    settings: SettingFlags,
) -> Page:
    """Measure several backends on the same shapes, interleaved.

    All backends of a shape run in turn on the same device, so that drift affects each of them alike.
    """
    extra_options = parse_tuner_options(option or [])
    for name in extra_options:
        if name not in EXTRA_OPTIONS:
            names = " and ".join(EXTRA_OPTIONS)
            raise InputError(f"-O {name}: only {names} are set so; see: {command('bench --help')}")
    sides = bench_request.parse_sides(env or [], config_set or [])
    options = bench_request.tuner_options(
        sides,
        backend or [],
        db,
        gluon_from,
        timer=timer,
        kernel=kernel,
        runs=repeats,
        extra=extra,
        within=stability,
        sample_s=sample,
        warmup=warmup,
        iters=iters,
        **extra_options,
    )
    if shapes is None:
        shapes = bench_request.example_suite()
        family = family or GUIDE_FAMILY
        print(f"note: no shapes file: the FP4 guide's 15 shapes ({shapes}), family {family}", file=sys.stderr)
    options, texts = take_texts_out(options)
    request = make_request(
        run,
        settings,
        shapes=shapes,
        inventory=inventory,
        family=family,
        tuner=bench_request.TUNER,
        err_ratio=err_ratio,
        options=options,
        texts=texts,
        bench=True,
    )
    prepared = prepare(request)
    if any(side.image for side in sides):
        return _bench_images(prepared, request, sides, run)
    return start(prepared, run)


def _bench_images(prepared: PreparedRun, request: RunRequest, sides: Sequence[Side], flags: RunFlags) -> Page:
    """Bench two or more images in turn, and return the report. Raises what a run raises."""
    if flags.detach:
        raise InputError("--detach: with images the controller has several runs to drive; leave it out")
    refuse_other_engines(prepared)
    if flags.plan:
        return plan_page(prepared)
    show_notes(prepared, quiet=flags.json_)
    announce_run(prepared.config.run, quiet=flags.json_)

    def drive_pass(paths: RunPaths, what: str) -> str:
        print(f"{what}: run {paths.run}", file=sys.stderr if flags.json_ else sys.stdout, flush=True)
        with contextlib.closing(make_view(quiet=flags.json_)) as view:
            return drive_run(paths, view)

    results, state = run_passes(prepared, request, sides, drive_pass)
    results.write()
    return bench_page(results, state)
