"""`status -i INV --folder PATH`: jobs that were started by hand, on nodes of this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.collect.node_folder import read_listing
from orchestrator.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As the runbook leaves it while node 1 still tunes."""
    there = tmp_path / "fp4_tune"
    there.mkdir()
    (there / "fp4_tuned_fp4_tune_shapes_n1.csv").write_text("cu_num,M,N,K,us\n256,1,2,3,4\n256,2,2,3,4\n")
    (there / "run_n1.log").write_text("a\nb\nM=1 N=2 K=3\n\x1b[31mstill tuning\n")
    (there / "odd name.csv").write_text("x\n")
    os.symlink("/etc/passwd", there / "passwd.csv")
    (tmp_path / "inv.yaml").write_text("nodes:\n  a: {}\n  b: {}\n")
    return there


def status(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["status", *map(str, args)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_files_rows_and_last_lines_are_told(folder: Path) -> None:
    inventory = folder.parent / "inv.yaml"
    code, out = status("-i", inventory, "--folder", folder, "--json", "--timeout", 60)
    assert code == 0
    found = json.loads(out)
    assert {n["name"] for n in found["nodes"]} == {"a", "b"}
    for node in found["nodes"]:
        assert not node["error"]
        files = {f["name"]: f for f in node["files"]}
        assert set(files) == {"fp4_tuned_fp4_tune_shapes_n1.csv", "run_n1.log", "odd name.csv"}
        assert files["fp4_tuned_fp4_tune_shapes_n1.csv"]["rows"] == 2
        assert files["odd name.csv"]["rows"] == 0
        assert files["run_n1.log"]["last"] == ["b", "M=1 N=2 K=3", "still tuning"]
        assert len(node["load"]) == 3
    code, out = status("-i", inventory, "--folder", folder, "--timeout", 60, "--limit", "a")
    assert code == 0
    assert "\x1b" not in out
    assert "bytes, 2 rows, " in out
    assert "still tuning" in out


def test_a_folder_that_is_not_there_and_a_node_that_does_not_answer(folder: Path) -> None:
    inventory = folder.parent / "inv.yaml"
    code, out = status("-i", inventory, "--folder", folder / "none", "--timeout", 60)
    assert code == 3
    assert "cannot read the folder" in out
    inventory.write_text("nodes:\n  a: {}\n  b: {transport: ssh, host: 127.0.0.1, port: 1}\n")
    code, out = status("-i", inventory, "--folder", folder, "--json", "--timeout", 60)
    assert code == 1
    assert {n["name"]: bool(n["error"]) for n in json.loads(out)["nodes"]} == {"a": False, "b": True}


def test_what_is_typed_wrong(folder: Path) -> None:
    inventory = folder.parent / "inv.yaml"
    for args, message in (
        (("--folder", folder), "with -i INV"), (("-i", inventory), "belong to --folder"),
        (("some-run", "-i", inventory, "--folder", folder), "leave the run out"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            status(*args)


def test_an_answer_that_is_no_listing_is_passed_over() -> None:
    assert read_listing(b"\xff\nfile x y z\nfile 1 2\nlog before any\nfile 5 6 0 a.log\nlog  \nlog x\n") == (
        read_listing(b"file 5 6 0 a.log\nlog x\n")
    )
