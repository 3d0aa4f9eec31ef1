"""The tuner `aiter` on stand-in trees, by the real `worker run`: processes, faults, files, what is left behind.

All faults in one run of the whole job are in tests/integration/test_aiter_faults.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kits.worker import GroupRun, group_by_hand, of_type, to_its_end
from tests.paths import ROOT
from tests.standins.aiter import Tree, make_tree
from tests.support.marks import full_but
from tests.waiting import PATIENCE_S, wait_until
from worker.families import FAMILIES
from worker.protocol import NodeConfig, TableKernel
from worker.tuners.aiter.tuner import tiny_key

DATES = ("runbook", "newest")
KINDS = ("a8w8", "a8w8_blockscale", "a16w16", "fmoe", "batched_gemm_a8w8_blockscale_mxscale")
Key = dict[str, int | str]


def mnk(*sizes: tuple[int, int, int]) -> list[Key]:
    return [{"M": m, "N": n, "K": k} for m, n, k in sizes]


THREE = mnk((16, 512, 1024), (32, 512, 1024), (64, 512, 1024))
ONE = THREE[1:2]


def fault(do: str, kernels: Any = (2,), **when: int) -> dict[str, Any]:
    """faults.json: what happens to these kernels at these shapes."""
    named = list(kernels) if isinstance(kernels, tuple) else kernels
    return {"shapes": [{"when": when or {"M": 32}, "kernels": named, "do": do}]}


@dataclass(frozen=True)
class Bench:
    """A node folder, a cache and a tree."""

    folder: Path
    tree: Tree

    def words(self, shapes: Sequence[Key], family: str = "a4w4_blockscale", **spec: Any) -> list[str]:
        return group_by_hand(self.folder, "aiter", family, shapes, **spec)

    def env(self, **more: str) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("AITER_", "GEMMFLEET_"))}
        env |= {"GEMMFLEET_AITER_ROOT": str(self.tree.root), "GEMMFLEET_CACHE": str(self.folder / "cache")}
        env |= {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        env["PATH"] = f"{self.tree.site / 'bin'}:{env['PATH']}"
        return env | {"PYTHONPATH": f"{ROOT}:{self.tree.site}"} | more

    def run(
        self, shapes: Sequence[Key], family: str = "a4w4_blockscale", env: Mapping[str, str] = {}, **spec: Any
    ) -> GroupRun:
        words = self.words(shapes, family, **{"watchdog_s": 30, **spec})
        return to_its_end(self.folder, words, self.env(**env), spec.get("attempt", "a1"))

    @property
    def blocked(self) -> list[dict[str, Any]]:
        files = list(self.folder.glob("cache/aiter/*/blocklist.jsonl"))
        return [json.loads(line) for f in files for line in f.read_text().splitlines()]

    def canary(self) -> GroupRun:
        """A run whose node is told of the family, so that the modules are built before the canary."""
        words = self.words(ONE)
        config = NodeConfig("r", "n", "aiter", {"family": "a4w4_blockscale"})
        (self.folder / "node/node.json").write_bytes(config.dumps())
        return to_its_end(self.folder, words, self.env())

    def survivors(self) -> list[str]:
        """Processes that are left of its tree."""
        said = subprocess.run(["ps", "axo", "pid,args"], capture_output=True, text=True, check=True).stdout
        return [line for line in said.splitlines() if str(self.folder) in line]


def slot_of(done: GroupRun) -> dict[str, Any]:
    """The slot as the record of the tuner's start has it."""
    (ready,) = of_type(done.records, "tuner_ready")
    found: dict[str, Any] = ready["device"]
    return found


def bench(folder: Path, date: str, faults: Mapping[str, Any] | None = None) -> Bench:
    return Bench(folder, make_tree(folder, date, faults))


@pytest.mark.parametrize(
    ("date", "named"), [("runbook", ["asm_dir_symlink", "tile_column_case", "k_trim"]), ("newest", [])]
)
def test_the_record_of_the_start_names_the_workarounds_that_were_applied(
    tmp_path: Path, date: str, named: list[str]
) -> None:
    at = bench(tmp_path, date)
    proved = at.canary()
    assert proved.code == 0, proved.output
    assert "unproven: this torch has no matrix product" in proved.output, "the stand-in's"
    done = at.run(ONE, attempt="a2")
    assert [a["name"] for a in slot_of(done)["aiter"]["applied"]] == named


