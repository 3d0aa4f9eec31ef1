"""`worker capture`: runs a workload, and records the shapes that AITER has no tuned row for.

AITER_LOG_TUNED_CONFIG=1 makes AITER log hits as well. AITER_TUNE_GEMM=1 makes it record every bf16 GEMM in its own
aiter/configs/bf16_untuned_gemm.csv (untuned_gemm.csv before 2025-11). Each process overwrites that file, so we print
its content at the end and restore it. If the file cannot be written, AITER would stop with an error, so we leave the
switch out. `gemmfleet capture` on the controller reads what is printed: AITER's log between the workload's lines, and
at the end a line with our mark:

    GEMMFLEET-CAPTURE {"code": 0, "recorded": {"bf16_untuned_gemm.csv": "M,N,K,..."}, "notes": []}
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from worker.process import run_in_foreground

MARK = "GEMMFLEET-CAPTURE "
FILES = ("bf16_untuned_gemm.csv", "untuned_gemm.csv")
MAX_RECORD = 8 * 2**20
_FIND = (
    "import importlib.util as u; s = u.find_spec('aiter'); print(list(s.submodule_search_locations)[0] if s else '')"
)


class Recording:
    """AITER's own list of bf16 GEMMs while a workload runs. Start the workload with the environment `env`."""

    def __init__(self, base: Mapping[str, str], python: str | None = None) -> None:
        self.env = {**base, "AITER_LOG_TUNED_CONFIG": "1"}
        self.notes: list[str] = []
        self.recorded: dict[str, str] = {}
        self._files = self._writable(python or shutil.which("python3") or sys.executable)
        self._before: dict[Path, bytes | None] = {}
        if self._files:
            self.env["AITER_TUNE_GEMM"] = "1"

    def _writable(self, python: str) -> list[Path]:
        try:
            done = subprocess.run([python, "-c", _FIND], capture_output=True, text=True, env=self.env, timeout=60)
            package = done.stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            package = ""
        if not package:
            self.notes.append(f"{python} finds no AITER: we only read the workload's output")
            return []
        folder = Path(package) / "configs"
        if not os.access(folder, os.W_OK):
            self.notes.append(
                f"{folder} cannot be written, so we do not set AITER_TUNE_GEMM, and read misses from the log"
            )
            return []
        return [folder / name for name in FILES]

    def __enter__(self) -> Recording:
        self._before = {path: path.read_bytes() if path.exists() else None for path in self._files}
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for path, before in self._before.items():
            try:
                now = path.read_bytes() if path.exists() else None
                if now == before:
                    continue
                if now is not None and len(now) <= MAX_RECORD:
                    self.recorded[path.name] = now.decode("utf-8", "replace")
                _restore(path, before)
            except OSError as fault:
                self.notes.append(f"{path} could not be put back as it was: {fault}")


def _restore(path: Path, before: bytes | None) -> None:
    if before is None:
        path.unlink()
        return
    fd, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(fd, "wb") as f:
        f.write(before)
    shutil.copymode(path, aside)
    os.replace(aside, path)


def main(argv: list[str], slot_env: Mapping[str, str], until_eof: bool) -> int:
    """Run a workload and return its status, or 127 if it cannot be started. The last line has the findings as JSON."""
    with Recording({**os.environ, **slot_env}) as recording:
        try:
            code = run_in_foreground(argv, recording.env, until_eof=until_eof)
        except OSError as e:
            recording.notes.append(f"{argv[0]}: cannot be started: {e.strerror or e}")
            code = 127
    result = {"code": code, "recorded": recording.recorded, "notes": recording.notes}
    print("\n" + MARK + json.dumps(result), flush=True)
    return code if code >= 0 else 128 - code
