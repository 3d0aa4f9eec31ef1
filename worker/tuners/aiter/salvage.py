"""What is kept of a candidate that killed its process: an entry in the image's blocklist, and how to see it again.

A shape that runs alone goes on without such a candidate, so that its others are not lost with it. An entry is used for
later attempts only where the slot proved healthy after the fault (`canary`); a person may delete the file.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.text import clean
from worker.tuners.aiter.command import Files
from worker.tuners.aiter.env import CLEARED
from worker.tuners.aiter.watch import Candidate

MAX_FAULTS = 40
"""Candidates of one shape that may kill their process in one attempt. Each costs a start of AITER; the slot proves
itself after each."""
REPRO_TIMEOUT_S = 120
_SHOWN_ENV = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "AITER_JIT_DIR")


@dataclass(frozen=True, slots=True)
class Blocked:
    """One entry."""

    image: str
    gfx: str
    family: str
    candidate: Candidate
    outcome: str
    detail: str
    canary: bool

    def as_json(self) -> dict[str, Any]:
        return {
            "t": round(time.time(), 3), "image": self.image, "gfx": self.gfx, "family": self.family,
            **self.candidate.as_json(), "named": self.candidate.describe(), "outcome": self.outcome,
            "detail": clean(self.detail, 500), "canary": self.canary,
        }  # fmt: skip


def note(path: Path, entry: Blocked) -> None:
    """Append an entry: one line, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, json.dumps(entry.as_json()).encode() + b"\n")
    finally:
        os.close(fd)


def known(path: Path, family: str) -> list[tuple[Candidate, str]]:
    """Candidates of the family that are to be left out, and why; a broken line is passed over."""
    out: dict[Candidate, str] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            raw = json.loads(line)
            if raw["family"] != family or raw["canary"] is not True:
                continue
            candidate = Candidate(tuple(map(str, raw["key"])), tuple(map(str, raw["candidate"])))
            out[candidate] = f"left out: {raw['outcome']} on this image before ({raw['detail']})"
        except (ValueError, KeyError, TypeError):
            continue
    return list(out.items())


def write_blocked(path: Path, candidates: Sequence[Candidate]) -> None:
    """The file that the shim reads."""
    path.write_text("".join(json.dumps(c.as_json()) + "\n" for c in candidates))


def write_repro(
    folder: Path, files: Files, argv: Sequence[str], env: Mapping[str, str], cwd: Path, entry: Blocked
) -> Path:
    """A folder with the one-row CSV and the command that shows the fault; its path.

    The command is AITER's own, without anything of ours: it measures all candidates of the shape and meets the one.
    """
    name = "-".join([entry.family, *entry.candidate.key[-4:], *entry.candidate.ident[:2]])
    target = folder / "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:120]
    target.mkdir(parents=True, exist_ok=True)
    (target / "untuned.csv").write_text(files.untuned.read_text())
    moved = {str(files.untuned): "untuned.csv", str(files.tuned): "tuned.csv", str(files.profile): "profile.csv"}
    words = [f'"$here/{moved[w]}"' if w in moved else shlex.quote(w) for w in _impatient(argv)]
    lines = [
        "#!/bin/sh",
        f"# {entry.outcome} of {entry.candidate.describe()} on {entry.gfx}, image {entry.image}",
        *(f"# {line}" for line in clean(entry.detail, 500).splitlines()),
        "# where AITER waits for ever for a process that died, end it with Ctrl-C",
        'here=$(cd -- "$(dirname -- "$0")" && pwd) || exit 1',
        'rm -f -- "$here/tuned.csv" "$here/profile.csv"',
        f"cd -- {shlex.quote(str(cwd))} || exit 1",
        "export PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1",
        *(f"export {n}={shlex.quote(_without_ours(n, env[n]))}" for n in _SHOWN_ENV if env.get(n)),
        *(f"unset {n}" for n in sorted(os.environ) if CLEARED.fullmatch(n) and n not in _SHOWN_ENV),
        "exec " + " ".join(words),
    ]
    script = target / "reproduce.sh"
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o700)
    return target


def _impatient(argv: Sequence[str]) -> list[str]:
    """The command with a limit that a person can wait for, where it has one."""
    words = list(argv)
    if "--timeout" in words:
        words[words.index("--timeout") + 1] = str(REPRO_TIMEOUT_S)
    return words


def _without_ours(name: str, value: str) -> str:
    if name != "PYTHONPATH":
        return value
    return os.pathsep.join(p for p in value.split(os.pathsep) if not p.endswith("/shim"))
