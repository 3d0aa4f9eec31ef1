"""Workers as plain processes, by the node's own launch.sh."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.engines import UNUSABLE, EngineSpec, Finding, WorkerState
from orchestrator.errors import EngineError
from orchestrator.transport.base import Transport

_ANSWER = re.compile(r"(\S+) (running|ended|absent)(?: ([0-9]*))?")
"""A line of `launch.sh list`: `0 running`, or `1 ended 137`."""


class ProcessEngine:
    """The engine `process`."""

    shell: tuple[str, ...] = ("sh",)
    """Words before launch.sh; an engine that derives from this one has others (docs/contributing/adding.md)."""

    def __init__(self, transport: Transport, folder: str) -> None:
        self._transport = transport
        self._script = f"{folder}/launch.sh"

    def prepare(self) -> None:
        """Processes need nothing."""

    def start(self, slots: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        lines = "".join(f"{k}={v}\n" for k, v in (env or {}).items())
        self._launch("start", *slots, stdin=lines.encode())

    def hold(self) -> None:
        """Processes need nothing."""

    def list(self) -> list[WorkerState]:
        try:
            lines = self._launch("list").decode("ascii", "replace").splitlines()
        except EngineError:
            if self._transport.run(["test", "-e", self._script], timeout=20.0).code == 0:
                raise
            return []  # a folder that is not there, and so nothing of ours
        states = []
        for line in lines:
            answer = _ANSWER.fullmatch(line)
            if answer:  # a start-up file of the login shell may print lines of its own
                slot, state, code = answer.groups()
                states.append(WorkerState(slot, state, int(code) if code else None))
        return states

    def stop(self, *, kill: bool = False) -> None:
        self._launch("kill" if kill else "stop")

    def tidy(self) -> None:
        """Processes leave nothing behind."""

    def close(self) -> None:
        """Holds nothing."""

    def _launch(self, *args: str, stdin: bytes = b"") -> bytes:
        done = self._transport.run([*self.shell, self._script, *args], stdin=stdin, timeout=60.0)
        if done.code != 0:
            raise EngineError(self._transport.node, f"launch.sh {args[0]} ended with code {done.code}: {done.text}")
        return done.out


def python_findings(node: Any, facts: Any) -> Iterator[Finding]:
    """Findings on the node's own Python, for engines that run workers outside an image."""
    said = facts.values.get("python", "")
    version = re.match(r"(\d+)\.(\d+)\.\d+", said)
    if version is None:
        what = f"no Python that runs: {said}" if said else "no Python was found"
        yield Finding(UNUSABLE, "python", what, "install Python 3.10 to 3.13, or set `python:`")
    elif not (3, 10) <= (int(version[1]), int(version[2])) < (3, 14):
        yield Finding(UNUSABLE, "python", f"its Python is {version[0]}", "3.10 to 3.13 is needed: set `python:`")


SPEC = EngineSpec(
    name="process",
    scripts={"launch.sh": "launch.sh.j2", "tune.sh": "tune.sh.j2", "follow.sh": "follow.sh.j2"},
    create=lambda plan, transport, progress: ProcessEngine(transport, plan.folder),
    needs=frozenset({"tar", "find", "flock", "setsid"}),
    preflight=python_findings,
)
