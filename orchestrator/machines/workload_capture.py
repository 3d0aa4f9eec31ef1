"""Runs a user's workload, here or on a node, and reads from its output the shapes that AITER had no tuned row for.

Called by `shapes capture`: it makes a `WorkloadLog` and gives it to `capture_here` or `capture_on`, which feed it each
line. On a node the worker's command `capture` (worker/capture.py) runs the workload, and prints at its end a line that
begins with MARK: a JSON object with `code`, `notes`, and `recorded`, the CSV files that AITER wrote for bf16 shapes.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from orchestrator import clean
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.inventory.model import Inventory
from orchestrator.machines.node_command import deployed_on, lines
from orchestrator.shapes.aiter_log import Miss, Misses, key_of
from worker.capture import MARK, Recording

BF16 = "a16w16"


class WorkloadLog:
    """Reads a workload's output line by line, and counts the shapes without a tuned row."""

    def __init__(self, family: str | None, say: Callable[[str], None]) -> None:
        """`family`: count only its shapes, None for all. `say` gets each line of the workload itself."""
        self._misses = Misses(family)
        self._say = say
        self.record: dict[str, Any] = {}
        """The object of the last line; {} until it comes."""

    def line(self, text: str) -> None:
        """Take a line without its end and without control characters."""
        if not text.startswith(MARK):
            self._misses.read(text.encode("utf-8", "replace"))
            self._say(text)
            return
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(text.removeprefix(MARK))
            self.record = record if isinstance(record, dict) else {}

    def done(self) -> tuple[Misses, int | None]:
        """The shapes without a tuned row, and the workload's exit code (None if it is unknown). AITER before v0.1.7
        logs no bf16 shape; then those that it recorded count."""
        misses = self._misses.close()
        notes = self.record.get("notes")
        if isinstance(notes, list):
            misses.notes += [clean.text(note, 300) for note in notes[:20]]
        if BF16 not in misses.counts:
            self._add_recorded(misses)
        return misses, clean.integer(self.record.get("code"))

    def _add_recorded(self, misses: Misses) -> None:
        """Add the bf16 shapes in AITER's own lists. The record's `recorded` is {file: its CSV text}."""
        recorded = self.record.get("recorded")
        texts = recorded.values() if isinstance(recorded, dict) else ()
        keys: dict[tuple[int | str, ...], None] = {}
        for text in texts:
            for row in csv.DictReader(io.StringIO(text)) if isinstance(text, str) else ():
                values = {name: str(row[name]).strip() for name in get_family(BF16).key_names if row.get(name)}
                try:
                    keys[key_of(Miss(BF16, values), BF16)] = None
                except ValueError as e:
                    misses.odd[str(e)] += 1
        if keys:
            misses.counts[BF16] = Counter(keys.keys())
            misses.notes.append(
                f"{len(keys)} bf16 shapes are from AITER_TUNE_GEMM, which does not show whether they have a row;"
                " `tune --db` skips those that have"
            )


def capture_here(argv: Sequence[str], log: WorkloadLog) -> tuple[Misses, int | None]:
    """Run `argv` on this machine to its end. Ctrl-C goes to the workload, which may then end in its own way; a second
    one kills it. Raises InputError if it cannot be started."""
    with Recording(os.environ) as recording:
        try:
            proc = subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=recording.env, start_new_session=True
            )
        except OSError as e:
            raise InputError(f"{argv[0]}: cannot be started: {e.strerror or e}") from e
        next_signals = iter((signal.SIGINT,))

        def pass_on(*_: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(proc.pid, next(next_signals, signal.SIGKILL))

        before = signal.signal(signal.SIGINT, pass_on)
        try:
            with proc:
                assert proc.stdout is not None
                for text in lines(partial(os.read, proc.stdout.fileno())):
                    log.line(text)
        finally:
            signal.signal(signal.SIGINT, before)
    log.record = {"code": proc.returncode, "recorded": recording.recorded, "notes": recording.notes}
    return log.done()


def capture_on(
    inventory: Inventory, name: str, argv: Sequence[str], log: WorkloadLog, *, accept_new_host_keys: bool
) -> tuple[Misses, int | None]:
    """Run `argv` on the first slot of a node, where its workers run. Ctrl-C ends it and keeps what was counted.

    Raises NodeError, InputError.
    """
    if name not in inventory.nodes:
        raise InputError(f"the inventory has no node {name[:60]!r} (there: {', '.join(inventory.nodes)})")
    ended = "was interrupted"
    with (
        contextlib.suppress(KeyboardInterrupt),
        deployed_on(inventory, inventory.nodes[name], "capture", accept_new_host_keys=accept_new_host_keys) as host,
    ):
        ended = host.run(["capture", "--until-eof", "--", *argv], log.line)
    misses, code = log.done()
    if code is None:
        misses.notes.append(f"{name}: the workload {ended}")
    return misses, code
