"""The script that reproduces the fault of a candidate by AITER's own command, for a report to AITER."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from worker.text import clean
from worker.tuners.aiter.blocked import BlockedEntry
from worker.tuners.aiter.environment import is_switch
from worker.tuners.aiter.launch import PROFILE, TUNED, UNTUNED, argv
from worker.tuners.aiter.session import Job

REPRO = "repro"
"""The folder in an attempt's folder where the controller looks for the script."""
REPRO_TIMEOUT_S = 120
_SHOWN_ENV = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "AITER_JIT_DIR")


def command(job: Job, folder: Path) -> list[str]:
    """The command line of a process that has its files in a folder."""
    words = argv(job.family, job.script, job.options, folder, batch=job.batch, err_ratio=job.err_ratio)
    return [sys.executable, *words]


def write_repro(job: Job, folder: Path, entry: BlockedEntry, into: Path) -> Path:
    """A folder below `into` with the one-row CSV of a process and the command that shows its fault; its path.

    The command is AITER's own, without our additions. It measures all candidates of the shape, including this one.
    """
    name = "-".join([entry.family, *entry.candidate.key[-4:], *entry.candidate.ident[:2]])
    target = into / "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:120]
    target.mkdir(parents=True, exist_ok=True)
    (target / UNTUNED).write_text((folder / UNTUNED).read_text())
    env, moved = job.env(), {str(folder / n): f'"$here/{n}"' for n in (UNTUNED, TUNED, PROFILE)}
    switches = sorted(n for n in {*os.environ, *env} if is_switch(n))
    shown = [n for n in dict.fromkeys((*_SHOWN_ENV, *switches)) if env.get(n)]
    words = command(job, folder)
    if "--timeout" in words:  # a limit that a person can wait for
        words[words.index("--timeout") + 1] = str(REPRO_TIMEOUT_S)
    lines = [
        "#!/bin/sh",
        f"# {entry.outcome} of {entry.candidate.describe()} on {job.image.gfx}, to be run in its image on its node:",
        f"# image {entry.where.image}, slot {entry.where.slot}, driver {entry.where.driver or 'unknown'}",
        *(f"# {line}" for line in clean(entry.detail, 500).splitlines()),
        "# where AITER waits for ever for a process that died, end it with Ctrl-C",
        'here=$(cd -- "$(dirname -- "$0")" && pwd) || exit 1',
        f'rm -f -- "$here/{TUNED}" "$here/{PROFILE}"',
        f"cd -- {shlex.quote(str(job.image.tree.root))} || exit 1",
        "export PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1",
        *(f"export {n}={shlex.quote(env[n])}" for n in shown),
        *(f"unset {n}" for n in switches if n not in shown),
        "exec " + " ".join(moved.get(w) or shlex.quote(w) for w in words),
    ]
    script = target / "reproduce.sh"
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o700)
    return target
