"""`worker follow` as a process: nothing lost, nothing doubled, from any offset, and an honest beat."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.workernode import REPO, Node, interpreters, node
from tests.waiting import wait_until
from worker.agent.follow import CHUNK
from worker.protocol import MAX_RECORD_BYTES

PYTHONS = interpreters()


@dataclass
class Reader:
    """State that a controller keeps of a stream: bytes and offsets by file, and the beats."""

    process: subprocess.Popen[bytes]
    data: dict[tuple[str, str], bytearray] = field(default_factory=dict)
    offsets: dict[tuple[str, str], int] = field(default_factory=dict)
    beats: list[dict[str, Any]] = field(default_factory=list)
    longest: int = 0

    def run(self) -> None:
        assert self.process.stdout is not None
        out = self.process.stdout
        while header := out.readline():
            kind, *rest = header.decode().split()
            if kind == "B":
                self.beats.append(json.loads(out.read(int(rest[0]))))
                continue
            slot, offset, length = rest[0], int(rest[1]), int(rest[2])
            body = out.read(length)
            if len(body) < length:
                return
            assert offset == self.offsets.get((kind, slot), offset), "a gap or an overlap"
            self.offsets[kind, slot] = offset + length
            self.data.setdefault((kind, slot), bytearray()).extend(body)
            self.longest = max(self.longest, length)
            assert kind == "L" or body.endswith(b"\n") or length == CHUNK

    def got(self, kind: str, slot: str = "0") -> bytes:
        return bytes(self.data.get((kind, slot), b""))


@contextmanager
def following(n: Node, *args: str, python: str = sys.executable) -> Iterator[Reader]:
    argv = [python, "-m", "worker", "follow", "--node-dir", str(n.paths.root), *args]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(argv, cwd=REPO, **pipes) as process:  # type: ignore[call-overload]
        reader = Reader(process)
        thread = threading.Thread(target=reader.run)
        thread.start()
        try:
            yield reader
        finally:
            process.stdin.close()
            assert process.wait(5) == 0
            thread.join(5)


@pytest.mark.parametrize("version", sorted({min(PYTHONS, default=""), max(PYTHONS, default="")}))
def test_it_sends_all_that_is_there_and_all_that_comes(tmp_path: Path, version: str) -> None:
    with node(tmp_path, ("0", "1")) as n:
        n.paths.log("0").write_bytes(b"early \xff\x00 bytes, no newline")
        with following(n, python=PYTHONS.get(version, sys.executable)) as r:
            n.start("0")
            n.put("a-1", shapes=5)
            n.wait_ended("a-1")
            wait_until(lambda: r.got("E") == n.paths.events("0").read_bytes(), "all records")
            wait_until(lambda: r.got("L") == n.paths.log("0").read_bytes(), "all log bytes")
            # a slot that appears later
            n.start("1")
            n.wait_record("canary", "1")
            wait_until(lambda: b'"canary"' in r.got("E", "1"), "the records of slot 1")


def test_a_record_is_sent_when_it_is_whole(tmp_path: Path) -> None:
    with node(tmp_path) as n, following(n) as r:
        with open(n.paths.events("0"), "ab", buffering=0) as f:
            f.write(b'{"a":1}\n{"b"')
            wait_until(lambda: r.got("E") == b'{"a":1}\n', "the first line")
            time.sleep(0.1)
            assert r.got("E") == b'{"a":1}\n'
            f.write(b":2}\n")
            wait_until(lambda: r.got("E") == b'{"a":1}\n{"b":2}\n', "the second line")
        # a line that no record can be does not stop the stream
        damage = b"x" * (2 * CHUNK + 10) + b"\n"
        with open(n.paths.events("0"), "ab", buffering=0) as f:
            f.write(damage)
        n.paths.log("0").write_bytes(b"y" * (2 * CHUNK))
        wait_until(lambda: len(r.got("L")) == 2 * CHUNK, "the log")
        wait_until(lambda: r.got("E").endswith(damage), "the damaged line")
        assert r.longest <= CHUNK


def test_the_longest_record_comes_in_one_piece(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        longest = b"r" * (MAX_RECORD_BYTES - 1) + b"\n"
        n.paths.events("0").write_bytes(b"{}\n" + longest + longest + b"{}\n")
        with following(n) as r:
            wait_until(lambda: r.got("E") == n.paths.events("0").read_bytes(), "all records")
            assert r.longest == len(longest) == CHUNK


def test_it_resumes_at_offsets_under_concurrent_writing(tmp_path: Path) -> None:
    with node(tmp_path, ("0", "1")) as n:
        stop = threading.Event()
        rng = random.Random(3)

        def write() -> None:
            count = 0
            while not stop.is_set():
                for slot in "01":
                    with open(n.paths.events(slot), "ab", buffering=0) as f:
                        line = b'{"n":%d,"pad":"%s"}\n' % (count, b"p" * (count % 300))
                        cut = count % len(line)  # a write may be seen half done
                        f.write(line[:cut])
                        f.write(line[cut:])
                    with open(n.paths.log(slot), "ab", buffering=0) as f:
                        f.write(os.urandom(count % 700))
                count += 1

        writer = threading.Thread(target=write)
        writer.start()
        offsets: dict[tuple[str, str], int] = {}
        kept: dict[tuple[str, str], bytearray] = {}
        try:
            for _ in range(6):
                start: dict[str, dict[str, int]] = {"E": {}, "L": {}}
                for (kind, slot), offset in offsets.items():
                    start[kind][slot] = offset
                with following(n, "--from", json.dumps(start)) as r:
                    r.offsets = dict(offsets)
                    wait_until(lambda r=r: len(r.data) == 4, "something of every file")  # type: ignore[misc]
                    time.sleep(rng.uniform(0, 0.15))
                    r.process.kill()
                    r.process.wait()
                    r.process.returncode = 0  # the end of the context expects a good one
                offsets = r.offsets
                for name, data in r.data.items():
                    kept.setdefault(name, bytearray()).extend(data)
        finally:
            stop.set()
            writer.join()
        with following(n, "--from", json.dumps({k: {s: offsets[k, s] for s in "01"} for k in "EL"})) as r:
            for kind, path in (("E", n.paths.events), ("L", n.paths.log)):
                for slot in "01":
                    whole = path(slot).read_bytes()
                    name = (kind, slot)
                    wait_until(
                        lambda w=whole, k=name: bytes(kept[k]) + r.got(*k) == w,  # type: ignore[misc]
                        f"{kind} of {slot} is whole and once",
                        5,
                    )
        assert sum(map(len, kept.values())) > 100_000


def test_the_beat_tells_epoch_stop_life_and_age(tmp_path: Path) -> None:
    with node(tmp_path, ("0", "1")) as n:
        agent = n.start("0")
        n.wait_record("canary")
        (n.paths.root / "claimed" / "1").mkdir()
        with following(n) as r:
            first = wait_until(lambda: r.beats and r.beats[0], "the first beat at once")
            assert first["epoch"] == 1
            assert first["stop"] is None
            assert abs(first["t"] - time.time()) < 5
            assert first["slots"]["0"]["alive"] is True
            assert 0 <= first["slots"]["0"]["age"] < 2
            assert first["slots"]["1"] == {"alive": False, "age": None}
            n.paths.epoch.write_text("7\n")
            n.paths.stop.write_text("drain")
            agent.wait(10)
            second = wait_until(lambda: len(r.beats) > 1 and r.beats[1], "the second beat")
            assert (second["epoch"], second["stop"]) == (7, "drain")
            assert second["slots"]["0"]["alive"] is False
            assert 1.5 < second["t"] - first["t"] < 3


def test_looking_for_life_never_keeps_an_agent_from_starting(tmp_path: Path) -> None:
    from worker.agent.follow import is_alive

    with node(tmp_path, idle_exit_s=0.05) as n:
        (n.paths.root / "claimed" / "0").mkdir()
        n.paths.lock("0").touch()
        stop = threading.Event()

        def look() -> None:
            while not stop.is_set():
                is_alive(n.paths, "0")

        thread = threading.Thread(target=look)
        thread.start()
        try:
            assert [n.start().wait(10) for _ in range(3)] == [0, 0, 0]
        finally:
            stop.set()
            thread.join()


def test_a_file_that_shrank_is_named_in_the_beat(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.paths.log("0").write_bytes(b"short")
        n.paths.events("0").write_bytes(b"{}\n")
        with following(n, "--from", '{"L":{"0":100}}') as r:
            wait_until(lambda: r.got("E") == b"{}\n", "the other file goes on")
            beat = wait_until(lambda: next((b for b in r.beats if "error" in b), None), "an error")
            assert beat["error"] == "0.log shrank from 100 to 5 bytes"
            assert r.got("L") == b""


def test_only_plain_files_are_sent(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        secret = tmp_path / "secret"
        secret.write_text("secret\n")
        for slot in ("0", "1"):
            n.paths.log(slot).write_text(f"log {slot}\n")
        n.paths.events("0").symlink_to(secret)
        with following(n) as r:
            wait_until(lambda: r.got("L", "1") == b"log 1\n", "the log of slot 1")
            wait_until(lambda: r.got("L", "0") == b"log 0\n", "the log of slot 0")
            assert wait_until(lambda: r.beats, "a beat")
            assert set(r.data) == {("L", "0"), ("L", "1")}


def test_it_ends_when_nobody_reads_or_writes_to_it(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.paths.log("0").write_bytes(b"z" * 2_000_000)
        argv = [sys.executable, "-m", "worker", "follow", "--node-dir", str(n.paths.root)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        # nobody reads: the pipe is full, and closing stdin ends it all the same
        with subprocess.Popen(argv, cwd=REPO, **pipes) as stalled:  # type: ignore[call-overload]
            time.sleep(0.3)
            stalled.stdin.close()
            assert stalled.wait(2) == 0
        with subprocess.Popen(argv, cwd=REPO, **pipes) as broken:  # type: ignore[call-overload]
            assert broken.stdout.read(1) == b"B"
            broken.stdout.close()
            assert broken.wait(4) == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--from", "["), "Expecting value"),
        (("--from", '{"X":{}}'), "offsets look like"),
        (("--from", '{"E":{"0":-1}}'), "-1 is not an offset of slot '0'"),
        (("--from", "[]"), "offsets look like"),
        (("--node-dir", "/no/such/folder"), "/no/such/folder is not a folder"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    argv = [sys.executable, "-m", "worker", "follow", "--node-dir", str(tmp_path), *args]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
