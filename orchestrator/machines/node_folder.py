"""Reads and changes a node folder where it lies: which files are missing, which attempts are there, taking specs back,
and fetching reproductions of faults."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from orchestrator.archives import read_files
from orchestrator.machines.node_files import CODE_MARKER
from orchestrator.transport.base import RemoteFile, Transport
from worker.protocol import ATTEMPT_RE, InboxName

MAX_BYTES = 16 * 2**20
"""Most bytes of all reproductions of a node."""
MAX_FILE = 2**20
MAX_FILES = 1000
PACK_TIMEOUT_S = 30.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\Z")
_PACK = f"""\
cd -- "$1" || exit 0
set -- attempts/*/repro
[ -d "$1" ] || exit 0
tar -cf - -- "$@" | head -c {MAX_BYTES}
"""


def fetch_reproductions(transport: Transport, folder: str, attempts: Path) -> list[Path]:
    """Copy every attempt's `repro/` from a node folder below `attempts`. Return the files. Raises TransportError,
    OSError."""
    done = transport.run(["sh", "-c", _PACK, "sh", folder], timeout=PACK_TIMEOUT_S)
    return unpack(done.out, attempts)


def unpack(data: bytes, attempts: Path) -> list[Path]:
    """Unpack the files of an archive that have an expected path, `attempts/ID/repro/NAME/FILE`. Skip the rest. Raises
    OSError."""
    files: dict[Path, bytes] = {}
    with suppress(tarfile.TarError):  # nothing, damaged, or cut off at the limit
        for name, content in read_files(io.BytesIO(data), MAX_BYTES):
            parts = name.split("/")
            if len(files) < MAX_FILES and len(content) <= MAX_FILE and _is_expected(parts):
                files[attempts.joinpath(*parts[1:])] = content
    for path, content in files.items():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o700 if path.suffix == ".sh" else 0o600)
    return list(files)


def _is_expected(parts: list[str]) -> bool:
    if len(parts) != 5 or parts[0] != "attempts" or parts[2] != "repro":
        return False
    return bool(ATTEMPT_RE.match(parts[1])) and all(_NAME.match(part) for part in parts[3:])


def missing_files(transport: Transport, folder: str, files: Mapping[str, RemoteFile]) -> dict[str, RemoteFile]:
    """The files to deploy. The code is left out if its marker shows that it is there completely."""
    marker = next((name for name in files if name.endswith(CODE_MARKER)), None)
    if marker is None or transport.run(["test", "-e", f"{folder}/{marker}"], timeout=20.0).code:
        return dict(files)
    return {name: file for name, file in files.items() if not name.startswith("code/")}


def attempts_in(transport: Transport, folder: str, *below: str) -> set[str]:
    """Attempts with a spec or a folder in these folders of a node folder."""
    paths = [f"{folder}/{name}" for name in below]
    attempts = set()
    for name in _find(transport, [*paths, "-mindepth", "1", "-maxdepth", "2"]):
        spec = InboxName.parse(name)
        attempts.add(spec.attempt if spec else name)
    return attempts


def take_back_all(transport: Transport, folder: str) -> None:
    """Take every unclaimed spec out of a node folder's inbox."""
    for name in _find(transport, [f"{folder}/inbox", "-maxdepth", "1", "-name", "*.json"]):
        if InboxName.parse(name):
            transport.rename(f"{folder}/inbox/{name}", f"{folder}/taken/{name}")


def _find(transport: Transport, arguments: Sequence[str]) -> list[str]:
    """Names of the files that `find ARGUMENTS` prints."""
    done = transport.run(["find", *arguments], timeout=60.0)
    return [line.rsplit("/", 1)[-1] for line in done.out.decode("utf-8", "replace").splitlines()]
