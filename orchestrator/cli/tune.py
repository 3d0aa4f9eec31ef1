"""`gemmfleet tune`: plan a run and drive it. Its flags for a tuner are made from the tuners' specs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from orchestrator.cli.driving import make_request, start_each
from orchestrator.cli.options import (
    GpuHoursOpt,
    InventoryOpt,
    RunFlags,
    SettingFlags,
    UntilGainOpt,
    parse_share,
    parse_tuner_options,
)
from orchestrator.cli.plan_page import render_page
from orchestrator.controller.prepare import prepare_each
from orchestrator.errors import InputError
from orchestrator.families import flags, in_words
from orchestrator.pages import Page
from worker.tuners.catalog import built_in_for_tune

Command = TypeVar("Command", bound=Callable[..., Any])


def with_tuner_flags(command: Command) -> Command:
    """Replace the command's `**of_tuner` by a parameter for each flag of a built-in tuner."""
    signature = inspect.signature(command, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters += _tuner_parameters()
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


def set_flags(of_tuner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tuner's options by name, of the flags that the user typed."""
    return {name: value for name, value in of_tuner.items() if value is not None and value is not False}


def _tuner_parameters() -> list[inspect.Parameter]:
    """Return a parameter for each flag of a built-in tuner, ordered by tuners. It stands under their heading."""
    parameters = []
    for option, (flag, tuners) in sorted(flags().items(), key=lambda item: item[1][1]):
        is_switch = flag.kind is bool
        kind: Any = list[str] if flag.kind is list else flag.kind
        typer_option = typer.Option(
            flag.flag,
            help=flag.help,
            metavar=flag.metavar or {int: "N", float: "SECONDS"}.get(flag.kind),
            min=flag.minimum,
            rich_help_panel="T" + in_words(tuners).removeprefix("the t"),  # "the tuner aiter" -> "Tuner aiter"
        )
        annotation: Any = Annotated[kind if is_switch else kind | None, typer_option]
        parameters.append(
            inspect.Parameter(
                option,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if is_switch else None,
                annotation=annotation,
            )
        )
    return parameters


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
            help=f"{', '.join(built_in_for_tune())} or an installed one; default: the inventory's.",
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
    run: RunFlags,
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
    settings: SettingFlags,
    render: Annotated[
        Path | None,
        typer.Option(help="Write the scripts of a run to DIR; ask no node, start nothing.", metavar="DIR"),
    ] = None,
    **of_tuner: Any,
) -> Page:
    """Tune shapes on every slot of an inventory.

    Lists of several families are tuned one family after another, each as a run of its own.
    """
    if not by_value and (until_gain is not None or gpu_hours is not None):
        raise InputError("--until-gain and --gpu-hours belong to --by-value")
    if render is not None and run.plan:
        raise InputError("--plan writes nothing, and --render does: leave one of them out")
    request = make_request(
        run,
        settings,
        shapes=shapes[0],
        inventory=inventory,
        family=family,
        tuner=tuner,
        db=db,
        retune=retune,
        by_value=by_value,
        until_gain=parse_share(until_gain),
        gpu_hours=gpu_hours,
        options={**parse_tuner_options(option or []), **set_flags(of_tuner)},
        err_ratio=err_ratio,
        ask=render is None,
    )
    prepared = prepare_each(request, shapes)
    return start_each(prepared, run) if render is None else render_page(prepared, render)
