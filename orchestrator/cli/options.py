"""Options and arguments that several commands share, and groups of them that a command takes as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import typer

if TYPE_CHECKING:
    from orchestrator.tables.build import Build

DEFAULT_RUNS = Path("runs")

RunArg = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="Run id or a prefix of it, or its folder; default: the latest."),
]
RunsOpt = Annotated[Path, typer.Option("--runs", help="Folder of the runs.", metavar="DIR")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


class Busy(StrEnum):
    """Values of --busy (orchestrator/nodes/occupancy.py)."""

    WAIT = "wait"
    SKIP = "skip"
    SHARE = "share"


BusyOpt = Annotated[
    Busy | None,
    typer.Option(
        "--busy",
        help="Nodes in use by others: wait until they are free, skip them, or share them; default: the inventory's,"
        " else wait.",
    ),
]

HoldOpt = Annotated[
    bool, typer.Option("--hold", help="Keep leases that have no work; default: give them back after 2 minutes.")
]
BuildOpt = Annotated[
    str | None,
    typer.Option("--build", metavar="TREE|IMAGE", help="AITER that will load the rows: its folder, or an image."),
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
PlanOpt = Annotated[bool, typer.Option("--plan", help="Print what would run where; start and write nothing.")]
DetachOpt = Annotated[
    bool, typer.Option("--detach", help="Leave the controller in the background; prints the run's id.")
]
AcceptNewHostKeysOpt = Annotated[
    bool, typer.Option("--accept-new-host-keys", help="Trust keys of hosts not seen before.")
]
LostAfterOpt = Annotated[
    float,
    typer.Option(
        "--lost-after", min=1.0, help="Seconds without an answer until a node is given up.", metavar="SECONDS"
    ),
]
WatchdogOpt = Annotated[
    float, typer.Option("--watchdog", min=1.0, help="Seconds without progress that make a hang.", metavar="SECONDS")
]
GraceOpt = Annotated[
    float, typer.Option("--grace", min=0.0, help="Seconds that running groups get after Ctrl-C.", metavar="SECONDS")
]
UntilGainOpt = Annotated[
    str | None,
    typer.Option("--until-gain", help="With --by-value: stop at so much of the expected gain.", metavar="95%"),
]
GpuHoursOpt = Annotated[
    float | None,
    typer.Option("--gpu-hours", min=0.0, help="With --by-value: stop after so many hours of slots.", metavar="H"),
]


class RunOptions(NamedTuple):
    """Group: the folder and the nodes of a run that a command plans, and the ways to start it."""

    runs: RunsOpt = DEFAULT_RUNS
    limit: LimitOpt = None
    plan: PlanOpt = False
    detach: DetachOpt = False
    json_: JsonOpt = False


class DriveOptions(NamedTuple):
    """Group: patience with nodes and groups of the run that a command starts, and what to do with occupied nodes."""

    accept_new_host_keys: AcceptNewHostKeysOpt = False
    lost_after: LostAfterOpt = 90.0
    busy: BusyOpt = None
    hold: HoldOpt = False
    watchdog: WatchdogOpt = 300.0
    grace: GraceOpt = 30.0


def flat(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with each parameter whose type is a named tuple, a group, replaced by an option a field.

    The options stand where the parameter stands; a field's annotation and default are those of its option.
    """
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for p in inspect.signature(command, eval_str=True).parameters.values():
        if hasattr(p.annotation, "_fields"):
            groups[p.name] = p.annotation
            parameters += _options(p.annotation)
        else:
            parameters.append(p.replace(kind=p.KEYWORD_ONLY))

    def run(**given: Any) -> Any:
        for name, group in groups.items():
            given[name] = group(**{option: given.pop(option) for option in group._fields})
        return command(**given)

    run.__name__, run.__doc__ = command.__name__.rstrip("_"), command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _options(group: Any) -> Iterator[inspect.Parameter]:
    for name, annotation in get_type_hints(group, include_extras=True).items():
        default = group._field_defaults.get(name, inspect.Parameter.empty)
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@contextmanager
def opened_build(build: str | None, inventory: Path | None) -> Iterator[Build | None]:
    """Yield the build of `--build TREE|IMAGE`, None without one. Raises as `opened_tree`."""
    from orchestrator.tables.build import Build

    if build is None:
        yield None
        return
    with opened_tree(build, inventory) as path:
        yield Build(path, build, whole=not Path(build).expanduser().is_dir())


@contextmanager
def opened_tree(build: str, inventory: Path | None, *, triton: bool = False) -> Iterator[Path]:
    """Yield the folder of `--build TREE|IMAGE`, which holds `aiter/`; `triton`: an image's Triton operators suffice.

    The files of an image are copied out of a container that is created and never started, by the Docker of this
    machine, or of the first node of the inventory that has the image. Raises InputError, NodeError.
    """
    import tempfile

    from orchestrator.errors import InputError

    path = Path(build).expanduser()
    if path.is_dir():
        yield path
        return
    if path.exists() or build.startswith(("/", "./", "../", "~")) or not build:
        raise InputError(
            f"--build {build}: is neither a folder with an AITER (a checkout, or site-packages) nor an image"
        )
    from orchestrator.image.takeout import EVERYTHING, TRITON, take_out

    with tempfile.TemporaryDirectory(prefix="gemmfleet-build-") as scratch:
        take_out(build, Path(scratch), inventory, TRITON if triton else EVERYTHING)
        yield Path(scratch)
