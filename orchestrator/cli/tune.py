"""`gemmfleet tune`: tune the shapes of a CSV, with flags that are made from the tuners' specs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from orchestrator.cli.options import DriveOptions, FamilyOpt, GpuHoursOpt, InventoryOpt, RunOptions, UntilGainOpt
from orchestrator.tuners import flags, in_words

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
    shapes: Annotated[Path, typer.Argument(metavar="SHAPES.csv", help="The GEMM shapes to tune.")],
    inventory: InventoryOpt = None,
    family: FamilyOpt = None,
    tuner: Annotated[
        str | None,
        typer.Option(
            help="aiter, aiter-triton, replay, torch, triton or an installed one; default: the inventory's.",
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
    **of_tuner: Any,
) -> None:
    """Tune the shapes of a CSV on every slot of an inventory."""
    from orchestrator.cli import tuning
    from orchestrator.errors import InputError
    from orchestrator.run.prepare import prepare

    if not by_value and (until_gain is not None or gpu_hours is not None):
        raise InputError("--until-gain and --gpu-hours belong to --by-value")
    request = tuning.run_request(
        run, drive, shapes=shapes, inventory=inventory, family=family, tuner=tuner, db=db, retune=retune,
        by_value=by_value, until_gain=tuning.share_of(until_gain), gpu_hours=gpu_hours,
        options={**tuning.parse_options(option or []), **given(of_tuner)}, err_ratio=err_ratio,
    )  # fmt: skip
    raise typer.Exit(tuning.start(prepare(request), run))
