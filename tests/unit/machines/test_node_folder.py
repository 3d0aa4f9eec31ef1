"""Reproductions brought home: what they should be and nothing else, whatever a node sends."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path

import pytest

from orchestrator.machines.node_folder import MAX_FILE, fetch_reproductions, unpack
from orchestrator.transport.local import LocalTransport
from tests.support.files import write_files

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
    write_files(node, dict.fromkeys((GOOD, f"attempts/{NAME}/untuned.csv", "attempts/g0002-1/aiter-1/x"), "text"))
    found = fetch_reproductions(LocalTransport("n"), str(node), home)
    assert sorted(found) == [home / NAME / "reproduce.sh", home / NAME / "untuned.csv"]
    assert [p.stat().st_mode & 0o777 for p in sorted(found)] == [0o700, 0o600]
    assert fetch_reproductions(LocalTransport("n"), str(tmp_path / "none"), home) == []


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


def header(name: bytes, size: bytes = b"0", kind: bytes = b"0") -> bytes:
    """A header with any text in the field of the size."""
    fields = {0: name[:100], 100: b"0000600", 124: size[:12], 136: b"0", 148: b" " * 8, 156: kind, 257: b"ustar  "}
    block = bytearray(tarfile.BLOCKSIZE)
    for at, value in fields.items():
        block[at : at + len(value)] = value
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(kind: bytes, content: bytes, name: bytes = b"x") -> bytes:
    return header(name, b"%o" % len(content), kind) + content + bytes(-len(content) % tarfile.BLOCKSIZE)


def number(size: int) -> bytes:
    """A size as GNU tar writes what does not fit: base 256, also below zero."""
    return (b"\xff" if size < 0 else b"\x80") + (size % 256**11).to_bytes(11, "big")


HOSTILE = {
    "a pax header that is none": member(b"x", b"0 x=") + header(b"y"),
    "a pax header without a number": member(b"x", b"99999999999999999999999 path=y\n") + header(b"y"),
    "a size of 10^17 in a pax header": member(b"x", b"27 size=100000000000000000\n") + header(b"y"),
    "a size below zero in a pax header": member(b"x", b"14 size=-1024\n") + header(b"y"),
    "10 MB of digits in a pax header": member(b"x", b"1" * 10**7) + header(b"y"),
    "a chain of pax headers": member(b"x", b"9 a=bcd\n") * 5000,
    "a chain of long names": member(b"L", b"name") * 5000,
    "a long name of 10^17 bytes": header(b"x", number(10**17), b"L"),
    "a size of 10^17": header(b"y", number(10**17)),
    "a size below zero": header(b"y", number(-1024)),
    "the largest octal size": header(b"y", b"77777777777"),
    "a size of letters": header(b"y", b"abcdefg"),
    "a sparse file of 10^17 bytes": header(b"y", b"1000", b"S")[:483] + number(10**17) + bytes(17),
    "a wrong checksum": header(b"y").replace(b"ustar", b"USTAR"),
    "half a header": header(b"y")[:200],
    "a link in the place of a folder": header(f"attempts/{NAME}".encode(), b"0", b"2"),
    "30,000 empty files": header(b"y") * 30_000,
    "a name that is no text": header(b"\xff\x1b[31m\n/../\x80"),
    "a device": header(b"y", b"0", b"3"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_costs_only_itself(tmp_path: Path, name: str) -> None:
    good = member(b"0", b"good", GOOD.encode())
    more = member(b"0", b"more", f"{GOOD}2".encode())
    found = unpack(good + HOSTILE[name] + more, tmp_path)
    assert found[0].read_bytes() == b"good"
    assert {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.sh*")} <= {
        f"{NAME}/reproduce.sh{i}" for i in ("", "2")
    }
    assert sorted(p for p in tmp_path.rglob("*") if not p.is_dir()) == sorted(found)


def test_damaged_archives_cost_only_themselves(tmp_path: Path) -> None:
    regular, chance = tarfile.REGTYPE, random.Random(5)
    whole = archive((GOOD, b"good" * 200, regular), (f"{GOOD}2", b"x" * 700, regular), ("a" * 150, b"", regular))
    for turn in range(300):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 3, 30))):
            data[chance.randrange(2048)] = chance.randrange(256)
        home = tmp_path / str(turn)
        found = unpack(bytes(data[: chance.choice((len(data), chance.randrange(len(data))))]), home)
        assert sorted(p for p in home.rglob("*") if not p.is_dir()) == sorted(found)


def test_a_long_name_is_read(tmp_path: Path) -> None:
    long = f"attempts/g0001-1/repro/{'a' * 120}/reproduce.sh"
    packed = member(b"L", long.encode() + b"\0") + header(long.encode()[:100], b"4") + b"good".ljust(512, b"\0")
    (found,) = unpack(packed, tmp_path)
    assert found == tmp_path / long.removeprefix("attempts/")
