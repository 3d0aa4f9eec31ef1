"""The real program in a folder of its own: real command line, real workers as processes, the replay tuner.

The replay tuner is the stand-in for measuring; with faults it is the tests' own tuner `faulty`, whose faults are real
(it kills, stops and fills for real).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.paths import ROOT
from tests.standins import FAULTY
from tests.support.books import Books, read_csv
from tests.support.command import Done
from tests.support.command import command as run_command
from tests.waiting import PATIENCE_S

__all__ = ["ROOT", "Bench", "Done", "read_csv"]


class Bench(Books):
    """A folder with shapes, runs, and an inventory of this machine."""

    def __init__(self, root: Path, slots: int = 2) -> None:
        super().__init__(root)
        self.live: list[subprocess.Popen[str]] = []
        self.site: list[Path] = []
        """Folders with installed packages of others."""
        self.inventory = self.root / "inv.yaml"
        self.inventory.write_text(
            "defaults: {family: a16w16, tuner: replay}\n"
            f"nodes:\n  here:\n    gpus: {list(range(slots))}\n    workdir: {self.workdir}\n"
        )

    def release(self, until: str = "released") -> None:
        """Let groups held until then go on, on the nodes that are folders of this machine."""
        for folder, _, files in os.walk(self.workdir):  # glob minds folders that go meanwhile
            if "node.json" in files:
                (Path(folder) / until).touch()

    def argv(self, command: str, *args: str) -> list[str]:
        return [sys.executable, "-m", "orchestrator", *command.split(), *args, "--runs", str(self.runs)]

    def tune_args(
        self, faults: Sequence[dict[str, Any]] = (), seconds: float = 0.0, more: Sequence[str] = ()
    ) -> list[str]:
        return [
            str(self.shapes_csv), "-i", str(self.inventory), "-O", f"seconds_per_shape={seconds}",
            *(("--tuner", "faulty", "-O", f"faults={json.dumps(list(faults))}") if faults else ()), *more,
        ]  # fmt: skip

    def env(self) -> dict[str, str]:
        path = os.pathsep.join(map(str, (ROOT, FAULTY, *self.site)))
        return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}

    def run(self, command: str, *args: str) -> Done:
        """Run a command to its end: in this process, unless packages of others are to be installed or it detaches."""
        return self.run_plain(*command.split(), *args, "--runs", str(self.runs))

    def run_plain(self, *argv: str) -> Done:
        """Run a command that knows no --runs."""
        if not self.site and "--detach" not in argv:
            return run_command(*argv)
        p = subprocess.run(
            [sys.executable, "-m", "orchestrator", *argv],
            capture_output=True, text=True, timeout=PATIENCE_S, env=self.env(),
        )  # fmt: skip
        assert "Traceback" not in p.stderr, p.stderr
        return Done(p.returncode, p.stdout, p.stderr)

    def start(self, command: str, *args: str) -> subprocess.Popen[str]:
        """Start a command that is to be interrupted or killed."""
        p = subprocess.Popen(
            self.argv(command, *args), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.env()
        )
        self.live.append(p)
        return p

    def tune(self, **kw: Any) -> Done:
        return self.run("tune", *self.tune_args(**kw))

    def close(self) -> None:
        for p in self.live:
            if p.poll() is None:
                p.kill()
            p.wait()
            if p.stdout:
                p.stdout.close()
        super().close()
