"""Run a workload, here or on a node, and count the shapes that AITER had no tuned row for."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.ledger import clean
from orchestrator.shapes.aiter_log import Miss, MissCounter, Misses, MissKeys
from worker.capture import MARK, Recording

if TYPE_CHECKING:
    from orchestrator.inventory import Inventory

PIECE = 64 * 1024
Say = Callable[[str], None]
BF16 = "a16w16"


@dataclass(slots=True)
class Captured:
    """The shapes of a workload. `code`: its exit code, None where it is not known; `recorded`: bf16 shapes that AITER
    wrote down and that are not in its log."""

    misses: Misses
    code: int | None = None
    recorded: int = 0
    notes: list[str] = field(default_factory=list)


class WorkloadLog:
    """Reader of a workload's output, and of AITER's own record at the end."""

    def __init__(self, family: str | None) -> None:
        self._counting = MissCounter(family)
        self._record: dict[str, Any] = {}

    def line(self, text: str) -> None:
        """One line, clean."""
        if text.startswith(MARK):
            with suppress(ValueError):
                record = json.loads(text.removeprefix(MARK))
                self._record = record if isinstance(record, dict) else {}
            return
        self._counting.line(text.encode("utf-8", "replace"))

    def take_record(self, code: int | None, recorded: dict[str, str], notes: list[str]) -> None:
        """The record of a workload that ran here."""
        self._record = {"code": code, "recorded": recorded, "notes": notes}

    def done(self) -> Captured:
        """The shapes without a tuned row. A recorded shape counts where the log has no bf16 miss (before v0.1.7)."""
        misses = self._counting.done()
        out = Captured(misses, clean.integer(self._record.get("code")))
        notes = self._record.get("notes")
        out.notes = [clean.text(n, 300) for n in notes[:20]] if isinstance(notes, list) else []
        recorded = self._record.get("recorded")
        texts = [t for t in recorded.values() if isinstance(t, str)] if isinstance(recorded, dict) else []
        keys = _keys(texts, misses)
        if keys and BF16 not in misses.counts:
            misses.counts[BF16] = Counter(keys)
            out.recorded = len(keys)
            out.notes.append(
                f"{len(keys)} bf16 shapes are from AITER_TUNE_GEMM, which does not show whether they have a row;"
                " `tune --db` skips those that have"
            )
        return out


def _keys(texts: Sequence[str], misses: Misses) -> list[tuple[int | str, ...]]:
    """The shapes of AITER's own lists."""
    of = get_family(BF16)
    keys = MissKeys(of)
    out: dict[tuple[int | str, ...], None] = {}
    for text in texts:
        for row in csv.DictReader(io.StringIO(text)):
            values = {n: str(row[n]).strip() for n in of.key_names if row.get(n)}
            try:
                out[keys.key(Miss(BF16, values))] = None
            except ValueError as e:
                misses.odd[str(e)] += 1
    return list(out)


def capture_here(argv: Sequence[str], family: str | None, say: Say) -> Captured:
    """Run `argv` on this machine to its end; `say` gets what it prints. Ctrl-C goes to the workload, which may then end
    in its own way; a second one kills it. Raises InputError where it cannot be started."""
    from orchestrator.nodes.command import lines

    listening = WorkloadLog(family)
    with Recording(os.environ) as recording:
        try:
            proc = subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=recording.env, start_new_session=True
            )
        except OSError as e:
            raise InputError(f"{argv[0]}: cannot be started: {e.strerror or e}") from e
        assert proc.stdout is not None
        stream = proc.stdout.fileno()
        interrupted = False
        with proc.stdout:
            while True:
                try:
                    for text in lines(lambda size: os.read(stream, size)):
                        listening.line(text)
                        say(text)
                    proc.wait()
                    break
                except KeyboardInterrupt:
                    with suppress(ProcessLookupError):
                        os.killpg(proc.pid, signal.SIGKILL if interrupted else signal.SIGINT)
                    interrupted = True
    listening.take_record(proc.returncode, recording.recorded, recording.notes)
    return listening.done()


def capture_on(
    inventory: Inventory, name: str, argv: Sequence[str], family: str | None, say: Say, *, accept_new_host_keys: bool
) -> Captured:
    """Run `argv` on a node where its workers run. Ctrl-C ends it and keeps what was counted.

    Raises NodeError, InputError.
    """
    from orchestrator.nodes.command import run_worker_command

    if name not in inventory.nodes:
        raise InputError(f"the inventory has no node {name[:60]!r} (there: {', '.join(inventory.nodes)})")
    listening = WorkloadLog(family)

    def line(text: str) -> None:
        listening.line(text)
        if not text.startswith(MARK):
            say(text)

    ended = "was interrupted"
    with suppress(KeyboardInterrupt):
        ended = run_worker_command(
            inventory,
            inventory.nodes[name],
            ["capture", "--until-eof", "--", *argv],
            line,
            accept_new_host_keys=accept_new_host_keys,
        )
    found = listening.done()
    if found.code is None:
        found.notes.append(f"{name}: the workload {ended}")
    return found
