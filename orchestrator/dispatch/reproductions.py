"""Reproductions of faults, brought home from a node's attempts into the run's folder: small plain files, capped.

The tuner writes them below an attempt's folder (worker/tuners/aiter/drive/blocklist.py); nodes are cleaned,
runs are kept.
"""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

from orchestrator.transport import Transport
from worker.protocol import ATTEMPT_RE

MAX_BYTES = 16 * 2**20
MAX_FILE = 2**20
MAX_FILES = 1000
TIMEOUT_S = 30.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\Z")
_PACK = f"""\
cd -- "$1" || exit 0
set -- attempts/*/repro
[ -d "$1" ] || exit 0
tar -cf - -- "$@" | head -c {MAX_BYTES}
"""


def bring_home(transport: Transport, folder: str, attempts: Path) -> list[Path]:
    """Copy every attempt's `repro/` of a node folder below `attempts`; the files. Raises TransportError, OSError."""
    done = transport.run(["sh", "-c", _PACK, "sh", folder], timeout=TIMEOUT_S)
    return unpack(done.out, attempts)


def unpack(data: bytes, attempts: Path) -> list[Path]:
    """The files of an archive that are what they should be: `attempts/ID/repro/NAME/FILE`. The rest is passed over."""
    out: list[Path] = []
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r|") as archive:
            for member in archive:
                parts = member.name.split("/")
                if len(out) == MAX_FILES:
                    break
                if not (member.isreg() and member.size <= MAX_FILE and _expected(parts)):
                    continue
                found = archive.extractfile(member)
                content = found.read() if found else b""
                path = attempts.joinpath(*parts[1:])
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.write_bytes(content)
                path.chmod(0o700 if path.suffix == ".sh" else 0o600)
                out.append(path)
    except tarfile.TarError:  # nothing, or cut off at the limit
        pass
    return out


def _expected(parts: list[str]) -> bool:
    if len(parts) != 5 or (parts[0], parts[2]) != ("attempts", "repro"):
        return False
    return bool(ATTEMPT_RE.match(parts[1])) and all(_NAME.match(p) for p in parts[3:])
