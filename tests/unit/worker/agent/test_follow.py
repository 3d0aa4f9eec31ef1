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

from tests.kits.worker import Node, interpreters, node
from tests.paths import ROOT
from tests.waiting import wait_until
from worker.agent.follow import CHUNK

PYTHONS = interpreters()


@dataclass
class Reader:
    """State that a controller keeps of a stream: bytes by file, the offsets that it began at, and the beats."""

    process: subprocess.Popen[bytes]
    begun: dict[tuple[str, str], int] = field(default_factory=dict)
    data: dict[tuple[str, str], bytearray] = field(default_factory=dict)
    beats: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> None:
        assert self.process.stdout is not None
        out = self.process.stdout
        while header := out.readline():
            kind, *rest = header.decode().split()
            if kind == "B":
                self.beats.append(json.loads(out.read(int(rest[0]))))
                continue
            at, offset, length = (kind, rest[0]), int(rest[1]), int(rest[2])
            body = out.read(length)
            if len(body) < length:
                return
            assert offset == self.begun.get(at, 0) + len(self.got(*at)), "a gap or an overlap"
            assert length <= CHUNK
            assert kind == "L" or body.endswith(b"\n") or length == CHUNK
            self.data.setdefault(at, bytearray()).extend(body)

    def got(self, kind: str, slot: str = "0") -> bytes:
        return bytes(self.data.get((kind, slot), b""))


@contextmanager
def following(
    n: Node, begun: dict[tuple[str, str], int] | None = None, python: str = sys.executable
) -> Iterator[Reader]:
    start: dict[str, dict[str, int]] = {}
    for (kind, slot), offset in (begun or {}).items():
        start.setdefault(kind, {})[slot] = offset
    argv = [python, "-m", "worker", "follow", "--node-dir", str(n.paths.root), "--from", json.dumps(start)]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        reader = Reader(process, begun or {})
        thread = threading.Thread(target=reader.run)
        thread.start()
        try:
            yield reader
        finally:
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(5) in (0, -9)
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


def test_it_resumes_at_offsets_under_concurrent_writing(tmp_path: Path) -> None:
    with node(tmp_path, ("0", "1")) as n:
        paths = {(k, s): of(s) for k, of in (("E", n.paths.events), ("L", n.paths.log)) for s in "01"}
        stop, rng = threading.Event(), random.Random(3)

        def write() -> None:
            count = 0
            while not stop.is_set():
                for (kind, _), path in paths.items():
                    line = b'{"n":%d,"pad":"%s"}\n' % (count, b"p" * (count % 300))
                    with open(path, "ab", buffering=0) as f:
                        cut = count % len(line)  # a write may be seen half done
                        for part in (line[:cut], line[cut:]) if kind == "E" else (os.urandom(count % 700),):
                            f.write(part)
                count += 1

        writer = threading.Thread(target=write)
        writer.start()
        kept = {at: bytearray() for at in paths}
        try:
            for _ in range(6):
                with following(n, {at: len(data) for at, data in kept.items()}) as r:
                    wait_until(lambda r=r: len(r.data) == 4, "something of every file")  # type: ignore[misc]
                    time.sleep(rng.uniform(0, 0.15))
                    r.process.kill()
                for at, data in r.data.items():
                    kept[at].extend(data)
        finally:
            stop.set()
            writer.join()
        with following(n, {at: len(data) for at, data in kept.items()}) as r:
            for at, path in paths.items():
                whole = path.read_bytes()
                wait_until(lambda w=whole, a=at: kept[a] + r.got(*a) == w, f"{at} is whole and once", 5)  # type: ignore[misc]
        assert sum(map(len, kept.values())) > 100_000


def test_the_beat_tells_epoch_stop_life_and_age(tmp_path: Path) -> None:
    with node(tmp_path, ("0", "1")) as n:
        agent = n.start("0")
        n.wait_record("canary")
        (n.paths.root / "claimed" / "1").mkdir()
        with following(n) as r:
            first = wait_until(lambda: r.beats and r.beats[0], "the first beat at once")
            assert (first["epoch"], first["stop"], abs(first["t"] - time.time()) < 5) == (1, None, True)
            assert (first["slots"]["0"]["alive"], 0 <= first["slots"]["0"]["age"] < 2) == (True, True)
            assert first["slots"]["1"] == {"alive": False, "age": None}
            n.paths.epoch.write_text("7\n")
            n.paths.stop.write_text("drain")
            agent.wait(10)
            second = wait_until(lambda: len(r.beats) > 1 and r.beats[1], "the second beat")
            assert (second["epoch"], second["stop"], second["held"]) == (7, "drain", [])
            assert (second["slots"]["0"]["alive"], 1.5 < second["t"] - first["t"] < 3) == (False, True)


def test_only_plain_files_that_grow_are_sent_and_others_are_named_in_the_beat(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        (tmp_path / "secret").write_text("secret\n")
        n.paths.events("0").symlink_to(tmp_path / "secret")
        n.paths.log("0").write_bytes(b"short")
        n.paths.log("1").write_text("log 1\n")
        with following(n, {("L", "0"): 100}) as r:
            wait_until(lambda: r.got("L", "1") == b"log 1\n", "the log of slot 1")
            says = "0.jsonl: Too many levels of symbolic links; 0.log shrank from 100 to 5 bytes"
            wait_until(lambda: r.beats[-1:] and r.beats[-1].get("error") == says, "the beats name both")
            assert set(r.data) == {("L", "1")}


def test_it_ends_when_nobody_reads_or_writes_to_it(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.paths.log("0").write_bytes(b"z" * 2_000_000)
        argv = [sys.executable, "-m", "worker", "follow", "--node-dir", str(n.paths.root)]
        for way in ("stalled", "broken"):
            with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                assert process.stdout.read(1) == b"B"
                (process.stdin if way == "stalled" else process.stdout).close()  # the pipe is full
                assert process.wait(4) == 0
        done = subprocess.run(
            [*argv, "--from", '{"E":{"0":-1}}'], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert (done.returncode, "offsets look like" in done.stderr) == (2, True)
