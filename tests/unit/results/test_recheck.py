"""A recheck: what is measured of each row, how rows are judged, and the command with a replay of two builds."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator import events as ev
from orchestrator.cli.app import app
from orchestrator.errors import InputError
from orchestrator.inventory.load import load_inventory, parse_inventory, with_image
from orchestrator.ledger import LedgerReader
from orchestrator.paths import RunPaths, list_runs
from orchestrator.reasons import Reason
from orchestrator.results.recheck import RowToCheck, chip_of_rows, judge, kernels_to_check, rows_to_check, write_rows
from orchestrator.tables.locate import open_sources
from tests.support.ledger_kit import Run, ended, row, started
from worker.protocol import TableKernel, record

A4W4 = "a4w4_blockscale"
HEADER = "gfx,cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
ASM, CK = "_ZN5aiter41f4gemm_32x128E", "a4w4_blockscale_256x64"


def table(path: Path, *rows: Sequence[object], more: str = "") -> Path:
    """A table of a4w4: rows of M, kernelId, splitK, us, kernelName and what `more` has."""
    lines = [f"gfx950,256,{m},512,512,{n},{s},{us},{name},1,1,0.0" + "".join(f",{x}" for x in rest)
             for m, n, s, us, name, *rest in rows]  # fmt: skip
    path.write_text("\n".join([HEADER + more, *lines]) + "\n")
    return path


def test_a_rows_kernel_and_its_runners_up_are_measured(tmp_path: Path) -> None:
    tuned = table(tmp_path / "tuned_a4w4_blockscale_tuned_gemm.csv", (1, 21, 0, 5.0, ASM), (2, 3, 1, 4.0, CK))
    profile = table(
        tmp_path / "profile.csv",
        (1, 21, 0, 5.1, ASM, "ok"), (1, 4, 0, 5.3, CK, "ok"), (1, 4, 0, 5.2, CK, "ok"), (1, 5, 0, 4.0, "x", "wrong"),
        (1, 6, 0, "Null", "none", "error"), (1, 4, 1, 9.0, CK, "ok"), (9, 4, 0, 1.0, CK, "ok"),
        (1, 8, 0, 4.5, "", "ok"), more=",status",
    )  # fmt: skip
    found = rows_to_check(open_sources([tuned], [profile], None, A4W4), 1)
    asm, ck = TableKernel("asm", "21", ASM, "0"), TableKernel("ck", "4", CK, "0")
    assert found == {
        ("gfx950", 256, 1, 512, 512): RowToCheck((asm, ck), 5.0, 3),
        ("gfx950", 256, 2, 512, 512): RowToCheck((TableKernel("ck", "3", CK, "1"),), 4.0, 1),
    }
    assert rows_to_check(open_sources([tuned], [profile], None, A4W4), 9)["gfx950", 256, 1, 512, 512].kernels == (
        asm, ck, TableKernel("ck", "4", CK, "1")
    )  # fmt: skip


def test_the_numbers_of_a16w16_are_in_a_column_of_another_name(tmp_path: Path) -> None:
    tuned = tmp_path / "bf16_tuned_gemm.csv"
    tuned.write_text(
        "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw\n"
        "gfx950,256,1,64,64,False,torch.bfloat16,torch.bfloat16,False,False,flydsl,77,0,5.0,flydsl_a,0.0,1,1\n"
    )
    (found,) = rows_to_check(open_sources([tuned], [], None, None), 3).values()
    assert found.kernels == (TableKernel("flydsl", "77", "flydsl_a", "0"),)


def test_rows_of_pairs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tuned_fmoe.csv"
    path.write_text("")
    with pytest.raises(InputError, match="a row of fmoe is a pair of kernels"):
        rows_to_check(open_sources([path], [], None, "fmoe"), 3)


# --- verdicts -----------------------------------------------------------------------------------------------------

OWN, OTHER = TableKernel("ck", "1", "own", "0"), TableKernel("ck", "2", "other", "0")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run(tmp_path, groups=((1, 2, 3, 4, 5, 6, 7, 8),)) as r:
        r.send("g0001-1")
        r.says(started("g0001-1"))
        yield r


def says(run: Run, shape: int, own: float | None, other: float, *, status: str = "ok") -> None:
    """The attempt measures both kernels of a shape; None: the first is not there."""
    rows = [("other", other, "ok")] + ([] if own is None else [("own", own, status)])
    lines = [row("row", "g0001-1", shape, us=us, kernelName=n, status=s) for n, us, s in rows]
    name, best, _ = min((r for r in rows if r[2] == "ok"), key=lambda r: r[1])
    run.says(
        record("shape_started", 1.0, attempt="g0001-1", shape=shape),
        *lines,
        row("shape_tuned", "g0001-1", shape, us=best * 0.99, kernelName=name),
    )


def test_verdicts_relative_to_the_median_row(run: Run, tmp_path: Path) -> None:
    write_rows(tmp_path / "recheck.json", "t.csv", {i: RowToCheck((OWN, OTHER), 10.0, 9) for i in range(1, 9)}, 0.05)
    assert kernels_to_check(tmp_path / "recheck.json")[3] == [OWN, OTHER]
    assert kernels_to_check(tmp_path / "none.json") == {}
    for shape, own, other in ((1, 11.0, 12.0), (2, 11.0, 12.0), (3, 11.4, 11.3), (4, 12.0, 12.5), (5, 11.0, 10.5)):
        says(run, shape, own, other)
    says(run, 6, None, 9.0)
    says(run, 7, 1.0, 12.0, status="wrong")
    run.says(ended("g0001-1", seconds=7.0, spent={"start": 2.5}))
    found = judge(run.ledger, tmp_path / "recheck.json")
    assert found.drift == pytest.approx(1.1), "a session in which all took a tenth longer"
    assert {r.key[0]: r.verdict for r in found.rows} == {
        1: "good", 2: "good", 3: "good", 4: "slower", 5: "overtaken", 6: "gone", 7: "gone", 8: "not measured"
    }  # fmt: skip
    by_m = {r.key[0]: r for r in found.rows}
    assert (by_m[5].now_us, by_m[5].by, by_m[5].by_us) == (11.0, "other", 10.5)
    assert "no such kernel" in by_m[6].why
    assert by_m[7].why.startswith("wrong")
    assert found.counts == {"good": 3, "gone": 2, "slower": 1, "overtaken": 1, "not measured": 1}
    assert found.slot_s == 9.5
    document = found.to_json(run.ledger.family.key_names)
    assert document["rows"][0]["key"] == {"M": 1, "N": 64, "K": 128}
    assert document["to_tune"] == 5


def test_a_shape_that_failed_is_gone_with_its_reason(run: Run, tmp_path: Path) -> None:
    write_rows(tmp_path / "recheck.json", "t.csv", {1: RowToCheck((OWN,), 10.0, 1)}, 0.05)
    run.journal(ev.FailShape(1, Reason.NO_CANDIDATE, "none of 60 candidates ran", "g0001-1", confirmed=True))
    (found,) = judge(run.ledger, tmp_path / "recheck.json").rows
    assert (found.verdict, "none of 60 candidates ran" in found.why) == ("gone", True)


# --- the command --------------------------------------------------------------------------------------------------


def candidate(m: int, number: int, us: float, shift: int) -> dict[str, Any]:
    known = {"M": m, "N": 512, "K": 512, "gfx": "gfx950", "cu_num": 256, "splitK": 0, "errRatio": 0.0, "status": "ok"}
    return {**known, "kernelId": number + shift, "us": us, "kernelName": f"{CK}_{number}", "seconds": 0.0}


def recording(path: Path, times: Mapping[int, Mapping[int, float]], shift: int = 0) -> Path:
    """A profile: M -> kernel -> time; `shift`: by which the numbers of its kernels differ from those in their names."""
    rows = [candidate(m, n, us, shift) for m, of in times.items() for n, us in of.items()]
    with path.open("w", newline="") as f:
        out = csv.DictWriter(f, rows[0])
        out.writeheader()
        out.writerows(rows)
    return path


CHIP = ("-O", "gfx=gfx950", "-O", "cu_num=256")  # that the tuner poses as


def gemmfleet(*words: str | Path) -> Any:
    return CliRunner().invoke(app, [str(w) for w in words])


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """An inventory, a shape list, and recordings of the old and the new build: of M=2 the kernel is gone, M=3 is
    slower, of M=4 a runner-up is faster now."""
    old = {m: {n: 10.0 + n for n in range(8)} for m in range(1, 8)}
    new = {m: dict(of) for m, of in old.items()}
    del new[2][0]
    new[3] |= {0: 11.0, 1: 11.5}
    new[4][1] = 8.0
    recording(tmp_path / "old.csv", old)
    recording(tmp_path / "new.csv", new, shift=3)
    (tmp_path / "inv.yaml").write_text(
        f"defaults: {{family: {A4W4}, tuner: replay, gfx: gfx950, cu_num: 256}}\n"
        f"nodes:\n  here: {{gpus: [0], workdir: {tmp_path / 'nodes'}}}\n"
    )
    (tmp_path / "shapes.csv").write_text("M,N,K\n" + "".join(f"{m},512,512\n" for m in old))
    return tmp_path


def test_only_what_is_gone_slower_or_overtaken_is_tuned_again(fleet: Path) -> None:
    runs, inventory = fleet / "runs", fleet / "inv.yaml"
    common = ("-i", inventory, "--runs", runs, "--json")
    old = (*CHIP, "-O", f"recording={fleet / 'old.csv'}")
    assert gemmfleet("tune", fleet / "shapes.csv", *common, *old).exit_code == 0
    (tuned,) = list_runs(runs)
    new = (*CHIP, "-O", f"recording={fleet / 'new.csv'}")
    checked = gemmfleet("recheck", tuned.root, *common, *new, "--only-check", "--runners-up", "2")
    assert checked.exit_code == 1, checked.stderr
    found = json.loads(checked.stdout)
    assert found["counts"] == {"good": 4, "gone": 1, "slower": 1, "overtaken": 1}
    assert {r["key"]["M"]: r["verdict"] for r in found["rows"] if r["verdict"] != "good"} == {
        2: "gone", 3: "slower", 4: "overtaken"
    }  # fmt: skip
    with LedgerReader.open_readonly(RunPaths(runs / found["runs"][0]).ledger) as ledger:
        assert sum(not r.winner for r in ledger.profile_rows()) == 3 * 7 - 1, "three of eight kernels, one of them gone"
        assert ledger.meta("units") == pytest.approx(3 / 8), "its seconds count for so much of a tuning"
    done = gemmfleet("recheck", tuned.root / "tuned.csv", *common, *new, "--family", A4W4)
    assert done.exit_code == 0, done.stderr
    check, again = (RunPaths(runs / r) for r in json.loads(done.stdout)["runs"])
    assert (check.root / "queued.csv").read_text() == "M,N,K\n2,512,512\n3,512,512\n4,512,512\n"
    with LedgerReader.open_readonly(again.ledger) as ledger:
        assert [(w.key[0], w.us) for w in ledger.winners()] == [(2, 11.0), (3, 11.0), (4, 8.0)]
        assert sum(not r.winner for r in ledger.profile_rows()) == 3 * 8 - 1


def test_a_table_that_is_good_needs_no_tuning_and_the_way_on_is_shown(fleet: Path) -> None:
    runs, inventory = fleet / "runs", fleet / "inv.yaml"
    old = (*CHIP, "-O", f"recording={fleet / 'old.csv'}")
    gemmfleet("tune", fleet / "shapes.csv", "-i", inventory, "--runs", runs, *old)
    (tuned,) = list_runs(runs)
    done = gemmfleet("recheck", tuned.root, "-i", inventory, "--runs", runs)
    assert done.exit_code == 0, done.stderr
    assert "7 rows: 7 good; time now over then, median: 1.000" in done.stdout
    assert "db merge" in done.stdout.splitlines()[-1]
    assert len(list_runs(runs)) == 2


def test_a_node_that_cannot_say_its_compute_units_is_the_chip_of_the_table(tmp_path: Path) -> None:
    """nvidia-smi does not tell them, and a lease is not there yet."""
    tuned = table(tmp_path / "x_a4w4_blockscale_tuned_gemm.csv", (1, 3, 0, 5.0, CK), (2, 21, 0, 5.0, ASM))
    rows = rows_to_check(open_sources([tuned], [], None, A4W4), 0)
    assert chip_of_rows(rows, "gfx950", 0) == chip_of_rows(rows, "", 0) == ("gfx950", 256)
    assert chip_of_rows(rows, "gfx942", 0) == ("gfx942", 0)
    rows |= {("gfx950", 128, *key[2:]): row for key, row in rows.items()}
    assert chip_of_rows(rows, "gfx950", 0) == ("gfx950", 0), "which of the two is not guessed"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--detach",), "leave out --detach"),
        (("--image", "my/new:1"), "names no image that 'my/new:1' could replace"),
        (("--tuner", "aiter-triton"), "writes config files"),
        ((), "has no row of gfx950/256 (it has gfx942/304)"),
    ],
)
def test_what_cannot_be_rechecked_is_refused(fleet: Path, words: Sequence[str], says: str) -> None:
    tuned = table(fleet / "x_a4w4_blockscale_tuned_gemm.csv", (1, 3, 0, 5.0, CK))
    tuned.write_text(tuned.read_text().replace("gfx950,256", "gfx942,304"))
    result = gemmfleet("recheck", tuned, "-i", fleet / "inv.yaml", "--runs", fleet / "runs", *words)
    assert isinstance(result.exception, InputError)
    assert says in str(result.exception)
    assert list_runs(fleet / "runs") == []


def test_the_new_image_replaces_every_image_of_the_runs_inventory(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "defaults: {engine: docker, image: my/old:1, env: {TOKEN: '${env:TOKEN}'}}  # a comment\n"
        "nodes:\n  a:\n  b: {image: my/old:2}\n"
    )
    text = with_image(path.read_bytes(), "my/new:3", str(path))
    found = parse_inventory(text, str(path))
    assert [found.nodes[n].image for n in "ab"] == ["my/new:3", "my/new:3"]
    assert found.nodes["a"].env == {"TOKEN": "${env:TOKEN}"} == load_inventory(path).nodes["a"].env
