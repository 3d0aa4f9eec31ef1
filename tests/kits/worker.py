"""Kit of the worker: real agents on a node folder, and single groups by hand; always as processes.

with node(tmp_path, options=fault("abort", match={"M": 2})) as n:
    n.put("g1-1", shapes=3)
    n.start()
    assert n.wait_ended("g1-1")["outcome"] == "fault"

`run_group` tunes one group as `worker run GROUP.json` does on a node, with Triton's interpreter in place of a GPU:

done = run_group(tmp_path, "vllm", "fmoe", [key], {"root": str(tree)})
assert done.tuned[1]["us"] > 0, done.output
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.paths import ROOT
from tests.waiting import PATIENCE_S, wait_until
from worker.agent.tuner_process import TOKEN, slot_token
from worker.protocol import InboxName, NodeConfig, NodePaths, ProtocolError, Spec, SpecShape, parse_record

RUN = "test-run"


def interpreters() -> dict[str, str]:
    """Python 3.10 to 3.13 as far as they are installed: version to executable."""
    found: dict[str, str] = {}
    homes = [p for p in os.environ.get("PATH", "").split(os.pathsep) if p and "shims" not in p]
    for version in ("3.10", "3.11", "3.12", "3.13"):
        pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin"))
        place = shutil.which(f"python{version}", path=os.pathsep.join([*homes, *map(str, pyenv)]))
        found |= {version: place} if place else {}
    return found


class Node:
    """One node folder. Agents started here are ended, and must have left no process, when it is closed."""

    def __init__(self, root: Path, slots: Sequence[str] = ("0",), **config: Any) -> None:
        self.paths = NodePaths(root)
        for folder in self.paths.folders():
            (root / folder).mkdir(parents=True)
        settings = {"idle_exit_s": 0.0, "tuner": "faulty", **config}
        self.paths.config.write_bytes(NodeConfig(run=RUN, node="n1", slots={s: {} for s in slots}, **settings).dumps())
        self.paths.epoch.write_text("1\n")
        self._seq = 0
        self._agents: list[subprocess.Popen[bytes]] = []

    def put(self, attempt: str, shapes: int | Sequence[SpecShape] = 1, slot: str = "any", **fields: Any) -> Path:
        """Put a spec into the inbox as the controller does: written aside, then renamed."""
        self._seq += 1
        if isinstance(shapes, int):
            shapes = [SpecShape(i + 1, {"M": i + 1, "N": 64, "K": 128}) for i in range(shapes)]
        group = attempt.rpartition("-")[0]
        settings = {"epoch": 1, "group": group, "family": "a16w16", "tuner": "faulty", "grace_s": 0.5, **fields}
        spec = Spec(attempt=attempt, run=settings.pop("run", RUN), shapes=tuple(shapes), **settings)
        return self.put_raw(attempt, spec.dumps(), slot)

    def put_raw(self, attempt: str, data: bytes, slot: str = "any") -> Path:
        path = self.inbox_path(attempt, slot)
        aside = self.paths.root / f"{path.name}.tmp"
        aside.write_bytes(data)
        os.rename(aside, path)
        return path

    def inbox_path(self, attempt: str, slot: str = "any") -> Path:
        self._seq += 1
        return self.paths.inbox / str(InboxName(self._seq, slot, attempt))

    def start(self, slot: str = "0", python: str = sys.executable, **popen: Any) -> subprocess.Popen[bytes]:
        """Start an agent for the slot. Its own output goes to `agent-<slot>.out`."""
        argv = [python, "-m", "worker", "agent", "--node-dir", str(self.paths.root), "--slot", slot]
        with open(self.paths.root / f"agent-{slot}.out", "ab") as out:
            agent = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, **popen)
        self._agents.append(agent)
        return agent

    def said(self, slot: str = "0") -> str:
        return (self.paths.root / f"agent-{slot}.out").read_text()

    def records(self, slot: str = "0", *types: str) -> list[dict[str, Any]]:
        """The whole good records of a slot so far."""
        path = self.paths.events(slot)
        out: list[dict[str, Any]] = []
        for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
            with suppress(ProtocolError):
                out.append(parse_record(line))
        return [r for r in out if not types or r["type"] in types]

    def of(self, attempt: str, *types: str) -> list[dict[str, Any]]:
        """The records of an attempt, whichever slot ran it."""
        slots = sorted(p.stem for p in self.paths.root.glob("events/*.jsonl"))
        found = [r for s in slots for r in self.records(s, *types)]
        return [r for r in found if r.get("attempt") == attempt]

    def wait_record(self, type_: str, slot: str = "0", count: int = 1) -> dict[str, Any]:
        """The `count`-th record of a type."""

        def found() -> list[dict[str, Any]]:
            there = self.records(slot, type_)
            return there if len(there) >= count else []

        return dict(wait_until(found, f"{type_} number {count} of slot {slot}")[count - 1])

    def wait_ended(self, attempt: str) -> dict[str, Any]:
        """The attempt_ended of an attempt, once its spec is put away."""

        def found() -> Any:
            ended = self.of(attempt, "attempt_ended")
            return ended if ended and (self.paths.attempt(attempt) / "spec.json").exists() else None

        (ended,) = wait_until(found, f"the end of {attempt}")
        return dict(ended)

    def tuner_pids(self, slot: str = "0") -> list[int]:
        """Living processes of a slot's tuner: the child and what it forked."""
        mark = f"{TOKEN}={slot_token(self.paths.root, slot)}".encode()
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return sorted(found)

    def kill(self, agent: subprocess.Popen[bytes]) -> None:
        """kill -9, and gone."""
        agent.send_signal(signal.SIGKILL)
        agent.wait()

    def stop(self, agent: subprocess.Popen[bytes], word: str = "drain") -> int:
        self.paths.stop.write_text(word)
        status = agent.wait(PATIENCE_S)
        self.paths.stop.unlink()
        return status

    def close(self) -> None:
        slots = [p.stem for p in self.paths.root.glob("events/*.jsonl")]
        for agent in self._agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGCONT)
                agent.kill()
            agent.wait()
        wait_until(lambda: not any(self.tuner_pids(s) for s in slots), "no process of a tuner is left")