@pytest.mark.parametrize("date", DATES)
def test_a_group_on_every_date(tmp_path: Path, date: str) -> None:
    at = bench(tmp_path, date)
    done = at.run(THREE)
    assert done.code == 0, done.output
    assert set(done.tuned) == {1, 2, 3}
    for shape, row in done.tuned.items():
        assert row["errRatio"] <= 0.05
        assert row["tflops"] > 0
        rows = done.rows(shape)
        assert len(rows) == 10, "the candidates of one shape, each once"
        assert row["us"] == min(r["us"] for r in rows if r["status"] == "ok") > 0
    assert len(list((tmp_path / "node/attempts/a1").glob("aiter-*"))) == 1
    assert "building the modules" in done.output
    (built,) = at.folder.glob("cache/aiter/*/jit/*.so")
    own = tmp_path / "node/aiter/0/jit" / built.name
    assert own.is_file()
    assert not own.samefile(built), "modules are built once and never shared"
    shutil.rmtree(tmp_path / "node")
    again = at.run(ONE, attempt="a2")
    assert again.code == 0
    for once in ("building the modules", "start build"):
        assert once not in again.output, "once for each image"
    assert at.survivors() == []
    # the image's own tree was only read
    assert sorted(p.name for p in at.tree.root.glob("hsa/*")) == ["gfx950"]
    assert not list((at.tree.root / "aiter/jit").glob("*.so"))


@pytest.mark.parametrize("family", full_but(KINDS, "a8w8", "fmoe"))
def test_a_family_of_each_kind_of_script(tmp_path: Path, family: str) -> None:
    """a16w16 on the older date too, where its script is gradlib's wrapper."""
    found, key = FAMILIES[family], tiny_key(FAMILIES[family], "gfx950")
    for date in DATES if family == "a16w16" else ("newest",):
        done = bench(tmp_path / date, date).run([key, {**key, found.m_column: 128}], family)
        assert done.code == 0, (done.failed, done.ended, done.output)
        assert all(r["libtype"] for r in done.tuned.values())
        if family == "fmoe":
            assert (done.tuned[1]["kernelName2"][-7:], done.tuned[1]["err1"]) == ("_stage2", "0.0%")


@pytest.mark.parametrize("date", full_but(DATES, "newest"))
def test_a_fault_in_a_group_names_shape_and_candidate(tmp_path: Path, date: str) -> None:
    at = bench(tmp_path, date, fault("memory_fault"))
    done = at.run(THREE)
    assert (done.ended["outcome"], done.ended["in_flight"]) == ("fault", 2)
    for words in ("Memory access fault by GPU node-2", "kernelId=2 splitK=0"):
        assert words in done.ended["detail"]
    assert len(done.rows(2)) >= 2, "earlier measurements are kept"
    assert at.blocked == [], "no canary was asked, so nothing is known of the candidate"
    assert at.survivors() == []


@pytest.mark.parametrize(("date", "do"), full_but([("newest", "segv"), ("runbook", "hang")], ("newest", "segv")))
def test_alone_a_shape_keeps_its_other_candidates(tmp_path: Path, date: str, do: str) -> None:
    """And later the one that faulted is left out, of this shape, until it is known to have run elsewhere."""
    at, outcome = bench(tmp_path, date, fault(do)), "hang" if do == "hang" else "fault"
    done = at.run(ONE, watchdog_s=8 if do == "hang" else 30)
    assert done.code == 0, done.ended
    assert [(r["kernelId"], f"{outcome}: " in r["detail"]) for r in done.rows(1) if r["us"] < 0] == [(2, True)]
    (blocked,) = done.end(1)["withheld"]
    assert (blocked["candidate"][:2], blocked["outcome"], blocked["source"]) == (["2", "0"], outcome, "attempt")
    assert done.end(1)["candidate"][0] == str(done.tuned[1]["kernelId"]) != "2"
    (repro,) = at.folder.glob("node/attempts/a1/repro/*")
    assert (repro / "untuned.csv").read_text() == "M,N,K\n32,512,1024\n"
    again = at.run(THREE, attempt="a2")
    assert again.code == 0
    assert len(list((tmp_path / "node/attempts/a2").glob("aiter-*"))) == 1, "it is left out from the start"
    assert [[w["source"] for w in again.end(s).get("withheld", ())] for s in (1, 2, 3)] == [[], ["blocklist"], []]
    assert [len([r for r in again.rows(s) if r["us"] > 0]) for s in (1, 2, 3)] == [10, 9, 10]
    assert [r["detail"][:9] for r in again.rows(2) if r["us"] < 0] == ["left out:"]
    (at.tree.root / "faults.json").write_text("{}")
    said = {n: blocked[n] for n in ("key", "candidate", "slot")} | {"family": "a4w4_blockscale"}
    mended = at.run(ONE, attempt="a3", refuted=[said])
    assert "withheld" not in mended.end(1)
    assert len([r for r in mended.rows(1) if r["us"] > 0]) == 10


