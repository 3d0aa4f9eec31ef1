"""`gemmfleet tune`, `bench` and `recheck`: commands that plan a run and drive it.

The flags of `tune` are made from the tuners' specs.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from orchestrator.cli.options import DriveOptions, FamilyOpt, GpuHoursOpt, InventoryOpt, RunOptions, UntilGainOpt
from orchestrator.cli.printer import Page, plain
from orchestrator.errors import InputError
from orchestrator.families import GUIDE_FAMILY, flags, in_words
from orchestrator.paths import RunPaths
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.controller.prepared_run import PreparedRun
    from orchestrator.controller.request import RunRequest
    from orchestrator.results.recheck import Recheck
    from worker.protocol.bench import Side

Command = TypeVar("Command", bound=Callable[..., Any])


def with_tuner_flags(command: Command) -> Command:
    """Replace the command's `**of_tuner` by a parameter for each flag of a built-in tuner."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    command.__signature__ = signature.replace(parameters=[*own, *_parameters()])  # type: ignore[attr-defined]
    return command


def given(of_tuner: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the tuner by name, of the flags that were given."""
    return {name: value for name, value in of_tuner.items() if value is not None and value is not False}


def _parameters() -> list[inspect.Parameter]:
    out = []
    for option, (flag, tuners) in sorted(flags().items(), key=lambda f: f[1][1]):
        kind: Any = list[str] if flag.kind is list else flag.kind
        heading = "T" + in_words(tuners).removeprefix("the t")
        metavar = flag.metavar or {int: "N", float: "SECONDS"}.get(flag.kind)
        made = typer.Option(flag.flag, help=flag.help, metavar=metavar, min=flag.minimum, rich_help_panel=heading)
        switch = flag.kind is bool
        annotation: Any = Annotated[kind if switch else kind | None, made]
        default = False if switch else None
        out.append(inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    return out


@with_tuner_flags
def tune(
    shapes: Annotated[list[Path], typer.Argument(metavar="SHAPES.csv", help="The GEMM shapes to tune.")],
    inventory: InventoryOpt = None,
    family: Annotated[
        str | None,
        typer.Option(
            help="GEMM family; of several lists: where name and columns do not tell; default: the inventory's.",
            metavar="F",
        ),
    ] = None,
    tuner: Annotated[
        str | None,
        typer.Option(
            help="aiter, aiter-triton, replay, torch, vllm or an installed one; default: the inventory's.",
            metavar="T",
        ),
    ] = None,
    db: Annotated[
        Path | None,
        typer.Option(help="Tuned DB: shapes it has are skipped, winners are merged into it.", metavar="CSV"),
    ] = None,
    retune: Annotated[bool, typer.Option("--retune", help="Also tune shapes that the DB has.")] = False,
    by_value: Annotated[
        bool, typer.Option("--by-value", help="First what the workload wins most by: calls (column count) x time won.")
    ] = False,
    until_gain: UntilGainOpt = None,
    gpu_hours: GpuHoursOpt = None,
    *,
    run: RunOptions,
    option: Annotated[
        list[str] | None,
        typer.Option("-O", "--tuner-option", help="Option of the tuner, repeatable.", metavar="NAME=VALUE"),
    ] = None,
    err_ratio: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Largest share of wrong elements of a winner; default 0.05 (fmoe: 0.1).", metavar="X"
        ),
    ] = None,
    drive: DriveOptions,
    render: Annotated[
        Path | None,
        typer.Option("--render", help="Write the scripts of a run to DIR; ask no node, start nothing.", metavar="DIR"),
    ] = None,
    **of_tuner: Any,
) -> Page:
    """Tune shapes on every slot of an inventory.

    Lists of several families are tuned one family after another, each as a run of its own.
    """
    from orchestrator.cli import tuning
    from orchestrator.controller.prepare import prepare_each

    if not by_value and (until_gain is not None or gpu_hours is not None):
        raise InputError("--until-gain and --gpu-hours belong to --by-value")
    if render is not None and run.plan:
        raise InputError("--plan writes nothing, and --render does: leave one of them out")
    request = tuning.run_request(
        run, drive, shapes=shapes[0], inventory=inventory, family=family, tuner=tuner, db=db, retune=retune,
        by_value=by_value, until_gain=tuning.share_of(until_gain), gpu_hours=gpu_hours,
        options={**tuning.parse_options(option or []), **given(of_tuner)}, err_ratio=err_ratio,
        ask=render is None,
    )  # fmt: skip
    prepared = prepare_each(request, shapes)
    return tuning.start_each(prepared, run) if render is None else tuning.render_page(prepared, render)


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
    run: RunOptions,
    drive: DriveOptions,
) -> Page:
    """Measure several backends on the same shapes, interleaved.

    All backends of a shape run in turn on the same device, so that drift affects each of them alike.
    """
    from orchestrator.bench import request
    from orchestrator.cli import tuning
    from orchestrator.controller.prepare import prepare
    from worker.protocol.bench import lodge

    sides = request.sides(env or [], config_set or [])
    options = request.options(
        sides, backend or [], db, gluon_from, timer=timer, kernel=kernel, runs=repeats, extra=extra, within=stability,
        sample_s=sample, warmup=warmup, iters=iters, **tuning.parse_options(option or []),
    )  # fmt: skip
    if shapes is None:
        shapes, family = request.suite(), family or GUIDE_FAMILY
        print(f"note: no shapes file: the FP4 guide's 15 shapes ({shapes}), family {family}", file=sys.stderr)
    options, texts = lodge(options)
    asked = tuning.run_request(
        run, drive, shapes=shapes, inventory=inventory, family=family, tuner=request.TUNER, err_ratio=err_ratio,
        options=options, texts=texts, bench=True,
    )  # fmt: skip
    prepared = prepare(asked)
    if any(s.image for s in sides):
        return _passes(prepared, asked, sides, run)
    return tuning.start(prepared, run)


def _passes(prepared: PreparedRun, asked: RunRequest, sides: Sequence[Side], run: RunOptions) -> Page:
    """Bench two or more images in turn, and return the report. Raises what a run raises."""
    from orchestrator.bench.request import refuse_other_engines, run_passes
    from orchestrator.cli import tuning
    from orchestrator.cli.ending import bench_page
    from orchestrator.cli.screen import make_view
    from orchestrator.controller.drive import drive

    if run.detach:
        raise InputError("--detach: with images the controller has several runs to drive; leave it out")
    refuse_other_engines(prepared)
    if run.plan:
        return tuning.plan_page(prepared)
    tuning.show_notes(prepared, quiet=run.json_)

    def drive_pass(paths: RunPaths, what: str) -> str:
        print(f"{what}: run {paths.run}", file=sys.stderr if run.json_ else sys.stdout, flush=True)
        with contextlib.closing(make_view(quiet=run.json_)) as view:
            return drive(paths, view)

    found, state = run_passes(prepared, asked, sides, drive_pass)
    found.write()
    return bench_page(found, state)


def recheck(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="Tuned table, or the folder of its run.")],
    image: Annotated[str | None, typer.Option(metavar="NEW", help="The new image; default: the inventory's.")] = None,
    inventory: InventoryOpt = None,
    family: FamilyOpt = None,
    tuner: Annotated[str | None, typer.Option(metavar="T", help="Default: the run's, else the inventory's.")] = None,
    profile: Annotated[
        list[Path] | None, typer.Option(metavar="CSV", help="Profile with the runners-up; repeatable.")
    ] = None,
    runners_up: Annotated[int, typer.Option(min=0, max=100, metavar="N", help="Measured beside each row.")] = 3,
    slower: Annotated[float, typer.Option(min=0.0, metavar="X", help="Tolerance beside the median row.")] = 0.05,
    only_check: Annotated[
        bool, typer.Option("--only-check", help="Tune nothing; exit code 1 where rows need it.")
    ] = False,
    option: Annotated[
        list[str] | None, typer.Option("-O", "--tuner-option", help="As of `tune`, repeatable.", metavar="NAME=VALUE")
    ] = None,
    *,
    run: RunOptions,
    drive: DriveOptions,
) -> Page:
    """Check a tuned table on a new build; tune what fails it.

    Each row's kernel and its runners-up are measured. Rows that are gone, slower or overtaken are tuned at once.
    """
    from orchestrator.cli import tuning
    from orchestrator.cli.ending import EXIT, end_page, next_lines
    from orchestrator.controller.prepare import prepare
    from orchestrator.controller.recheck_run import prepare_recheck
    from orchestrator.ledger.reader import LedgerReader
    from orchestrator.results.recheck import judge, write_rows
    from orchestrator.shapes.model import write_list

    if run.detach:
        raise InputError("recheck waits for its own measurements: leave out --detach")
    request = tuning.run_request(
        run, drive, shapes=table, inventory=inventory, image=image, family=family, tuner=tuner,
        options=tuning.parse_options(option or []),
    )  # fmt: skip
    prepared, rows = prepare_recheck(request, profile or [], runners_up)
    if run.plan:
        return tuning.plan_page(prepared)
    tuning.show_notes(prepared, quiet=run.json_)
    paths, key_names = prepared.create(), prepared.family.key_names
    write_rows(paths.recheck, str(table), rows, slower)
    state, error = tuning.drive_state(paths, json_=run.json_)
    if error is not None:
        raise error
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        found = judge(ledger, paths.recheck)
    page, made, code = _page(found), [paths], EXIT[state]
    if code == 0 and found.to_tune and not only_check:
        if not run.json_:
            page.print()
        queued, config = paths.root / "queued.csv", prepared.config
        write_list(queued, [r.key for r in found.to_tune], prepared.family)
        again = tuning.run_request(
            run, drive, shapes=queued, inventory=paths.inventory, family=config.family, tuner=config.tuner,
            options=config.options, err_ratio=config.err_ratio,
        )  # fmt: skip
        made.append(prepare(again).create())
        state, error = tuning.drive_state(made[1], json_=run.json_)
        page = end_page(made[1], state, alone=state != "finished")
        page.error, code = error, page.code
    page.code = code or int(only_check and bool(found.to_tune))
    page.document = {"runs": [p.run for p in made], "exit_code": page.code, **found.to_json(key_names)}
    if not only_check:
        folders = " ".join(quote(str(p.root)) for p in made)
        page.line(*next_lines([(f"db merge {folders} --into NEW.csv", "the table of the new build")]))
    return page


def _page(found: Recheck) -> Page:
    """Return the rows that need tuning, and the counts."""
    from orchestrator.shapes.model import describe

    page, rows = Page(), []
    for r in found.to_tune:
        now = "" if r.now_us is None else f"{r.now_us:.2f}"
        other = r.why if r.by_us is None else f"{r.by} {r.by_us:.2f} us"
        rows.append((describe(r.key), r.verdict, f"{r.then_us:.2f}", now, plain(r.kernel, 50), plain(other, 90)))
    heads = ("shape", "row", "us then", "us now", "kernel", "runner-up or reason")
    page.table(heads, rows, right=("us then", "us now"))
    counts = ", ".join(f"{n} {verdict}" for verdict, n in found.counts.items())
    of = f"{found.table}: {plural(len(found.rows), 'row')}: {counts}"
    page.line(f"{of}; time now over then, median: {found.drift:.3f}")
    page.line(f"{found.slot_s:.1f} s of slots; {plural(len(found.to_tune), 'row')} to be tuned again")
    return page
