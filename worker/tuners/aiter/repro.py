"""Writes the script that reproduces the fault of a candidate by AITER's own command, for a report to AITER.

tuner.py calls `write_repro` for each candidate that ended its process; the controller copies the folder into the run
(docs/explanation/aiter.md).
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from worker.text import clean
from worker.tuners.aiter.blocked import BlockedEntry
from worker.tuners.aiter.environment import is_switch
from worker.tuners.aiter.launch import PROFILE, TUNED, UNTUNED
from worker.tuners.aiter.session import Job

REPRO = "repro"
"""The folder in an attempt's folder where the controller looks for the script."""
REPRO_TIMEOUT_S = 120
_SHOWN_ENV = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "AITER_JIT_DIR")


def write_repro(job: Job, folder: Path, entry: BlockedEntry, into: Path) -> Path:
    """A folder below `into` with the one-row CSV of a process and the command that shows its fault; its path.

    The command is AITER's own, without our additions. It measures all candidates of the shape, including this one.
    """
    name = "-".join([entry.family, *entry.candidate.key[-4:], *entry.candidate.ident[:2]])
    target = into / "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:120]
    target.mkdir(parents=True, exist_ok=True)
    (target / UNTUNED).write_text((folder / UNTUNED).read_text())
    env = job.env()
    switches = sorted(name for name in {*os.environ, *env} if is_switch(name))
    exported = [name for name in dict.fromkeys((*_SHOWN_ENV, *switches)) if env.get(name)]
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
        *(f"export {name}={shlex.quote(env[name])}" for name in exported),
        *(f"unset {name}" for name in switches if name not in exported),
        "exec " + _shell_command(job, folder),
    ]
    script = target / "reproduce.sh"
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o700)
    return target


def _shell_command(job: Job, folder: Path) -> str:
    """The command of a process, with its files beside the script and a limit that a person can wait for."""
    words = job.command(folder)
    if "--timeout" in words:
        words[words.index("--timeout") + 1] = str(REPRO_TIMEOUT_S)
    beside_script = {str(folder / name): f'"$here/{name}"' for name in (UNTUNED, TUNED, PROFILE)}
    return " ".join(beside_script.get(word) or shlex.quote(word) for word in words)
