"""`collect` over the transports: folders of this machine, and of a real sshd."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator.families import get_family
from tests.integration.kit import Bench, read_csv
from tests.integration.sshd import light_fleet
from tests.support.tables_kit import read_newcomers

HEADER = "cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
ASM = "_ZN5aiter42f4gemm_bf16_per1x32Fp4_X"


def results(folder: Path, n: int, us: float) -> None:
    """A results folder as the runbook leaves it."""
    folder.mkdir(parents=True)
    rows = [f"256,{m},64,64,21,0,{us + m},{ASM},9.9,8.8,0.0" for m in (1, n)]
    (folder / f"fp4_tuned_fp4_tune_shapes_n{n}.csv").write_text("\n".join((HEADER, *rows)) + "\n")
    more = [f"256,{m},64,64,0,0,-1,a4w4_blockscale_x,0,0,1.0" for m in (1, n, 40 + n)]
    (folder / f"fp4_profile_fp4_tune_shapes_n{n}.csv").write_text("\n".join((HEADER, *rows, *more)) + "\n")
    (folder / f"run_n{n}.log").write_text("=== TUNING COMPLETE ===\n")
    (folder / "fp4_tune_shapes.csv").write_text("M,N,K\n1,64,64\n")


def test_collected_checked_and_merged(bench: Bench) -> None:
    bench.inventory.write_text("nodes:\n  a: {}\n  b: {}\n")
    folder = bench.root / "all"
    results(folder, 2, 5.0)
    os.symlink("/etc/passwd", folder / "passwd.csv")
    (folder / "big.csv").touch()
    os.truncate(folder / "big.csv", 100 << 20)
    (folder / "fp4_triton_gluon_bench.csv").write_text(
        "M,N,K,triton_tflops,triton_us,gluon_tflops,gluon_us\n1,64,64,9.0,10.0,0.0,0.0\n"
    )
    done = bench.run("collect", "-i", str(bench.inventory), "--from", str(folder))
    assert done.code == 0, done.err
    root = Path(done.out.splitlines()[-1].removeprefix("written: "))
    assert root.parent == bench.runs
    tuned = read_csv(root / "tuned.csv")
    assert [(r["gfx"], r["cu_num"], r["M"], r["us"]) for r in tuned] == [
        ("gfx950", "256", "1", "6.0"),
        ("gfx950", "256", "2", "7.0"),
    ]
    assert list(tuned[0]) == list(get_family("a4w4_blockscale").tuned_header)
    assert len(read_newcomers(root / "profile.csv", get_family("a4w4_blockscale"))) == 10  # both nodes saw the folder
    assert [(r["M"], r["reason"]) for r in read_csv(root / "failed.csv")] == [("42", "no_candidate")]
    assert read_csv(root / "bench.csv") == [
        {"M": "1", "N": "64", "K": "64", "backend": "aiter-triton", "us": "10.0", "tflops": "9.0", "node": "a"}
    ]
    assert (root / "nodes" / "b" / "run_n2.log").read_text() == "=== TUNING COMPLETE ===\n"
    kept = root / "nodes" / "a" / "fp4_tuned_fp4_tune_shapes_n2.csv"
    assert kept.read_bytes() == (folder / kept.name).read_bytes()
    assert not (root / "nodes" / "a" / "passwd.csv").exists()
    assert "passed over big.csv: 100 MiB" in done.err
    origin = json.loads((root / "provenance.json").read_text())
    assert origin["state"] == "collected"
    assert {f["node"] for f in origin["files"]} == {"a", "b"}
    page = bench.run_plain("report", str(root), "--json")
    assert page.code == 0, page.err
    said = page.json()
    assert (said["run"], said["state"]) == (root.name, "finished")
    assert (said["shapes"]["tuned"], said["shapes"]["failed"], said["shapes"]["total"]) == (2, 1, 3)
    assert said["file"] == str(root / "report.html")
    assert ASM in (root / "report.html").read_text()
    assert not (root / "ledger.db").exists()
    assert bench.run_plain("serve", str(root)).code == 2


@pytest.mark.full
def test_nothing_is_overwritten_and_what_is_missing_is_said(bench: Bench) -> None:
    folder = bench.root / "r"
    results(folder, 2, 5.0)
    bench.inventory.write_text("nodes:\n  a: {}\n  gone: {transport: ssh, host: 127.0.0.1, port: 1}\n")
    out = bench.root / "mine"
    done = bench.run("collect", "-i", str(bench.inventory), "--from", str(folder), "-o", str(out), "--json")
    assert done.code == 1  # one node is missing
    found = done.json()
    assert (found["tuned"], found["failed"]) == (2, 1)
    assert any("gone" in note for note in found["notes"])
    before = (out / "tuned.csv").read_bytes()
    again = bench.run("collect", "-i", str(bench.inventory), "--from", str(folder), "-o", str(out))
    assert again.code == 2
    assert "nothing is overwritten" in again.err
    assert (out / "tuned.csv").read_bytes() == before
    none = bench.run("collect", "-i", str(bench.inventory), "--from", str(bench.root / "no"))
    assert none.code == 3
    assert "cannot read the folder" in none.err
    empty = bench.root / "empty"
    empty.mkdir()
    nothing = bench.run("collect", "-i", str(bench.inventory), "--from", str(empty), "--limit", "a")
    assert nothing.code == 2
    assert "no tuned table, profile or benchmark" in nothing.err


@pytest.mark.system
def test_over_ssh(bench: Bench) -> None:
    folder = bench.root / "it's here"
    results(folder, 2, 5.0)
    (folder / "fp4_profile_many.csv").write_text(HEADER + "\n" + f"256,9,64,64,21,0,3.5,{ASM},9.9,8.8,0.0\n" * 60_000)
    with light_fleet() as fleet:
        fleet.up(2)
        nodes = "".join(f"  {n.name}: {{host: {n.address}, port: {n.port}}}\n" for n in fleet.nodes)
        bench.inventory.write_text(f"defaults: {{transport: ssh, ssh_config: {fleet.config}}}\nnodes:\n{nodes}")
        out = bench.root / "mine"
        done = bench.run("collect", "-i", str(bench.inventory), "--from", str(folder), "-o", str(out))
        assert done.code == 0, done.err
    assert [r["M"] for r in read_csv(out / "tuned.csv")] == ["1", "2", "9"]
    for node in fleet.nodes:
        kept = out / "nodes" / node.name / "fp4_profile_many.csv"
        assert kept.read_bytes() == (folder / kept.name).read_bytes()  # some 4 MB
