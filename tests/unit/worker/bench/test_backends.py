"""Backends in their processes on this CPU: torch for real, AITER's entry points as stand-ins of two dates."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.bench.request import config_sets, gluon_files
from tests.paths import TEST_DATA
from tests.standins.aiter.config_files import tree, values, winners
from tests.standins.aiter.operators import flat_gluon, make_operators
from tests.support.files import write_files, write_program
from worker.aiter_tree.locate import tree_at
from worker.bench.child import BackendServer
from worker.bench.config_set import tree_with_configs
from worker.bench.rocprof import CALLS, WARMUP, per_call_us
from worker.bench.runner import BackendRunner
from worker.protocol.bench import BenchOptions, RunRule, Side, draw_rounds, mean_of_runs, needs_more_runs
from worker.triton_configs.kinds import BY_NAME
from worker.triton_configs.resolve import Resolver
from worker.tuners.common.helper_process import HelperError, HelperRefused

QUICK = {"sample_s": 0.02, "rotate_mb": 1}
KEYS: dict[str, dict[str, int | str]] = {
    "a16w16": {"M": 24, "N": 48, "K": 64, "bias": "True", "dtype": "torch.bfloat16", "outdtype": "torch.bfloat16"},
    "a8w8": {"M": 24, "N": 48, "K": 64, "q_dtype_w": "torch.int8"},
    "a8w8_blockscale": {"M": 24, "N": 160, "K": 192},
    "a8w8_blockscale_bpreshuffle": {"M": 24, "N": 160, "K": 192},
    "a4w4_blockscale": {"M": 24, "N": 48, "K": 64},
    "batched_bf16": {"B": 3, "M": 8, "N": 16, "K": 64},
    "batched_a8w8": {"B": 3, "M": 8, "N": 16, "K": 64},
}


class Stage:
    """Makes backends inside this process, which is quick."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.patch = monkeypatch
        self.facts: dict[str, Any] = {}

    def inside(self, backend: str, root: Path | None = None, **raw: Any) -> BackendServer:
        """A backend that was loaded here. Raises HelperRefused."""
        self.close()
        self.patch.setenv("GEMMFLEET_AITER_ROOT", str(root or ""))
        self.patch.chdir(self.folder)
        child = BackendServer(backend, BenchOptions.parse({**QUICK, **raw}), lambda message: None)
        answer = child.start()
        if answer["is"] != "ready":
            raise HelperRefused("unavailable", answer["detail"])
        self.facts = answer["facts"]
        return child

    def prepare(self, who: BackendServer, family: str) -> dict[str, Any]:
        answer = who.execute({"do": "prepare", "family": family, "key": KEYS[family], "err_ratio": 0.05})
        if answer["is"] == "refused":
            raise HelperRefused(answer["status"], answer["detail"])
        return answer

    def refused(self, who: BackendServer, family: str, says: str) -> str:
        """The status of a backend that refuses a family for this reason."""
        with pytest.raises(HelperError, match=says) as e:
            self.prepare(who, family)
        return e.value.status

    def close(self) -> None:
        """The AITER of before is no longer imported here."""
        for name in [n for n in sys.modules if n.partition(".")[0] == "aiter"]:
            del sys.modules[name]
        sys.path[:] = [p for p in sys.path if not p.startswith(str(self.folder))]
        importlib.invalidate_caches()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    made = Stage(tmp_path, monkeypatch)
    yield made
    made.close()


def test_torch_is_right_and_timed_in_every_format_that_it_has_here(stage: Stage) -> None:
    torch = stage.inside("torch")
    for family, op in (("a16w16", "addmm"), ("a8w8", "int_mm"), ("batched_bf16", "bmm")):
        found = stage.prepare(torch, family)
        assert (found["op"], found["status"], found["err"]) == (op, "ok", 0.0)
        assert torch.execute({"do": "sample"})["us"] > 0
    for family in ("a4w4_blockscale", "batched_a8w8", "a8w8_blockscale"):
        assert stage.refused(torch, family, ".") == "unsupported"


