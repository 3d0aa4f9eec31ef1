"""AITER's own tuner scripts of three dates, driven by gemmfleet on a CPU with faults planted among their candidates.

The tree is AITER's and stays as it is: package, builder, comparison, lookups, tuner base, scripts (fakes/__init__.py
says what is not). Three dates: one whose pool waits for ever for a process that died, one that counts time-outs from
submission, the newest. Kernels compute for real, so right and wrong are the comparison's own finding.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.families import get_family
from tests.aiter import experts
from tests.aiter.checkout import needs_checkout, show
from tests.aiter.driven import DOES, ENDS, FAR, HURT, NONE, OFF, PARTIAL, REFUSED, WRONG, Driven, K, N, drive
from tests.aiter.lookups import MARK
from tests.aiter.realbase import FAKES, make

pytestmark = [needs_checkout, pytest.mark.timeout(3600)]

VERSIONS = ("v0.1.9", "e4048607a5")
"""One of each range that is promised."""
GEMMS = (
    "a4w4_blockscale", "a8w8", "a8w8_blockscale", "a8w8_bpreshuffle", "a8w8_blockscale_bpreshuffle", "batched_a8w8",
    "batched_bf16", "batched_gemm_a8w8_blockscale_mxscale",
)  # fmt: skip
"""Families whose candidates are all AITER's own kernels."""
ONLY = {"batched_gemm_a8w8_blockscale_mxscale": VERSIONS[-1:]}
"""Versions of a family that the older ones have no script of."""
FAMILIES = (*GEMMS, "a16w16", "fmoe")
AT_ONCE = int(os.environ.get("AITER_AT_ONCE", "8"))
"""Runs that go on beside each other: a hang is waited for, and AITER sleeps 3 s in every process."""
Name = tuple[str, str]


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Name, Future[Driven]]]:
    """Every run that a selected test asks for, begun."""
    specs = [i.callspec for i in request.session.items if getattr(i, "callspec", None) and i.module is request.module]  # type: ignore[attr-defined]
    wanted = dict.fromkeys(s.params["ran"] for s in specs if "ran" in s.params)
    pool = ThreadPoolExecutor(AT_ONCE)
    yield {(v, f): pool.submit(drive, v, f, tmp_path_factory.mktemp("real")) for v, f in wanted}
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def ran(request: pytest.FixtureRequest, running: dict[Name, Future[Driven]]) -> Driven:
    return running[request.param].result()


def of(*families: str, versions: tuple[str, ...] = VERSIONS) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "ran",
        [(v, f) for f in families for v in versions if v in ONLY.get(f, versions)],
        indirect=True,
        ids=lambda p: "-".join(p),
    )


def test_a_result_that_is_a_little_wrong_is_beyond_the_tolerance() -> None:
    """By the operands, the reference and the tolerances of the most lenient script, a8w8_blockscale's of v0.1.9."""
    torch = pytest.importorskip("torch")
    family = get_family("a8w8_blockscale")
    script = ast.parse(show("v0.1.9", family.aiter.scripts[0]))
    names: dict[str, Any] = {
        "torch": torch, "F": torch.nn.functional, "rearrange": fake("einops_").rearrange, "block_shape": (128, 128),
        "dtypes": SimpleNamespace(
            fp8=torch.float8_e4m3fn, bf16=torch.bfloat16, fp16=torch.float16, fp32=torch.float32
        ),
    }  # fmt: skip
    wanted = [n for n in script.body if isinstance(n, ast.FunctionDef) and n.name in ("generate_data", "run_torch")]
    exec(compile(ast.Module(list(wanted), []), "v0.1.9", "exec"), names)
    operands = names["generate_data"](HURT, N, K, 1, device="cpu")
    right = names["run_torch"](*operands[:4])
    off = (right.float() * fake("kernels").OFF).to(right.dtype)
    tuples = (n for n in ast.walk(script) if isinstance(n, ast.Tuple))
    ends = ([e.value for e in n.elts[-2:] if isinstance(e, ast.Constant)] for n in tuples)
    tolerances = [e for e in ends if len(e) == 2 and all(isinstance(v, float) for v in e)]
    assert tolerances
    for rtol, atol in tolerances:
        wrong = ~torch.isclose(right, off, rtol=rtol, atol=atol)
        assert float(wrong.float().mean()) > 2 * family.aiter.err_ratio, (rtol, atol)
    assert float((right - off).abs().max()) < 0.5 * float(right.abs().max()), "the comparison would raise"


