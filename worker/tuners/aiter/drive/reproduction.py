"""How to see the fault of a candidate again: a folder with a one-row CSV and AITER's own command."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from worker.text import clean
from worker.tuners.aiter.drive.blocklist import Entry
from worker.tuners.aiter.drive.command import Files
from worker.tuners.aiter.drive.env import ASKED_FOR, CLEARED

MAX_FAULTS = 40
"""Candidates of one shape that may kill their process in one attempt. Each costs a start of AITER; the slot proves
itself after each."""
REPRO = "repro"
"""Below an attempt's folder, where the controller looks for it."""
REPRO_TIMEOUT_S = 120
_SHOWN_ENV = (
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "AITER_JIT_DIR", "GPU_ARCHS",
    "CU_NUM",
)  # fmt: skip


def write_repro(
    folder: Path, files: Files, argv: Sequence[str], env: Mapping[str, str], cwd: Path, entry: Entry
) -> Path:
    """A folder with the one-row CSV and the command that shows the fault; its path.

    The command is AITER's own, without anything of ours: it measures all candidates of the shape and meets the one.
    """
    name = "-".join([entry.family, *entry.candidate.key[-4:], *entry.candidate.ident[:2]])
    target = folder / "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:120]
    target.mkdir(parents=True, exist_ok=True)
    (target / "untuned.csv").write_text(files.untuned.read_text())
    moved = {str(files.untuned): "untuned.csv", str(files.tuned): "tuned.csv", str(files.profile): "profile.csv"}
    switches = sorted(n for n in {*os.environ, *env} if CLEARED.fullmatch(n) or ASKED_FOR.fullmatch(n))
    shown = [n for n in dict.fromkeys((*_SHOWN_ENV, *switches)) if env.get(n)]
    words = [f'"$here/{moved[w]}"' if w in moved else shlex.quote(w) for w in _impatient(argv)]
    lines = [
        "#!/bin/sh",
        f"# {entry.outcome} of {entry.candidate.describe()} on {entry.gfx}, to be run in its image on its node:",
        f"# image {entry.where.image}, slot {entry.where.slot}, driver {entry.where.driver or 'unknown'}",
        *(f"# {line}" for line in clean(entry.detail, 500).splitlines()),
        "# where AITER waits for ever for a process that died, end it with Ctrl-C",
        'here=$(cd -- "$(dirname -- "$0")" && pwd) || exit 1',
        'rm -f -- "$here/tuned.csv" "$here/profile.csv"',
        f"cd -- {shlex.quote(str(cwd))} || exit 1",
        "export PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1",
        *(f"export {n}={shlex.quote(_without_ours(n, env[n]))}" for n in shown),
        *(f"unset {n}" for n in switches if n not in shown),
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
