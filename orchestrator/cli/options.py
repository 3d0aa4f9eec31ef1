"""Options and arguments that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_RUNS = Path("runs")

RunArg = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="Run id, a beginning of it, or its folder; default: the latest."),
]
RunsOpt = Annotated[Path, typer.Option("--runs", help="Folder of the runs.", metavar="DIR")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


class Busy(StrEnum):
    """The values of --busy (orchestrator/nodes/occupancy.py)."""

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

BuildOpt = Annotated[
    str | None,
    typer.Option("--build", metavar="TREE|IMAGE", help="The AITER that will load the rows: its folder, or an image."),
]
InventoryOpt = Annotated[
    Path | None,
    typer.Option("-i", "--inventory", help="Nodes to use; default: this machine.", metavar="INV"),
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
    bool, typer.Option("--accept-new-host-keys", help="Trust the key of a host that was never seen before.")
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
