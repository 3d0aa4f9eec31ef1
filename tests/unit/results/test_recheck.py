"""A recheck: the kernels that it measures for each row, the verdicts, and the command with a replay of two builds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator import events as ev
from orchestrator.errors import InputError
from orchestrator.files.write import write_csv
from orchestrator.inventory.load import load_inventory, parse_inventory, with_image
from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunPaths, list_runs
from orchestrator.reasons import Reason
from orchestrator.results.recheck import RowToCheck, chip_of_rows, judge_rows, rows_to_check, write_rows
from orchestrator.tables.merge_input import open_sources
from tests.kits.fleet import command
from tests.kits.results import Run, ended, row, started
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
    (fmoe := tmp_path / "tuned_fmoe.csv").write_text("")
    with pytest.raises(InputError, match="a row of fmoe is a pair of kernels"):
        rows_to_check(open_sources([fmoe], [], None, "fmoe"), 3)
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
    assert chip_of_rows(found, "gfx950", 0) == chip_of_rows(found, "", 0) == ("gfx950", 256)
    assert chip_of_rows(found, "gfx942", 0) == ("gfx942", 0)
    found |= {("gfx950", 128, *key[2:]): row for key, row in found.items()}
    assert chip_of_rows(found, "gfx950", 0) == ("gfx950", 0), "which of the two is not guessed"


def test_verdicts_relative_to_the_median_row(tmp_path: Path) -> None:
    own, other = TableKernel("ck", "1", "own", "0"), TableKernel("ck", "2", "other", "0")
    write_rows(tmp_path / "recheck.json", "t.csv", {i: RowToCheck((own, other), 10.0, 9) for i in range(1, 10)}, 0.05)
    a = "g0001-1"
    with Run(tmp_path, groups=(tuple(range(1, 10)),)) as run:
        run.send(a)
        run.says(started(a))
        for shape, us, by, status in (
            (1, 11.0, 12.0, "ok"), (2, 11.0, 12.0, "ok"), (3, 11.4, 11.3, "ok"), (4, 12.0, 12.5, "ok"),
            (5, 11.0, 10.5, "ok"), (6, None, 9.0, "ok"), (7, 1.0, 12.0, "wrong"),
        ):  # fmt: skip
            rows = [("other", by, "ok"), *([("own", us, status)] if us else [])]
            name, best, _ = min((r for r in rows if r[2] == "ok"), key=lambda r: r[1])
            run.says(
                record("shape_started", 1.0, attempt=a, shape=shape),
                *(row("row", a, shape, us=us, kernelName=n, status=s) for n, us, s in rows),
                row("shape_tuned", a, shape, us=best * 0.99, kernelName=name),
            )
        run.says(ended(a, seconds=7.0, spent={"start": 2.5}))
        run.journal(ev.FailShape(9, Reason.NO_CANDIDATE, "none of 60 candidates ran", a, confirmed=True))
        found = judge_rows(run.ledger, tmp_path / "recheck.json")
    assert found.drift == pytest.approx(1.1), "a session in which all took a tenth longer"
    assert {r.key[0]: r.verdict for r in found.rows} == {
        1: "good", 2: "good", 3: "good", 4: "slower", 5: "overtaken", 6: "gone", 7: "gone", 8: "not measured", 9: "gone"
    }  # fmt: skip
    by_m = {r.key[0]: r for r in found.rows}
    assert (by_m[5].now_us, by_m[5].by, by_m[5].by_us) == (11.0, "other", 10.5)
    for m, why in ((6, "no such kernel"), (7, "wrong"), (9, "none of 60 candidates ran")):
        assert why in by_m[m].why
    assert found.counts == {"good": 3, "gone": 3, "slower": 1, "overtaken": 1, "not measured": 1}
    document = found.to_json(("M", "N", "K"))
    assert (document["slot_s"], document["to_tune"]) == (9.5, 6)


def recording(path: Path, times: dict[int, dict[int, float]], shift: int = 0) -> None:
    """A profile: M -> kernel -> time; `shift`: by which the numbers of its kernels differ from those in their names."""
    known = {"N": 512, "K": 512, "gfx": "gfx950", "cu_num": 256, "splitK": 0, "errRatio": 0.0, "status": "ok"}
    rows = [
        {**known, "M": m, "kernelId": n + shift, "us": us, "kernelName": f"{CK}_{n}", "seconds": 0.0}
        for m, of in times.items()
        for n, us in of.items()
    ]
    write_csv(path, list(rows[0]), (r.values() for r in rows))


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
    runs = fleet / "runs"
    common = ("-i", fleet / "inv.yaml", "--runs", runs)
    chip = ("-O", "gfx=gfx950", "-O", "cu_num=256")  # that the tuner poses as
    new = (*common, "--json", *chip, "-O", f"recording={fleet / 'new.csv'}")
    old = ("-O", f"recording={fleet / 'old.csv'}", "--db", fleet / "db.csv")
    done = command("tune", fleet / "shapes.csv", *common, *chip, *old)
    done.ok()
    assert f"{fleet / 'db.csv'}: added 1x512x512  10 us" in done.out
    (tuned,) = list_runs(runs)
    good = command("recheck", tuned.root, *common)
    assert (good.code, len(list_runs(runs))) == (0, 2), good.err
    assert "7 rows: 7 good; time now over then, median: 1.000" in good.out
    assert "db merge" in good.out.splitlines()[-1]
    checked = command("recheck", tuned.root, *new, "--only-check", "--runners-up", "2")
    assert checked.code == 1, checked.err
    found = checked.json()
    assert found["counts"] == {"good": 4, "gone": 1, "slower": 1, "overtaken": 1}
    verdicts = {r["key"]["M"]: r["verdict"] for r in found["rows"] if r["verdict"] != "good"}
    assert verdicts == {2: "gone", 3: "slower", 4: "overtaken"}
    with LedgerReader.open_readonly(RunPaths(runs / found["runs"][0]).ledger) as ledger:
        assert sum(not r.winner for r in ledger.profile_rows()) == 3 * 7 - 1, "three of eight kernels, one of them gone"
    done = command("recheck", tuned.root / "tuned.csv", *new, "--family", A4W4).ok()
    check, again = (RunPaths(runs / r) for r in done.json()["runs"])
    told = command("recheck", tuned.root / "tuned.csv", *(w for w in new if w != "--json"), "--family", A4W4)
    assert (told.code, "no --db" in told.out) == (0, False), told.err
    assert [line.split()[:4] for line in told.out.splitlines() if "next:" in line] == [
        ["next:", *told.out.splitlines()[-1].split()[1:4]]
    ], "one command is next: the merge of both runs"
    assert (check.root / "queued.csv").read_text() == "M,N,K\n2,512,512\n3,512,512\n4,512,512\n"
    with LedgerReader.open_readonly(again.ledger) as ledger:
        assert [(w.key[0], w.us) for w in ledger.winners()] == [(2, 11.0), (3, 11.0), (4, 8.0)]


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
    result = command("recheck", tuned, "-i", fleet / "inv.yaml", "--runs", fleet / "runs", *words)
    result.failed_with(2, says)
    assert list_runs(fleet / "runs") == []


def test_the_new_image_replaces_every_image_of_the_runs_inventory(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "defaults: {engine: docker, image: my/old:1, env: {TOKEN: '${env:TOKEN}'}}  # a comment\n"
        "nodes:\n  a:\n  b: {image: my/old:2}\n  c:\n    image: >-\n      my/old:3\n    labels: [x]\n"
        "  d: {engine: process, image: null}\n"
    )
    replaced = with_image(path.read_bytes(), "my/new:3", str(path))
    found = parse_inventory(replaced, str(path))
    assert [found.nodes[n].image for n in "abcd"] == ["my/new:3", "my/new:3", "my/new:3", None]
    assert found.nodes["a"].env == {"TOKEN": "${env:TOKEN}"} == load_inventory(path).nodes["a"].env
    assert found.nodes["c"].labels == ("x",)
    assert replaced.decode().splitlines()[:3] == [
        "defaults: {engine: docker, image: \"my/new:3\", env: {TOKEN: '${env:TOKEN}'}}  # a comment", "nodes:", "  a:",
    ]  # fmt: skip