@pytest.mark.parametrize(
    ("do", "kernels", "outcome", "said"),
    [
        ("gpu_hang", (2,), "hang", "The driver says that the GPU hangs"),
        ("no_binary", (2,), "error", "A built module does not fit the image"),
        ("bad_image", "all", "error", "no candidate of the shape can run in this image"),
    ],
)
def test_a_hang_ends_at_its_line_and_an_image_condemns_neither_candidate_nor_shape(
    tmp_path: Path, do: str, kernels: Any, outcome: str, said: str
) -> None:
    """The watchdog would take a day."""
    at = bench(tmp_path, "newest", fault(do, kernels))
    done = at.run(THREE[:2], watchdog_s=86400)
    assert (done.ended["outcome"], done.ended["in_flight"]) == (outcome, 2), done.output
    assert said in done.ended["detail"]
    assert (set(done.failed), at.blocked, at.survivors()) == (set(), [], [])


def test_one_candidate_that_the_image_cannot_run_is_one_row(tmp_path: Path) -> None:
    done = bench(tmp_path, "newest", fault("bad_image")).run(ONE)
    assert (done.code, len(done.rows(1))) == (0, 10), done.output
    assert [r["kernelId"] for r in done.rows(1) if r["us"] < 0] == [2]


def test_only_the_kernels_of_a_table_are_measured_of_each_shape(tmp_path: Path) -> None:
    """A recheck of two shapes of a group; the third is tuned."""
    at = bench(tmp_path, "newest")
    rows = at.run(THREE).rows(1)
    first, third = (TableKernel(r["libtype"], str(r["kernelId"]), r["kernelName"], "0") for r in (rows[0], rows[4]))
    gone = TableKernel("asm", "3", "_ZN5aiter4goneE", "0")
    asked = {"1": [k._asdict() for k in (first, third, gone)], "2": [gone._asdict()]}
    done = at.run(THREE, attempt="a2", only=asked)
    assert done.ended["outcome"] == "done", done.output
    assert sorted(r["kernelName"] for r in done.rows(1)) == sorted((first.name, third.name))
    assert (set(done.tuned), done.failed[2][0], len(done.rows(3))) == ({1, 3}, "no_candidate", 10)


def test_a_bad_candidate_of_the_tiny_shape_does_not_condemn_the_slot(tmp_path: Path) -> None:
    """The first shape that an image ever measures builds its modules."""
    at = bench(tmp_path, "newest", fault("segv", M=64, N=512, K=512))
    done = at.run(ONE)
    assert done.code == 0, done.ended
    assert len([r for r in done.rows(1) if r["us"] > 0]) == 10
    assert at.blocked == [], "it is not a shape of the user"
    assert list(at.folder.glob("cache/aiter/*/repro/*/reproduce.sh"))


def test_a_batch_on_an_image_with_the_topk_fault_has_its_winners_made(tmp_path: Path) -> None:
    done = bench(tmp_path, "runbook", fault("wrong", "all", M=16)).run(THREE, options={"batch": 3})
    assert (set(done.tuned), set(done.failed)) == ({2, 3}, {1}), done.output
    assert "AITER named no winner" in done.tuned[3]["detail"]