@pytest.mark.parametrize("date", ["old", "new"])
def test_aiters_triton_gemms_and_dispatch_by_either_date(stage: Stage, tmp_path: Path, date: str) -> None:
    """Old and new places, the output third or sixth, a bias between; an output whose rows are padded to 32."""
    root = make_operators(tmp_path / "tree", date)
    who = stage.inside("aiter-triton", root=root)
    assert stage.facts["aiter"]["root"] == str(root)
    for family in KEYS:
        found = stage.prepare(who, family)
        assert (found["status"], found["err"]) == ("ok", 0.0), family
        assert found["kernel"].startswith("aiter.ops.triton")
    shuffled = stage.prepare(who, "a8w8_blockscale_bpreshuffle")
    assert shuffled["op"] == "gemm_a8w8_blockscale" + ("_preshuffle" if date == "new" else "")
    ops = {}
    for name in ("bf16", "a8w8", "a8w8-prequant", "afp4wfp4", "a16wfp4"):
        found = stage.prepare(stage.inside(f"aiter-bmm-{name}", root=root), "batched_bf16")
        assert found["err"] == 0.0, name
        ops[name] = found["op"]
    assert ops["a16wfp4"] == ("batched_gemm_a16wfp4" if date == "new" else "batched_gemm_afp4wfp4_pre_quant")
    assert stage.refused(stage.inside("aiter-bmm-bf16", root=root), "a16w16", "column B") == "unsupported"
    who = stage.inside("aiter", root=root)
    assert [stage.prepare(who, f)["op"] for f in ("a4w4_blockscale", "a16w16")] == ["gemm_a4w4", "tgemm.mm"]


