"""Options and arguments that several commands share, and groups of them that a command takes as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import typer

from orchestrator.cli.printer import finish_page
from orchestrator.pages import Page
from orchestrator.paths import DEFAULT_RUNS

RunArg = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="Run id or a prefix of it, or its folder; default: the latest."),
]
RunsOpt = Annotated[Path, typer.Option("--runs", help="Folder of the runs.", metavar="DIR")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


BusyOpt = Annotated[
    Literal["wait", "skip", "share"] | None,
    typer.Option(
        "--busy",
        help="Nodes in use by others: wait until they are free, skip them, or share them; default: the inventory's,"
        " else wait.",
    ),
]

BuildOpt = Annotated[
    str | None,
    typer.Option("--build", metavar="TREE|IMAGE", help="AITER that will load the rows: its folder, or an image."),
]
BuildNodesOpt = Annotated[
    Path | None,
    typer.Option("-i", "--inventory", metavar="INV", help="Nodes that may have the image of --build."),
]
InventoryOpt = Annotated[
    Path | None,
    typer.Option("-i", "--inventory", help="Nodes to use; default: this machine.", metavar="INV"),
]
TableFamilyOpt = Annotated[
    str | None, typer.Option("--family", metavar="F", help="Family, where name and columns of a table are ambiguous.")
]
FamilyOpt = Annotated[str | None, typer.Option("--family", help="GEMM family; default: the inventory's.", metavar="F")]
LimitOpt = Annotated[
    str | None, typer.Option("--limit", help="Only nodes with this label (or of this name).", metavar="LABEL")
]
AcceptNewHostKeysOpt = Annotated[
    bool, typer.Option("--accept-new-host-keys", help="Trust keys of hosts not seen before.")
]
UntilGainOpt = Annotated[
    str | None,
    typer.Option("--until-gain", help="With --by-value: stop at this share of the expected gain.", metavar="95%"),
]
DetachOpt = Annotated[
    bool, typer.Option("--detach", help="Leave the controller in the background; prints the run's id.")
]
GpuHoursOpt = Annotated[
    float | None,
    typer.Option("--gpu-hours", min=0.0, help="With --by-value: stop after this many GPU hours.", metavar="H"),
]


class RunOptions(NamedTuple):
    """Group: the folder and the nodes of a run that a command plans, and the ways to start it."""

    runs: RunsOpt = DEFAULT_RUNS
    limit: LimitOpt = None
    plan: Annotated[bool, typer.Option("--plan", help="Print what would run where; start and write nothing.")] = False
    detach: DetachOpt = False
    json_: JsonOpt = False


class DriveOptions(NamedTuple):
    """Group: timeouts for nodes and groups of the run that a command starts, and what to do with occupied nodes."""

    accept_new_host_keys: AcceptNewHostKeysOpt = False
    lost_after: Annotated[
        float,
        typer.Option(
            "--lost-after", min=1.0, help="Seconds without an answer until a node is given up.", metavar="SECONDS"
        ),
    ] = 90.0
    busy: BusyOpt = None
    hold: Annotated[
        bool, typer.Option("--hold", help="Keep leases that have no work; default: give them back after 2 minutes.")
    ] = False
    watchdog: Annotated[
        float, typer.Option("--watchdog", min=1.0, help="Seconds without progress that make a hang.", metavar="SECONDS")
    ] = 300.0
    grace: Annotated[
        float, typer.Option("--grace", min=0.0, help="Seconds that running groups get after Ctrl-C.", metavar="SECONDS")
    ] = 30.0


def flat(command: Callable[..., Page | None]) -> Callable[..., None]:
    """Return the command in the form that typer needs: it prints its page, and has an option for each field of a group.

    A parameter whose type is a named tuple is a group. Its options take the parameter's place. A command that returns a
    page has --json. Raises typer.Exit with the page's exit code, or the page's error.
    """
    signature, groups = inspect.signature(command, eval_str=True), dict[str, Any]()
    parameters: list[inspect.Parameter] = []
    for p in signature.parameters.values():
        if hasattr(p.annotation, "_fields"):
            groups[p.name] = p.annotation
            parameters += _options(p.annotation)
        else:
            parameters.append(p.replace(kind=p.KEYWORD_ONLY))
    own_json = any(p.name == "json_" for p in parameters)
    if not own_json and signature.return_annotation is not None:
        parameters.append(inspect.Parameter("json_", p.KEYWORD_ONLY, default=False, annotation=JsonOpt))

    def run(**given: Any) -> None:
        as_json = given.get("json_", False)
        if not own_json:
            given.pop("json_", None)
        for name, group in groups.items():
            given[name] = group(**{option: given.pop(option) for option in group._fields})
        page = command(**given)
        if page is not None and (code := finish_page(page, as_json=as_json)):
            raise typer.Exit(code)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _options(group: Any) -> Iterator[inspect.Parameter]:
    for name, annotation in get_type_hints(group, include_extras=True).items():
        default = group._field_defaults.get(name, inspect.Parameter.empty)
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
