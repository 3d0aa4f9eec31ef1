"""Where a ledger may lie: WAL needs shared memory between processes, which no network file system gives."""

from __future__ import annotations

import os
import re
from pathlib import Path

from orchestrator.errors import LedgerError

# fmt: off
NETWORK = frozenset((
    "nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "afs", "9p", "ceph", "lustre", "gpfs",
    "beegfs", "glusterfs", "orangefs", "pvfs2", "panfs", "ocfs2", "gfs2", "quobyte", "weka", "wekafs", "davfs",
    "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.s3fs", "fuse.rclone", "fuse.juicefs",
    "fuse.gcsfuse", "fuse.goofys", "fuse.davfs2", "fuse.beegfs", "fuse.cvmfs2", "fuse.quobyte",
    "fuse.blobfuse2", "fuse.lustre",
))
# fmt: on
"""Names of network and cluster file systems as /proc/self/mountinfo gives them (proc(5))."""


def file_system(path: str, mountinfo: str) -> tuple[str, str]:
    """(type, mount point) of an absolute, resolved path, from the text of /proc/self/mountinfo.

    The longest mount point that holds the path wins, the later of two equal ones. ("", "") where none does.
    """
    best = ("", "")
    for line in mountinfo.splitlines():
        left, dash, right = line.partition(" - ")
        fields, after = left.split(" "), right.split(" ")
        if not dash or len(fields) < 5:
            continue
        point = _unescape(fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[1]):
            best = (after[0], point)
    return best


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)


def require_local(path: Path) -> None:
    """Raises LedgerError where `path` would lie on a network file system. Silent where there is no /proc."""
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return
    kind, point = file_system(os.path.realpath(path), mountinfo)
    if kind in NETWORK:
        raise LedgerError(
            f"{path}: {point} is a network file system ({kind}), where the ledger's database can be damaged;"
            " keep runs on a local disk: --runs DIR (for example --runs /var/tmp/gemmfleet-runs)"
        )
