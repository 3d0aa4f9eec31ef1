"""Reproductions brought home: what they should be and nothing else, whatever a node sends."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from orchestrator.controller.node_plan import MAX_FILE, bring_home, unpack
from orchestrator.transport import LocalTransport

GOOD = "attempts/g0001-1/repro/a4w4-32-512-1024-2-0/reproduce.sh"


def archive(*members: tuple[str, bytes, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content, kind in members:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, len(content), "/etc/passwd"
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def test_from_a_node_folder(tmp_path: Path) -> None:
    node, home = tmp_path / "it's a node", tmp_path / "home"
    for name, text in (("reproduce.sh", "#!/bin/sh\n"), ("untuned.csv", "M,N,K\n")):
        path = node / GOOD
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / name).write_text(text)
    (node / "attempts/g0002-1/aiter-1").mkdir(parents=True)
    transport = LocalTransport("n")
    found = bring_home(transport, str(node), home)
    assert sorted(p.relative_to(home).as_posix() for p in found) == [
        "g0001-1/repro/a4w4-32-512-1024-2-0/reproduce.sh", "g0001-1/repro/a4w4-32-512-1024-2-0/untuned.csv"
    ]  # fmt: skip
    assert (home / "g0001-1/repro/a4w4-32-512-1024-2-0/reproduce.sh").stat().st_mode & 0o777 == 0o700
    assert bring_home(transport, str(tmp_path / "none"), home) == []
    assert bring_home(transport, str(tmp_path), home) == []


def test_what_is_not_one_is_passed_over(tmp_path: Path) -> None:
    regular, link, folder = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE
    data = archive(
        ("../../etc/x", b"x", regular), ("/attempts/a/repro/b/c", b"x", regular),
        ("attempts/../repro/b/c", b"x", regular),
        ("attempts/a/repro/../c", b"x", regular), ("attempts/a/repro/b/.c", b"x", regular), (f"{GOOD}.l", b"", link),
        ("attempts/a/aiter-1/b/c", b"x", regular), ("attempts/a/repro/b", b"", folder),
        ("attempts/a/repro/b/big", b"x" * (MAX_FILE + 1), regular), (GOOD, b"good", regular),
    )  # fmt: skip
    (found,) = unpack(data, tmp_path)
    assert found.read_bytes() == b"good"
    assert [p for p in tmp_path.rglob("*") if p.is_file() or p.is_symlink()] == [found]


def test_an_archive_that_is_cut_off_gives_what_was_whole(tmp_path: Path) -> None:
    data = archive((GOOD, b"good", tarfile.REGTYPE), (f"{GOOD}2", b"x" * 5000, tarfile.REGTYPE))
    assert len(unpack(data[:2000], tmp_path)) == 1
    assert unpack(b"", tmp_path) == []
    assert unpack(b"nonsense" * 1000, tmp_path) == []