def fake(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"fake_{name}", FAKES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@of(*GEMMS)
def test_each_shape_ends_as_its_kernels_did(ran: Driven) -> None:
    assert [r["M"] for r in ran.rows("tuned.csv")] == [str(HURT)], ran.said[-3000:]
    assert {r["M"]: r["reason"] for r in ran.rows("failed.csv")} == {
        str(WRONG): "wrong_result", str(NONE): "no_candidate",
    }, ran.said[-3000:]  # fmt: skip


@of(*GEMMS)
def test_a_candidate_that_ends_its_process_costs_itself_alone(ran: Driven) -> None:
    for number in ENDS:
        (row,) = ran.candidates(HURT, number)
        assert row["status"] == "error"
        assert re.search({"segv": "Segmentation", "memory_fault": "Memory access", "hang": "hang"}[DOES[number]],
                         row["detail"])  # fmt: skip
    hurt = [r for n in DOES for r in ran.candidates(HURT, n)]
    others = [r for r in ran.candidates(HURT) if r not in hurt]
    assert len(others) >= 12
    assert {r["status"] for r in others} == {"ok"}


@of(*GEMMS)
def test_wrong_values_are_told_as_such_and_never_win(ran: Driven) -> None:
    for number in (OFF, FAR):
        (row,) = ran.candidates(HURT, number)
        assert row["status"] == "wrong", row
    (half,) = ran.candidates(HURT, PARTIAL)
    fills_with_nan = ran.version == "e4048607a5"
    assert half["status"] in (("wrong",) if fills_with_nan else ("wrong", "ok"))  # as the memory was before
    assert {r["status"] for r in ran.candidates(WRONG)} == {"wrong"}
    (refused,) = ran.candidates(HURT, REFUSED)
    told_apart = ran.version != "v0.1.9"
    assert refused["status"] == ("unsupported" if told_apart else "error")
    assert {r["status"] for r in ran.candidates(NONE)} == {refused["status"]}


@of(*FAMILIES)
def test_the_winner_is_the_fastest_right_candidate(ran: Driven) -> None:
    for row in ran.rows("tuned.csv"):
        candidates = ran.candidates(int(row.get("M") or row["token"]))
        right = [r for r in candidates if r["status"] == "ok" and float(r["us"]) > 0]  # a stage alone has no time
        assert float(row["us"]) == min(float(r["us"]) for r in right)


@of("a16w16")
def test_a16w16_falls_back_on_torch_where_that_is_a_candidate(ran: Driven) -> None:
    winners = {r["M"]: r["kernelName"] for r in ran.rows("tuned.csv")}
    reasons = {r["M"]: r["reason"] for r in ran.rows("failed.csv")}
    assert str(HURT) in winners, ran.said[-3000:]
    if ran.version == "v0.1.9":
        assert reasons == {str(WRONG): "wrong_result", str(NONE): "no_candidate"}
    else:
        assert (winners[str(WRONG)], winners[str(NONE)]) == ("native", "native")
    ended = [r["status"] for n in ENDS for r in ran.candidates(HURT, n)]  # not each number has a kernel without split K
    assert ended
    assert set(ended) == {"error"}
    assert {r["status"] for n in (OFF, FAR) for r in ran.candidates(HURT, n)} == {"wrong"}


@of("fmoe")
def test_fmoe_tells_what_each_stage_s_kernel_did(ran: Driven) -> None:
    """The shape whose kernels are hurt keeps one of both stages in one; that in 4 bits has a pair for a winner."""
    tuned = {r["token"]: r for r in ran.rows("tuned.csv")}
    reasons = {r["token"]: r["reason"] for r in ran.rows("failed.csv")}
    ends = {str(WRONG): "wrong_result", str(NONE): "no_candidate"}
    if ran.version == "v0.1.9":  # whose wrapper of CK's first stage raises at every call
        ends[str(experts.PAIRS)] = "no_candidate"
    else:
        assert "MulABScaleShuffled" in tuned[str(experts.PAIRS)]["kernelName1"]
        assert "MulABScaleExpertWeightShuffled" in tuned[str(experts.PAIRS)]["kernelName2"]
        assert float(tuned[str(experts.PAIRS)]["us2"]) > 0
    assert reasons == ends, ran.said[-3000:]
    assert (tuned[str(HURT)]["run_1stage"], tuned[str(HURT)]["kernelName2"]) == ("1", "")
    whole = [r for r in ran.rows("profile.csv") if float(r["us"]) > 0]
    assert all(r["kernelName2"] or r["run_1stage"] == "1" for r in whole), "a stage's time is no time of its shape"
    words = {"segv": "Segmentation", "memory_fault": "Memory access", "hang": "hang"}
    for number in ENDS:
        (row,) = ran.candidates(HURT, number)
        assert row["status"] == "error"
        assert words[DOES[number]] in row["detail"], row
    for number in (OFF, FAR, PARTIAL):  # stage 2 adds into zeros, so that half an output is wrong at every date
        (row,) = ran.candidates(HURT, number)
        assert row["status"] == "wrong", row
    (refused,) = ran.candidates(HURT, REFUSED)
    assert refused["status"] == ("unsupported" if ran.version != "v0.1.9" else "error")
    assert {r["status"] for r in ran.candidates(WRONG)} <= {"wrong", "error"}
    assert {r["status"] for r in ran.candidates(NONE)} == {refused["status"]}


@of(*GEMMS, "fmoe")
def test_a_blocked_candidate_leaves_a_reproduction(ran: Driven) -> None:
    found = {p.parent.name for p in ran.run.rglob("repro/*/reproduce.sh")}
    assert len(found) == len(ENDS), found


@of(*FAMILIES)
def test_the_tree_was_not_changed(ran: Driven, tmp_path: Path) -> None:
    fresh = make(tmp_path, ran.version).root
    for path in (p for p in fresh.rglob("*") if p.suffix in (".py", ".csv", ".h", ".json") and p.is_file()):
        assert path.read_bytes() == (ran.tree.root / path.relative_to(fresh)).read_bytes(), path


@of(*FAMILIES)
def test_aiter_s_own_lookup_finds_the_winner(ran: Driven, tmp_path: Path) -> None:
    family = get_family(ran.family)
    rows = ran.rows("tuned.csv")
    asked = [{"family": ran.family, "key": r} for r in rows]
    env = {
        **os.environ, "REAL_AITER_ROOT": str(ran.tree.root), "AITER_JIT_DIR": str(tmp_path),
        family.env: str(ran.run / "tuned.csv"),
    }  # fmt: skip
    script = Path(__file__).with_name("lookups.py")
    argv = [str(ran.tree.python), str(script), json.dumps(asked)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=600)
    answers = json.loads(next(x for x in done.stdout.splitlines() if x.startswith(MARK)).removeprefix(MARK))
    for row, found in zip(rows, answers, strict=True):
        assert found is not None, done.stderr[-2000:]
        if ran.family == "fmoe":
            assert found["block_m"] == row["block_m"]
            assert found["kernelName1"] == row["kernelName1"]
            assert found["kernelName2"] in (row["kernelName2"], "")  # both stages in one: nothing for the second
            continue
        assert float(found["us"]) == float(row["us"])
        assert found["kernelName"] == row["kernelName"]
