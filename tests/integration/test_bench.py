"""`gemmfleet bench` through the real command line. It measures this CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kits.fleet import Bench, read_csv
from tests.standins.aiter.operators import make_operators
from tests.waiting import wait_until

RUNBOOK = ["M", "N", "K", "triton_tflops", "triton_us", "gluon_tflops", "gluon_us"]
QUICK = ("--sample", "0.02", "-O", "rotate_mb=1")
ONCE = ("--repeats", "1", "--extra", "0")


def local(bench: Bench, extra: str = "") -> None:
    """One slot with all cores."""
    bench.inventory.write_text(
        f"defaults: {{family: a16w16}}\nnodes:\n  here:\n    gpus: 0\n    workdir: {bench.workdir}\n{extra}"
    )
    bench.shapes_csv.write_text("M,N,K\n8,32,64\n16,32,64\n")


def args(bench: Bench, *more: str) -> list[str]:
    return [str(bench.shapes_csv), "-i", str(bench.inventory), *QUICK, *more]


@pytest.mark.parametrize("has_aiter", [True, False])
def test_without_named_backends_aiters_triton_gemms_are_measured_where_aiter_is(bench: Bench, has_aiter: bool) -> None:
    root = make_operators(bench.root / "tree", "new") if has_aiter else bench.root / "none"
    local(bench, f"    aiter: {{root: {root}}}\n")
    done = bench.run("bench", *args(bench, *ONCE, "--json")).ok()
    told = done.json()
    measured = {r["backend"] for r in told["rows"] if r["status"] in ("ok", "unstable")}
    assert measured == ({"aiter-triton"} if has_aiter else {"torch"})
    missing = [(m["backend"], "no Gluon kernel for a16w16" in m["detail"]) for m in told["missing"]]
    assert missing == ([("aiter-gluon", True)] if has_aiter else []), "no Gluon here: that is said, and no error"


def test_backends_side_by_side_with_one_that_dies_and_one_that_is_not_there(bench: Bench) -> None:
    root = make_operators(bench.root / "tree", "old")
    local(bench, f"    aiter: {{root: {root}}}\n    env: {{STANDIN_FAULT: 'gemm_a16w16:segv'}}\n")
    done = bench.run("bench", *args(bench, "--backend", "torch,aiter,aiter-triton,gluon", "--json"))
    assert done.code == 1, done.err
    told = done.json()
    assert (told["state"], told["exit_code"], told["cpu"]) == ("finished", 1, True)
    assert told["shapes"] == {"total": 2, "measured": 2}
    status = {r["backend"]: r["status"] for r in told["rows"]}
    assert status["aiter-triton"] == "fault"
    assert status["aiter-gluon"] == "unsupported"
    assert {status["torch"], status["aiter"]} <= {"ok", "unstable"}
    why = {m["backend"]: m["detail"] for m in told["missing"]}
    assert "SIGSEGV" in why["aiter-triton"]
    assert "no Gluon kernel for a16w16" in why["aiter-gluon"]

    folder = bench.paths.root
    rows = read_csv(folder / "bench.csv")
    assert list(rows[0])[:7] == RUNBOOK
    assert [(r["M"], r["triton_us"], r["gluon_us"]) for r in rows] == [("8", "0.0", "0.0"), ("16", "0.0", "0.0")]
    assert all(float(r["torch_us"]) > 0 and float(r["aiter_us"]) > 0 for r in rows)
    of_torch = [r for r in read_csv(folder / "bench_runs.csv") if (r["backend"], r["M"]) == ("torch", "8")]
    assert [r["run"] for r in of_torch] in [["1", "2", "3", "4", "5"][:n] for n in (3, 4, 5)]
    assert not (folder / "tuned.csv").exists()
    again = bench.run("resume", bench.paths.run)
    assert "TFLOPS" in again.out
    assert "measured on the CPU" in again.out
    page = Path(bench.run("report", bench.paths.run).out.split()[-1]).read_text()
    assert all(words in page for words in ("requested on ", "for a bench on 1 slot", "2 measured"))
    wait_until(lambda: not bench.processes(), "no process is left")


def test_the_plain_method_of_the_guide_is_named_and_gb_a_second_are_shown(bench: Bench) -> None:
    local(bench)
    plain = ("-b", "torch", "--warmup", "2", "--iters", "7")
    done = bench.run("bench", *args(bench, *plain, "--json")).ok()
    rows, how = done.json()["rows"], "events, mean of 7 calls after 2"
    assert [(r["timer"], r["samples"] >= 3) for r in rows] == [(how, True)] * 2
    assert {r["timer"] for r in read_csv(bench.paths.root / "bench_runs.csv")} == {how}
    moved = [2 * (m * 64 + 32 * 64 + m * 32) for m in (8, 16)]  # bytes: X, W and the output
    assert [r["bw"] for r in rows] == [
        pytest.approx(b / r["us"] / 1e3, rel=0.01) for b, r in zip(moved, rows, strict=True)
    ]
    shown = bench.run("resume", bench.paths.run).out
    assert f"timed plainly, as in the FP4 guide ({how}): noisier than without --iters" in shown
    head, *lines = [
        line.split() for line in shown.splitlines() if "its GB/s" in line or line.lstrip().startswith(("8x", "16x"))
    ]
    assert head[-2:] == ["its", "GB/s"]
    assert [line[-1] for line in lines] == [f"{r['bw']:,.0f}" for r in rows]


def venv(folder: Path) -> Path:
    """An interpreter of its own that sees the packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "outer.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")) + "\n")
    return folder / "bin" / "python"


