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
JsonOpt = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, nothing else there.")]


class Busy(StrEnum):
    """The values of --busy (orchestrator/busy.py)."""

    WAIT = "wait"
    SKIP = "skip"
    SHARE = "share"


BusyOpt = Annotated[
    Busy | None,
    typer.Option(
        "--busy",
        help="A node on which others compute: wait until they are done, skip it, or share it; default: the"
        " inventory's, else wait.",
    ),
]
