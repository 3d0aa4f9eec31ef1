"""`gemmfleet selftest` on this machine, with AITERs that are stand-ins and GPUs that only /sys has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from orchestrator.results import selftest_trial
from tests.integration.test_verify import table as verified_table
from tests.kits.fleet import Bench
from tests.standins.aiter import make_tree
from tests.standins.sysfs import add_gpus
from tests.waiting import PATIENCE_S, wait_until

PLANTED = ("zeus-gpu-07", "olympus", "projekt-geheim", "hera.corp.example", "s3cret-value", "my-company")
NO_GPU = (3, 4, 12, 13, 14, 17, 18)
"""Statements that need a GPU or a real torch."""
WORKAROUNDS = {6: "asm_dir_symlink", 7: "tile_column_case", 8: "k_trim"}
"""Statements on a workaround of AITER's of the runbook."""


def planted(bench: Bench, date: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An inventory of one node, with names in it that are nobody's business."""
    secret = bench.root / "projekt-geheim"
    tree = make_tree(secret, date)
    for name, value in (
        ("GEMMFLEET_SYS", str(add_gpus(bench.root / "sys"))),
        ("TOLD", "s3cret-value"),
        ("HOME", str(secret)),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", bench.env()["PYTHONPATH"])
    # the tree prints what a careless image might print
    script = tree.root / "csrc/ck_gemm_a4w4_blockscale/gemm_a4w4_blockscale_tune.py"
    said = "print('as olympus@hera.corp.example, on zeus-gpu-07.olympus.example (10.1.2.3), with', os.environ['TOLD'])"
    script.write_text(f"import os\n{said}\nprint('in', os.path.expanduser('~/acme/olympus.txt'))\n{script.read_text()}")
    path = bench.root / "my-company.yaml"
    path.write_text(
        f"nodes:\n  zeus-gpu-07:\n    python: {tree.python}\n    gpus: [0, 1]\n    workdir: {bench.workdir}\n"
        f'    env: {{PATH: "{tree.site}/bin:/usr/bin:/bin", TOLD: "${{env:TOLD}}"}}\n    aiter: {{root: {tree.root}}}\n'
    )
    return path


def unpacked(bundle: Path) -> dict[str, str]:
    with tarfile.open(bundle) as archive:
        members = archive.getmembers()
        assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members} == {(0, 0, "", "", 0)}
        return {m.name: f.read().decode() for m in members if (f := archive.extractfile(m)) is not None}


def outcomes(document: dict[str, Any]) -> dict[int, str]:
    return {row["number"]: row["outcome"] for row in document["statements"]}


def whole(bench: Bench, date: str, monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, Any]]:
    inventory, bundle = planted(bench, date, monkeypatch), bench.root / "bundle.tar.gz"
    done = bench.run("selftest", "-i", inventory, "-o", bundle, "--json")
    assert done.code == 1, done.err
    rows = {row["number"]: row for row in done.json()["statements"]}
    assert [n for n, row in rows.items() if row["outcome"] == "could not be tried"] == list(NO_GPU)
    # this /sys has no sensors; the runbook's AITER has no --run_config, and the stand-in's torch runs no operator
    no_operator = [11] if date == "runbook" else []
    failed = {n: row["detail"] for n, row in rows.items() if row["outcome"] == "did not hold"}
    assert list(failed) == [1, *no_operator], failed
    assert "temperature_c" in rows[1]["detail"]
    assert ("module 'torch' has no attribute" in rows[11]["detail"]) == (date == "runbook")
    files = unpacked(bundle)
    told = json.loads(files["selftest.json"])
    assert outcomes(told) == {n: row["outcome"] for n, row in rows.items()}
    assert json.loads(files["gpus.json"])[0]["gfx"] == "gfx950"
    assert sum(name.endswith("profile.csv") for name in files) >= 2
    logs = "".join(text for name, text in files.items() if name.endswith(".log"))
    for words in ("set-up of batch 2: ", "with ${env:TOLD}", "as <address>, on <host>", "in <path>"):
        assert words in logs, words
    assert any("<aiter>" in text for text in files.values())
    for name, text in files.items():
        for word in (*PLANTED, str(bench.root), "acme", os.uname().nodename):
            assert word not in name, word
            assert word not in text, (name, word, text[max(0, text.find(word) - 200) :][:400])
    assert not bench.processes()
    return rows


