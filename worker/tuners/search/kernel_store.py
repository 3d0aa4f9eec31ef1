"""Files that a search leaves on a node for the next run: Triton's compiled kernels, and the candidates that faulted.

    <cache>/triton/<key>/compiled/      Triton's own disk cache (TRITON_CACHE_DIR), kept below a size
    <cache>/triton/<key>/blocked.jsonl  one line a fault: family, candidate, what
    <cache>/triton/<key>/about.json     the fields that are hashed to the key

`key` is a hash of the kernels' source, Triton's version and the device. Files are appended to under a lock, so that
the slots of a node share them; a torn or foreign line is skipped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FAULTS_TO_BLOCK = 2
"""A candidate that took its process down so often is not run again on this device."""
CACHE_BYTES = 2 << 30
"""Compiled kernels that are kept for one source, version and device."""


class _KernelFolder(NamedTuple):
    """A folder of Triton's cache. `used`: when one of its files was read last, in seconds."""

    used: float
    size: int
    path: Path


class KernelStore:
    """The folder of one source, version and device."""

    def __init__(self, cache: Path, about: Mapping[str, str]) -> None:
        """`about`: source, triton, device and what else a compiled kernel depends on. Makes the folder."""
        fields = dict(about)
        key = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
        self.root = cache / "triton" / key
        self.compiled = self.root / "compiled"
        self._faults = self.root / "blocked.jsonl"
        self.compiled.mkdir(parents=True, exist_ok=True)
        (self.root / "about.json").write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")

    def record_fault(self, family: str, candidate: str, what: str) -> int:
        """Keep that a candidate took its process down; the number of times so far."""
        line = {"family": family, "candidate": candidate, "what": what[:300]}
        with open(self._faults, "ab", buffering=0) as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            # the line before may be torn by a kill: then only it is lost
            f.write(b"\n" + json.dumps(line, separators=(",", ":")).encode())
        return self.count_faults(family)[candidate]

    def count_faults(self, family: str) -> Counter[str]:
        """Number of times that each candidate of a family took its process down."""
        counts: Counter[str] = Counter()
        text = self._faults.read_bytes() if self._faults.exists() else b""
        for line in text.split(b"\n"):
            with contextlib.suppress(ValueError, TypeError, KeyError):  # torn or foreign
                fault = json.loads(line)
                candidate = fault["candidate"]
                if fault["family"] == family:
                    counts[candidate] += 1
        return counts

    def blocked(self, family: str) -> set[str]:
        """Candidates that faulted often enough to be skipped from now on."""
        return {name for name, count in self.count_faults(family).items() if count >= FAULTS_TO_BLOCK}

    def prune(self, most_bytes: int = CACHE_BYTES) -> int:
        """Drop the compiled kernels that were used longest ago until the rest is within `most_bytes`; how many."""
        folders: list[_KernelFolder] = []
        for path in self.compiled.iterdir():
            with contextlib.suppress(OSError):  # another slot removes it
                stats = [file.stat() for file in path.iterdir()]
                used = max((s.st_atime for s in stats), default=0.0)
                folders.append(_KernelFolder(used, sum(s.st_size for s in stats), path))
        total = sum(folder.size for folder in folders)
        dropped = 0
        for folder in sorted(folders, key=lambda folder: folder.used):
            if total <= most_bytes:
                break
            shutil.rmtree(folder.path, ignore_errors=True)
            total -= folder.size
            dropped += 1
        return dropped