@pytest.mark.full
def test_two_interpreters_alternate_and_compare_can_read_them(bench: Bench) -> None:
    local(bench)
    stacks = {name: venv(bench.root / name) for name in ("golden", "tot")}
    envs = [word for name, python in stacks.items() for word in ("--env", f"{name}={python}")]
    done = bench.run("bench", *args(bench, "-b", "torch", "--repeats", "2", "--extra", "0", *envs)).ok()
    assert "golden: torch" in done.out
    folder = bench.paths.root
    golden, tot = (
        [(r["kernel"], r["M"], r["run"]) for r in read_csv(folder / f"{name}.csv")] for name in ("golden", "tot")
    )
    assert golden == tot
    assert {k for k, _, _ in tot} == {"torch/mm"}
    for name, python in stacks.items():
        record = json.loads((folder / f"{name}.env.json").read_text())
        assert (record["env"], record["order"], record["session"], record["timer"]) == (
            f"{name} ({python})", "interleaved", bench.paths.run, "events",
        )  # fmt: skip
        assert record["torch_version"]
    judged = bench.run("compare", str(folder / "golden.csv"), str(folder / "tot.csv"), "--json", "--ignore-below", "0")
    assert judged.code in (0, 1, 4), judged.err  # a busy CPU may well be slower in one of the two
    told = judged.json()
    assert told["paired"] is True
    assert {(r["key"]["kernel"], r["key"]["M"]) for r in told["rows"]} == {("torch/mm", "8"), ("torch/mm", "16")}


def test_bad_input_is_told_before_anything_is_written(bench: Bench) -> None:
    local(bench)
    images = ["--env", "a=image:1", "--env", "b=image:2"]
    for more, words in (
        (["-b", "cutlass"], "'cutlass' is not a backend"), (images, "only docker runs images"),
        (["--warmup", "3"], "--warmup belongs to --iters"),
        (["--iters", "10", "--timer", "rocprof"], "--iters to --timer events"),
    ):  # fmt: skip
        done = bench.run("bench", *args(bench, *more))
        assert (done.code, words in done.err, bench.runs.exists()) == (2, True, False), done.err


@pytest.mark.full
def test_images_alternate_pass_by_pass_on_one_slot(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes themselves, with workers as processes: docker's part of a run is tested elsewhere."""
    from orchestrator.bench import image_passes
    from orchestrator.bench.request import TUNER, parse_sides, tuner_options
    from orchestrator.cli.live_view import LineView
    from orchestrator.controller.drive import drive
    from orchestrator.controller.prepare import prepare
    from orchestrator.controller.prepared_run import PreparedRun
    from orchestrator.controller.request import RunRequest

    local(bench)
    compared = parse_sides(["golden=image:1", "tot=image:2,TRITON_X=1"], ())
    made = tuner_options(compared, ["torch"], runs=1, extra=1, within=1.0, sample_s=0.02, rotate_mb=1)
    asked = RunRequest(bench.shapes_csv, bench.runs, bench.inventory, tuner=TUNER, bench=True, options=made)
    images: list[str | None] = []

    def without_docker(request: RunRequest) -> PreparedRun:
        images.append(request.image)
        return prepare(replace(request, image=None))

    monkeypatch.setattr(image_passes, "prepare", without_docker)
    first = prepare(asked)
    of, state = image_passes.run_passes(first, asked, compared, lambda paths, what: drive(paths, LineView()))
    of.write()
    assert (state, sorted(map(str, images))) == ("finished", ["image:1", "image:2"])
    assert [(r.key[0], len(r.runs), r.status) for r in of.results] == [(8, 1, "ok")] * 2 + [(16, 1, "ok")] * 2
    assert [r.env for r in of.results] == ["golden", "tot"] * 2
    assert read_csv(of.paths.root / "tot.csv")[0]["run"] == "1"
    record = json.loads((of.paths.root / "tot.env.json").read_text())
    assert (record["env"], record["session"]) == ("tot (image:2)", of.paths.run)
    assert (record["under_test"], record["switches"]["TRITON_X"]) == ("switches.TRITON_X", "1")
