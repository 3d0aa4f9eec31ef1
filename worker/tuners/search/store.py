"""Store that outlives a run on a node: compiled kernels, winners, and candidates that fault.

    <cache>/triton/<key>/compiled/      Triton's own disk cache (TRITON_CACHE_DIR), kept below a size
    <cache>/triton/<key>/winners.jsonl  one line a tuned shape: family, group, m, candidate, us
    <cache>/triton/<key>/blocked.jsonl  one line a fault: family, candidate, what
    <cache>/triton/<key>/about.json     the fields that are hashed to the key

`key` is a hash of the kernels' source, Triton's version and the device. Files are appended to under a lock, so that
the slots of a node share them; a torn or foreign line is skipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.protocol.paths import CACHE_ENV

MAX_LINES = 20_000
MAX_BYTES = 16 << 20
FAULTS_TO_BLOCK = 2
CACHE_BYTES = 2 << 30  # of compiled kernels, for one source, version and device


class KernelStore:
    """The folder of one source, version and device."""

    def __init__(self, cache: Path, about: Mapping[str, str]) -> None:
        """`about`: source, triton, device and what else a compiled kernel depends on. Makes the folder."""
        text = json.dumps(dict(about), sort_keys=True)
        self.root = cache / "triton" / hashlib.sha256(text.encode()).hexdigest()[:16]
        self.compiled = self.root / "compiled"
        self.compiled.mkdir(parents=True, exist_ok=True)
        (self.root / "about.json").write_text(json.dumps(dict(about), indent=1, sort_keys=True) + "\n")

    @classmethod
    def cache_of(cls, node_dir: Path | None) -> Path:
        """The node's cache where the environment names it, else a folder of the node folder's."""
        named = os.environ.get(CACHE_ENV, "")
        return Path(named) if named else (node_dir or Path.cwd()) / "cache"

    def won(self, family: str, group: str, m: int, candidate: str, us: float) -> None:
        """Keep a winner."""
        self._append("winners.jsonl", {"family": family, "group": group, "m": m, "candidate": candidate, "us": us})

    def hints(self, family: str, group: str, m: int, most: int = 8) -> list[str]:
        """Names of earlier winners: of this group by the nearness of their M (as a ratio), then of the family."""
        mine: dict[str, float] = {}
        others: list[str] = []
        for line in reversed(self._lines("winners.jsonl")):
            name, of = line.get("candidate"), line.get("m")
            if line.get("family") != family or not isinstance(name, str) or not isinstance(of, int) or of < 1:
                continue
            if line.get("group") == group:
                mine[name] = min(mine.get(name, 1e9), max(of, m) / min(of, m))
            elif 0.5 <= of / m <= 2:
                others.append(name)
        near = sorted(mine, key=lambda name: mine[name])
        return list(dict.fromkeys([*near, *others]))[:most]

    def faulted(self, family: str, candidate: str, what: str) -> int:
        """Keep that a candidate took its process down; the number of times so far."""
        self._append("blocked.jsonl", {"family": family, "candidate": candidate, "what": what[:300]})
        return self.faults(family).get(candidate, 0)

    def faults(self, family: str) -> dict[str, int]:
        """Number of times that each candidate of a family took its process down."""
        counts: dict[str, int] = {}
        for line in self._lines("blocked.jsonl"):
            if line.get("family") == family and isinstance(line.get("candidate"), str):
                counts[line["candidate"]] = counts.get(line["candidate"], 0) + 1
        return counts

    def blocked(self, family: str) -> set[str]:
        """Candidates that faulted often enough to be skipped from now on."""
        return {name for name, count in self.faults(family).items() if count >= FAULTS_TO_BLOCK}

    def prune(self, most_bytes: int) -> int:
        """Drop the compiled kernels that were used longest ago until the rest is within `most_bytes`; how many."""
        sized = []
        for folder in self.compiled.iterdir():
            try:
                files = [f.stat() for f in folder.iterdir()] if folder.is_dir() else []
                sized.append((max((s.st_atime for s in files), default=0.0), sum(s.st_size for s in files), folder))
            except OSError:  # another slot removes it
                continue
        total, dropped = sum(size for _, size, _ in sized), 0
        for _, size, folder in sorted(sized, key=lambda s: s[0]):
            if total <= most_bytes:
                break
            shutil.rmtree(folder, ignore_errors=True)
            total -= size
            dropped += 1
        return dropped

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        data = (json.dumps(dict(line), separators=(",", ":")) + "\n").encode()
        fd = os.open(self.root / name, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":  # torn by a kill: end it, so that only it is lost
                data = b"\n" + data
            os.write(fd, data)
        finally:
            os.close(fd)

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """The last lines that are JSON objects."""
        try:
            with open(self.root / name, "rb") as f:
                f.seek(max(0, os.fstat(f.fileno()).st_size - MAX_BYTES))
                raw = f.read().split(b"\n")[-MAX_LINES:]
        except OSError:
            return []
        out = []
        for text in raw:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                out.append(line)
        return out