@contextmanager
def node(root: Path, slots: Sequence[str] = ("0",), **config: Any) -> Iterator[Node]:
    """A node that is closed at the end; `config` as in NodeConfig."""
    made = Node(root / "node", slots, **config)
    try:
        yield made
    finally:
        made.close()


def fault(kind: str, **fields: Any) -> dict[str, Any]:
    """Node options with one fault of the tuner faulty."""
    return {"faults": [{"kind": kind, **fields}]}


FEW = {"max_candidates": 2, "min_samples": 1, "max_samples": 1, "compilers": 1}
"""Options of a search that takes seconds."""


class GroupRun(NamedTuple):
    """A group by hand that ended: its exit code, what was printed, and its records."""

    code: int
    output: str
    records: list[dict[str, Any]]

    @property
    def ended(self) -> dict[str, Any]:
        assert self.records[-1]["type"] == "attempt_ended", self.output
        return self.records[-1]

    @property
    def tuned(self) -> dict[int, dict[str, Any]]:
        """Shape -> its winner's row."""
        return {r["shape"]: r["row"] for r in of_type(self.records, "shape_tuned")}

    @property
    def failed(self) -> dict[int, tuple[str, str]]:
        """Shape -> reason and detail."""
        return {r["shape"]: (r["reason"], r["detail"]) for r in of_type(self.records, "shape_failed")}

    def rows(self, shape: int) -> list[dict[str, Any]]:
        return [r["row"] for r in of_type(self.records, "row") if r["shape"] == shape]

    def end(self, shape: int) -> dict[str, Any]:
        """The record that settles a shape."""
        (found,) = (r for r in self.records if r["type"] in ("shape_tuned", "shape_failed") and r["shape"] == shape)
        return found


def group_by_hand(
    folder: Path, tuner: str, family: str, keys: Sequence[Mapping[str, Any]], *, attempt: str = "a1", **fields: Any
) -> list[str]:
    """Words of `worker run` for a group of shapes 1, 2, ... of these keys, which is written; `fields`: of its spec."""
    raw = {
        "attempt": attempt, "run": "r", "epoch": 1, "group": "g1", "family": family, "tuner": tuner, "protocol": 1,
        "shapes": [{"id": i, "key": key} for i, key in enumerate(keys, 1)], **fields,
    }  # fmt: skip
    (folder / "node").mkdir(parents=True, exist_ok=True)
    (folder / f"{attempt}.json").write_text(json.dumps(raw))
    words = ["run", str(folder / f"{attempt}.json"), "--node-dir", str(folder / "node"), "--tuner", tuner]
    return [sys.executable, "-m", "worker", *words]


def to_its_end(folder: Path, words: Sequence[str], env: Mapping[str, str], attempt: str = "a1") -> GroupRun:
    """Run the words of `group_by_hand`."""
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    records = folder / "node" / "attempts" / attempt / "records.jsonl"
    lines = records.read_text().splitlines() if records.exists() else []
    return GroupRun(done.returncode, done.stdout + done.stderr, [json.loads(line) for line in lines])


def run_group(
    folder: Path,
    tuner: str,
    family: str,
    keys: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    interpreted: bool = True,
) -> GroupRun:
    """Tune shapes 1, 2, ... of these keys with few candidates, on a node that knows their family."""
    words = group_by_hand(folder, tuner, family, keys)
    config = NodeConfig("r", "n", tuner, {**FEW, "family": family, **options})
    (folder / "node" / "node.json").write_bytes(config.dumps())
    env = {name: value for name, value in os.environ.items() if name != "GEMMFLEET_CACHE"}
    return to_its_end(folder, words, env | {"TRITON_INTERPRET": str(int(interpreted))})


def of_type(records: Sequence[Any], type_: str) -> list[Any]:
    return [record for record in records if record["type"] == type_]


def answers_of(code: str, *words: str, cache: Path, interpreted: bool = False) -> list[Any]:
    """The lists that Python code prints in a fresh process, which keeps what Triton compiles in the folder `cache`."""
    env = {"TRITON_CACHE_DIR": str(cache), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    env["TRITON_INTERPRET"] = str(int(interpreted))
    argv = [sys.executable, "-W", "ignore", "-c", code, *words]
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
