"""Whether the ssh configuration can say different things for different hosts.

Where it cannot, one `ssh -G` serves a whole fleet (4 ms of CPU each otherwise). Anything that is not plainly
harmless counts as different.
"""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

SYSTEM = Path("/etc/ssh/ssh_config")
MAX_DEPTH = 16
_SETTING = re.compile(r"\s*([A-Za-z]+)(?:\s*=\s*|\s+)(.*)\Z")
_DIFFERS = ("match", "hostname", "canonicalizehostname", "canonicaldomains", "canonicalizepermittedcnames")

State = tuple[tuple[str, int, int], ...]
"""(path, mtime in ns, size) of every file that was read."""


def state_if_same(config: Path | None) -> State | None:
    """The files' state where they say the same for every host; None where they may not."""
    found: list[tuple[str, int, int]] = []
    home = Path("~").expanduser()
    files = (
        [(config, home / ".ssh")] if config else [(home / ".ssh" / "config", home / ".ssh"), (SYSTEM, SYSTEM.parent)]
    )
    try:
        for path, base in files:
            if path.exists() and not _same(path, base, found, 0):
                return None
    except OSError:
        return None
    return tuple(found)


def _same(path: Path, base: Path, found: list[tuple[str, int, int]], depth: int) -> bool:
    """`base`: the folder of relative names after Include."""
    if depth > MAX_DEPTH:
        return False
    s = path.stat()
    found.append((str(path), s.st_mtime_ns, s.st_size))
    for line in path.read_text("utf-8", "replace").splitlines():
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        m = _SETTING.match(text)
        if not m:
            return False
        name, value = m[1].lower(), m[2].strip()
        if name == "include":
            if any(c in value for c in "\"'$%~"):
                return False
            for pattern in value.split():
                for file in sorted(glob.glob(os.path.join(base, pattern))):
                    if not _same(Path(file), base, found, depth + 1):
                        return False
        # %-signs stand for the host's name, among other things
        elif name in _DIFFERS or "%" in value or (name == "host" and value != "*"):
            return False
    return True
