"""Reproductions brought home: what they should be and nothing else, whatever a node sends."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from orchestrator.controller.node_plan import MAX_FILE, bring_home, unpack
from orchestrator.transport.local import LocalTransport

NAME = "g0001-1/repro/a4w4-32-512-1024-2-0"
GOOD = f"attempts/{NAME}/reproduce.sh"


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
    for name in (GOOD, f"attempts/{NAME}/untuned.csv", "attempts/g0002-1/aiter-1/x"):
        (node / name).parent.mkdir(parents=True, exist_ok=True)
        (node / name).write_text("text")
    found = bring_home(LocalTransport("n"), str(node), home)
    assert sorted(found) == [home / NAME / "reproduce.sh", home / NAME / "untuned.csv"]
    assert [p.stat().st_mode & 0o777 for p in sorted(found)] == [0o700, 0o600]
    assert bring_home(LocalTransport("n"), str(tmp_path / "none"), home) == []


def test_what_is_not_one_is_passed_over_and_what_is_cut_off_gives_what_was_whole(tmp_path: Path) -> None:
    regular, link, folder = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE
    names = ("../../etc/x", "/attempts/a/repro/b/c", "attempts/../repro/b/c", "attempts/a/repro/../c",
             "attempts/a/repro/b/.c", "attempts/a/aiter-1/b/c")  # fmt: skip
    odd = ((f"{GOOD}.l", b"", link), ("attempts/a/repro/b", b"", folder), (f"{GOOD}.b", b"x" * (MAX_FILE + 1), regular))
    data = archive(
        *((n, b"x", regular) for n in names), *odd, (GOOD, b"good", regular), (f"{GOOD}2", b"x" * 5000, regular)
    )
    (found,) = unpack(data[: data.index(b"good") + 2000], tmp_path)
    assert found.read_bytes() == b"good"
    assert [p for p in tmp_path.rglob("*") if p.is_file() or p.is_symlink()] == [found]
    assert unpack(b"nonsense" * 1000, tmp_path) == []