@pytest.mark.parametrize("date", full_but(DATES, "runbook"))
def test_k_that_is_no_multiple_of_256(tmp_path: Path, date: str) -> None:
    """On the runbook's image the scales are laid out wrongly; k_trim keeps the reference from an exception."""
    done = bench(tmp_path, date).run(mnk((64, 512, 29568), (64, 512, 1024)))
    good = date == "newest"
    assert set(done.tuned) == ({1, 2} if good else {2}), done.output
    if not good:
        reason, detail = done.failed[1]
        assert (reason, "K is not a multiple of 256" in detail) == ("wrong_result", True)


def test_an_aiter_outside_of_the_promise_is_tuned_with_a_warning_if_the_shim_fits(tmp_path: Path) -> None:
    """An option that its script has not is left out, and said; a stale lock of a killed build is cleared."""
    at = bench(tmp_path, "runbook")
    core, pool = at.tree.root / "aiter/jit/core.py", at.tree.root / "aiter/utility/mp_tuner.py"
    core.write_text(core.read_text().replace("model_configs", "configs"))
    lock = tmp_path / "node/aiter/0/jit/build/lock_module_gemm_a4w4_blockscale_tune"
    lock.parent.mkdir(parents=True)
    lock.touch()
    done = at.run(ONE, options={"tuner_args": ["--libtype", "asm"]})
    assert done.code == 0, done.output
    for words in ("--tuner-arg --libtype is ignored", f"removed the stale lock {lock.name}"):
        assert words in done.output
    assert done.output.count("is not one that gemmfleet promises to drive") == 1
    assert "2025-11 to 2026-03" in slot_of(done)["aiter"]["warning"]
    pool.write_text(pool.read_text().replace("def worker(gpu_id, info,", "def worker(gpu_id, what,"))
    refused = at.run(ONE, attempt="a2")
    assert refused.failed[1][0] == "unsupported"
    assert "its candidates cannot be watched: its function worker takes no info" in refused.failed[1][1]


def test_a_family_that_needs_another_chip_or_script(tmp_path: Path) -> None:
    done = bench(tmp_path, "newest").run(ONE, env={"STANDIN_GFX": "gfx942"})
    assert done.failed[1] == ("unsupported", "a4w4_blockscale needs gfx950, and this is gfx942")
    old = bench(tmp_path / "old", "runbook").run(ONE, "batched_gemm_a8w8_blockscale_mxscale")
    assert "has no tuner script for batched_gemm_a8w8_blockscale_mxscale" in old.failed[1][1]


def test_what_breaks_before_the_first_shape_blames_the_start(tmp_path: Path) -> None:
    done = bench(tmp_path, "newest", {"start": "parent_segv"}).canary()
    assert done.code == 1
    for part in ("canary FAILED", "before the first shape, on a tiny one"):
        assert part in done.output


def test_a_row_of_another_chip_is_an_error(tmp_path: Path) -> None:
    """The probe and AITER must see the same device."""
    at = bench(tmp_path, "newest")
    path = at.tree.site / "torch/__init__.py"
    path.write_text(path.read_text().replace('os.environ.get("STANDIN_CU_NUM", "256")', '"128"'))
    done = at.run(ONE)
    assert (done.ended["outcome"], "cu_num 256" in done.ended["detail"]) == ("error", True)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_worker(tmp_path: Path, number: signal.Signals) -> None:
    at = bench(tmp_path, "runbook")
    words, env, null = at.words(THREE), at.env(STANDIN_PACE_S="0.2"), subprocess.DEVNULL
    with subprocess.Popen(words, env=env, cwd=ROOT, stdout=null, stderr=null) as proc:
        journal = tmp_path / "node/attempts/a1/aiter-1/candidates.jsonl"
        wait_until(lambda: journal.exists() and journal.stat().st_size > 200, "candidates are measured")
        proc.send_signal(number)
        assert proc.wait(PATIENCE_S) == (130 if number == signal.SIGINT else -number)
    wait_until(lambda: at.survivors() == [], "no process of AITER is left")
    if number == signal.SIGINT:
        log = (tmp_path / "node/attempts/a1/aiter-1/tuner.log").read_text()
        assert "interrupted by user, tuning stopped" in log, "SIGINT came first"