def test_gluon_is_there_or_says_why(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = stage.inside("aiter-gluon", root=make_operators(tmp_path / "new", "new"))
    assert stage.prepare(new, "a4w4_blockscale")["err"] == 0.0
    assert stage.refused(new, "a16w16", "no Gluon kernel for a16w16") == "unsupported"
    root = make_operators(tmp_path / "old", "old")
    old = stage.inside("aiter-gluon", root=root)
    assert stage.refused(old, "a4w4_blockscale", "no aiter/ops/triton/gluon/gemm_afp4wfp4.py") == "unavailable"
    # one from elsewhere is laid over a scratch copy, and the tree is left alone
    files = gluon_files(flat_gluon(tmp_path / "copied"))
    overlaid = stage.inside("aiter-gluon", root, gluon=files)
    assert stage.prepare(overlaid, "a4w4_blockscale")["err"] == 0.0
    assert set(stage.facts["gluon"]) == set(files)
    assert not [p for p in root.rglob("*") if "gluon" in p.parts]
    fresh = stage.inside("aiter-gluon", root=tmp_path / "new")
    monkeypatch.setenv("STANDIN_FAULT", "gluon:import")
    assert stage.refused(fresh, "a4w4_blockscale", "cannot import name 'gluon' from") == "unavailable"


@pytest.mark.full
def test_a_backend_that_hangs_is_a_row_and_the_next_shape_gets_a_fresh_process(tmp_path: Path) -> None:
    variables = {
        "GEMMFLEET_AITER_ROOT": str(make_operators(tmp_path / "tree", "new")),
        "STANDIN_FAULT": "gemm_a8w8:hang",
    }
    who = BackendRunner(Side(), "aiter-triton", tmp_path / "backend", BenchOptions.parse(QUICK), QUICK, variables)
    with contextlib.closing(who):
        # a process that is up: on a busy machine its start alone may take longer than the hang is given
        assert who.prepare("a16w16", KEYS["a16w16"], 0.05, 60.0, lambda: None)["status"] == "ok"
        with pytest.raises(HelperError, match="no sign of progress for 8 s") as e:
            who.prepare("a8w8", KEYS["a8w8"], 0.05, 8.0, lambda: None)
        assert e.value.status == "timeout"
        assert who.prepare("a16w16", KEYS["a16w16"], 0.05, 60.0, lambda: None)["status"] == "ok"


def test_what_raises_or_is_wrong_is_told_and_never_timed(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    who = stage.inside("aiter-triton", root=make_operators(tmp_path / "tree", "new"))
    monkeypatch.setenv("STANDIN_FAULT", "gemm_a8w8:raise")
    assert stage.refused(who, "a8w8", "invalid configuration argument") == "error"
    monkeypatch.setenv("STANDIN_FAULT", "gemm_a8w8:wrong")
    found = stage.prepare(who, "a8w8")
    assert (found["status"], found["err"] > 0.4) == ("wrong", True)
    assert who.execute({"do": "sample"})["is"] == "refused"
    assert stage.prepare(who, "a16w16")["status"] == "ok"
    with pytest.raises(HelperError, match="cannot be read") as e:
        stage.inside("aiter-triton", root=tmp_path / "none")
    assert e.value.status == "unavailable"


GEMM, REDUCE = "_gemm_afp4wfp4_kernel_BLOCK_SIZE_M_256.kd", "_gemm_afp4wfp4_reduce_kernel.kd"


@pytest.mark.parametrize(
    ("runs", "rule", "us", "status", "more"),
    [
        ([100.0, 104.0, 102.0], RunRule(), 102.0, "ok", False),
        ([97.4, 100.0, 102.6], RunRule(), 100.0, "unstable", True),
        ([100.0, 130.0, 101.0, 150.0, 102.0], RunRule(), 101.0, "ok", False),  # the three that agree best
        ([100.0, 100.0], RunRule(), 100.0, "short", True),
        ([7.0], RunRule(1, 0), 7.0, "ok", False),
    ],
)
def test_runs_that_agree_are_their_mean(runs: list[float], rule: RunRule, us: float, status: str, more: bool) -> None:
    found = mean_of_runs(runs, rule)
    assert (round(found.us, 6), found.status, found.taken) == (us, status, len(runs))
    assert needs_more_runs(runs, rule) is more


def test_rounds_are_drawn_anew_and_only_who_does_not_agree_runs_again_with_its_partner() -> None:
    steady, loose = [1.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]
    times = {"g:torch": steady, "t:torch": loose, "g:other": steady, "t:other": steady}
    taken: dict[str, list[float]] = {name: [] for name in times}
    orders = []
    for order in draw_rounds(taken, {name: name[2:] for name in times}, RunRule(), random.Random(0)):
        orders.append(tuple(order))
        for name in order:
            taken[name].append(times[name][len(taken[name])])
    assert [sorted(o) for o in orders] == [sorted(times)] * 3 + [["g:torch", "t:torch"]] * 2
    assert len(set(orders[:3])) > 1


TOOL = """#!{python}
import os, subprocess, sys
open("called", "w").close()  # the process that only checked called it too
subprocess.run(sys.argv[sys.argv.index("--") + 1:], check=True)
folder = sys.argv[sys.argv.index("-d") + 1]
os.makedirs(folder)
with open(folder + "/bench_kernel_trace.csv", "w") as out:
    out.write("Kernel_Name,Start_Timestamp,End_Timestamp\\n")
    for i, op in enumerate(open("called")):
        out.write(f"{{op.split()[0]}},{{i * 1000}},{{i * 1000 + (90 if i < {warmup} else 5)}}\\n")
"""


def test_as_many_calls_are_made_as_the_profiler_and_the_plain_mean_count(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators that write down each call; the profiler is a stand-in that reports what was called."""
    root = make_operators(tmp_path / "tree", "new")
    core = root / "aiter/_core.py"
    says = '    with open("called", "a") as f:\n        f.write(f"{op} {x.data_ptr()}\\n")\n    what = fault(op)\n'
    core.write_text(core.read_text().replace("    what = fault(op)\n", says))
    tool = write_program(tmp_path / "bin" / "rocprofv3", TOOL.format(python=sys.executable, warmup=WARMUP))
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    raw, variables = {**QUICK, "timer": "rocprof"}, {"GEMMFLEET_AITER_ROOT": str(root)}
    who = BackendRunner(Side(), "aiter-triton", tmp_path / "backend", BenchOptions.parse(raw), raw, variables)
    with contextlib.closing(who):
        who.prepare("a16w16", KEYS["a16w16"], 0.05, 60.0, lambda: None)
        found = who.sample(60.0, lambda: None)
    assert (found["us"], found["samples"], found["kernel"]) == (0.005, CALLS, "gemm_a16w16")

    plain = stage.inside("aiter-triton", root=root, warmup=2, iters=5)
    stage.prepare(plain, "a16w16")
    (tmp_path / "called").unlink()
    found = plain.execute({"do": "sample"})
    assert (found["is"], found["samples"], found["us"] > 0) == ("done", 5, True)
    calls = (tmp_path / "called").read_text().splitlines()
    assert (len(calls), len(set(calls))) == (2 + 1 + 5, 1), "on one set of operands; 1: a CPU's timer sets its threads"


def trace(folder: Path, text: str = "") -> Path:
    """A trace written by hand in the documented format with made-up times; none is from a run of ours."""
    (folder / "host" / "17").mkdir(parents=True)
    path = folder / "host" / "17" / "one_kernel_trace.csv"
    shutil.copy(TEST_DATA / "bench" / path.name, path)
    if text:
        path.write_text('"Kernel_Name","Start_Timestamp","End_Timestamp"\n' + text)
    return folder


def test_a_trace_leaves_the_warm_up_out_and_kernels_are_selected_by_name(tmp_path: Path) -> None:
    folder = trace(tmp_path)
    assert per_call_us(folder, "", 1, 2) == ((10 + 12 + 2 + 4) / 2, f"{GEMM} + {REDUCE}")
    assert per_call_us(folder, "reduce", 1, 2) == (3.0, REDUCE)
    fills = trace(tmp_path / "fills", "k,0,5\nk,5,10\n__amd_rocclr_fill,0,800\n__amd_rocclr_fill,800,1600\n")
    assert per_call_us(fills, "", 1, 1) == (0.005, "k"), "the runtime's own kernels count only if asked for"
    assert per_call_us(fills, "__amd_rocclr", 1, 1)[0] == pytest.approx(0.8)
    for pattern, warmup, says in (
        ("flash", 1, "no kernel matching 'flash' ran .* there were: .*_gemm_afp4wfp4_kernel"),
        ("", 3, "whole number of times in each of 5 calls"),
    ):
        with pytest.raises(HelperError, match=says):
            per_call_us(folder, pattern, warmup, 2)


def test_a_runs_winners_are_laid_into_the_trees_files(tmp_path: Path) -> None:
    default, name = "gfx950-GEMM-A16W16.json", "gfx950-GEMM-A16W16-N=256-K=1024.json"
    root = tree(tmp_path / "tree", {f"gemm/{default}": {"M_LEQ_64": values(32), "any": values(128)}})
    write_files(root, {"aiter/jit/core.py": ""})
    won = {name: {"M_LEQ_64": values(16)}, default: {"M_LEQ_64": values(8)}}
    run = winners(tmp_path / "run", won, [{"N": 256, "file": name}, {"file": default}])
    made = tree_with_configs(tree_at(root), config_sets([f"a={run}"])["a"], tmp_path / "copy")
    resolver = Resolver(made.root, "gfx950")
    found = [
        resolver.config_for(BY_NAME["a16w16"], m, n, 1024) for m, n in ((16, 256), (40, 256), (300, 256), (40, 99))
    ]
    assert [(c.path.name, c.values["BLOCK_SIZE_M"]) for c in found] == [
        (name, 32), (name, 16), (name, 128), (default, 8),
    ]  # fmt: skip