def test_every_statement_is_tried_and_the_bundle_names_nobody(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        selftest_trial, "OTHERS", [f for f in selftest_trial.OTHERS if f.name in ("a8w8", "fmoe", "batched_bf16")]
    )
    rows = whole(bench, "newest", monkeypatch)
    assert rows[15]["detail"].startswith("a8w8: tuned; batched_bf16: unsupported: ")
    assert rows[15]["detail"].endswith("fmoe: tuned")
    assert rows[11]["detail"] == "5 ok "
    for number, name in WORKAROUNDS.items():
        assert rows[number]["detail"].startswith(f"{name} not applied"), rows[number]


@pytest.mark.full
def test_every_family_of_the_runbooks_aiter(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = whole(bench, "runbook", monkeypatch)
    assert rows[15]["detail"].count(": tuned") == 4
    for number, name in WORKAROUNDS.items():
        assert rows[number]["detail"].startswith(f"{name} applied"), rows[number]


def test_ctrl_c_keeps_what_is_there(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    inventory, bundle = planted(bench, "newest", monkeypatch), bench.root / "bundle.tar.gz"
    process = subprocess.Popen(
        bench.argv("selftest", "-i", str(inventory), "-o", str(bundle), "--json"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "STANDIN_PACE_S": "0.2"},
    )  # fmt: skip
    wait_until(lambda: list(bench.runs.glob("*/*/ledger.db")), "a run began")
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    said = outcomes(json.loads(out))
    assert said[1] == "did not hold", "it had its answer before"
    assert {said[n] for n in range(10, 19)} == {"could not be tried"}
    assert "it was interrupted" in out
    assert json.loads(unpacked(bundle)["selftest.json"])["counts"]["could not be tried"] >= 10
    wait_until(lambda: not bench.processes(), "no process is left")


def test_a_command_that_takes_too_long_is_ended_and_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory = planted(bench, "newest", monkeypatch)
    monkeypatch.setenv("STANDIN_PACE_S", "60")
    bench.runs.mkdir()
    trial = selftest_trial.NodeTrial(bench.runs, inventory, None, 40.0)  # the check of the node comes first
    step = trial.run_a4w4()
    assert (step.cut, step.why, step.run.is_dir()) == ("the time was over", "the time was over", True)
    assert {s.result().cut for s in trial.family_runs.values()} == {"the time was over"}
    wait_until(lambda: not bench.processes(), "no process is left")


def test_a_bundle_that_exists_and_a_node_that_cannot_be_used(bench: Bench) -> None:
    bundle = bench.root / "bundle.tar.gz"
    done = bench.run("selftest", "-i", bench.inventory, "-o", bundle, "--json")
    assert done.code == 3, done.err
    assert set(outcomes(done.json()).values()) == {"could not be tried"}
    assert "gpus: [0, 1], but 0 were found" in done.json()["statements"][0]["detail"]
    bench.run("selftest", "-i", bench.inventory, "-o", bundle).failed_with(2, "exists already: name another file")
    nowhere = bench.run("selftest", "-i", bench.inventory, "-o", bench.root / "none" / "b.tar.gz")
    nowhere.failed_with(2, "its folder does not exist")
    told = bench.run("selftest", "-i", bench.inventory, "-o", bench.root / "b.tar.gz")
    assert told.out.count("gpus: [0, 1], but 0 were found") < told.out.count("as above")


def test_a_variable_that_is_not_set_is_told_before_anything_is_written(bench: Bench) -> None:
    bench.inventory.write_text("nodes:\n  a:\n    env: {PROXY: 'http://${env:NOT_SET_HERE}'}\n  b: {}\n")
    for words in (
        ["selftest", "-o", str(bench.root / "b.tar.gz")], ["verify", "--table", str(verified_table(bench, 64))],
    ):  # fmt: skip
        done = bench.run(*words, "-i", bench.inventory)
        assert (done.code, done.out) == (2, ""), done.err
        says = (
            f"{bench.inventory}:3: node a: env.PROXY refers to ${{env:NOT_SET_HERE}}, and NOT_SET_HERE is not set here"
        )
        assert done.err.count("NOT_SET_HERE is not set") == 1
        assert says in done.err
    assert not bench.runs.exists() or not list(bench.runs.iterdir())
