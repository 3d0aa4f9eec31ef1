"""`tune --render`: the scripts of a run as files, without a node, a scheduler or a run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.kits.fleet import command
from worker.protocol import Spec, SpecShape

INVENTORY = """\
defaults: {tuner: torch}
nodes:
  here: {gpus: 0, env: {TOKEN: "${env:GF_SECRET}", PLAIN: "1"}}
  far: {transport: ssh, host: far.invalid, gpus: [1, 3]}
  unknown: {transport: ssh, host: nowhere.invalid}
  dock: {transport: ssh, host: dock.invalid, gpus: 2, engine: docker, image: "x/${env:GF_SECRET}:1"}
  pool: {lease: slurm, count: 1-3}
  pods: {lease: kubernetes, gpus: 2, image: "x:1"}
"""
FILES = ["follow.sh", "launch.sh", "node.json", "tune.sh"]


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GF_SECRET", "secret-value")
    monkeypatch.setenv("PATH", str(tmp_path))  # no command of a scheduler, of Docker or of SSH
    (tmp_path / "s.csv").write_text("M,N,K\n16,64,64\n")
    (tmp_path / "inv.yaml").write_text(INVENTORY)
    return tmp_path


def slots(folder: Path) -> dict[str, str]:
    found = json.loads((folder / "node.json").read_text())["slots"]
    return {slot: env["HIP_VISIBLE_DEVICES"] for slot, env in found.items()}


def test_every_node_that_can_be_known_is_rendered_without_a_question(there: Path) -> None:
    done = command("tune", "s.csv", "-i", "inv.yaml", "--render", "out", "--json")
    assert (done.code, done.err) == (3, ""), "a node was left out"
    document = done.json()
    docker = ["container.sh", *FILES]
    leased = {"pool-1": FILES, "pods-1": FILES}
    assert document["nodes"] == {"here": FILES, "far": FILES, "dock": docker, **leased}
    files = {n: sorted(p.name for p in (there / "out" / n).iterdir() if p.is_file()) for n in document["nodes"]}
    assert files == document["nodes"]
    for n in files:  # only a lease has a holder
        assert ("hand_over" in (there / "out" / n / "launch.sh").read_text()) is (n in leased)
    assert "unknown: its GPUs are not known before it is asked: write their number, `gpus: 8`" in document["notes"]
    assert sorted(p.name for p in there.iterdir()) == ["inv.yaml", "out", "s.csv"]
    expected = {"here": {"0": ""}, "far": {"1": "1", "3": "3"}, "pods-1": {"0": "0", "1": "1"}}
    assert {n: slots(there / "out" / n) for n in expected} == expected
    assert len(slots(there / "out" / "pool-1")) == 8


def test_a_rendered_folder_runs_by_hand(there: Path) -> None:
    command("tune", "s.csv", "-i", "inv.yaml", "--render", "out", "--limit", "here", "--tuner", "replay").ok()
    shapes = (SpecShape(1, {"M": 16, "N": 64, "K": 64}),)
    spec = Spec("hand-1", "r", 0, group="g", family="a16w16", tuner="replay", shapes=shapes)
    (there / "group.json").write_bytes(spec.dumps())
    env = {**os.environ, "PATH": os.defpath}
    ran = subprocess.run(["sh", "out/here/tune.sh", "group.json"], cwd=there, env=env, capture_output=True, text=True)
    assert (ran.returncode, "done: 1 of 1 shape tuned in " in ran.stdout) == (0, True), ran.stdout + ran.stderr
    assert (there / "out/here/attempts/hand-1/records.jsonl").exists()


def test_values_of_references_are_in_no_file(there: Path) -> None:
    command("tune", "s.csv", "-i", "inv.yaml", "--render", "out")
    text = {p: p.read_text() for p in (there / "out").rglob("*.*") if p.is_file()}
    assert [p for p, words in text.items() if "secret-value" in words] == []
    assert "export PLAIN=1" in text[there / "out" / "here" / "tune.sh"]
    assert "x/${env:GF_SECRET}:1" in text[there / "out" / "dock" / "container.sh"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("--render out --limit unknown", 3, "no node can be used:\n  unknown: its GPUs are not known before"),
        ("--render s.csv", 2, "s.csv/here: cannot be written: Not a directory; name another folder with --render"),
        ("--render out --plan", 2, "--plan writes nothing, and --render does"),
        ("--render out --tuner aiter -O nonsense=1", 2, "unknown option 'nonsense'"),
    ],
)
def test_what_cannot_be_rendered_says_why(there: Path, words: str, code: int, says: str) -> None:
    done = command("tune", "s.csv", "-i", "inv.yaml", *words.split())
    assert done.code == code
    assert says in done.err
    assert not (there / "out").exists()
