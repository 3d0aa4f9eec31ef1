"""AITER's own tuner scripts of two dates, driven by gemmfleet on a CPU with faults planted among their candidates.

The tree is AITER's and stays as it is: package, builder, comparison, lookups, tuner base, scripts (fakes/__init__.py
says what is not). Two dates: one whose pool waits for ever for a process that died, and the newest. Kernels compute for
real, so right and wrong are the comparison's own finding.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.families import get_family
from tests.aiter.checkout import needs_checkout
from tests.aiter.driven import ENDS, FAR, HURT, NONE, OFF, PARTIAL, REFUSED, WRONG, Driven, drive, make
from tests.aiter.lookups import MARK

pytestmark = [needs_checkout, pytest.mark.timeout(3600)]

VERSIONS = ("v0.1.9", "e4048607a5")
"""One of each range that is promised."""
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


def of(*families: str) -> pytest.MarkDecorator:
    runs = [(v, f) for f in families for v in VERSIONS]
    return pytest.mark.parametrize("ran", runs, indirect=True, ids=lambda p: "-".join(p))


@of("a4w4_blockscale")
def test_each_shape_ends_as_its_kernels_did(ran: Driven) -> None:
    """A candidate that ends its process costs itself alone, and leaves a reproduction; wrong values never win."""
    assert {r["M"]: r["reason"] for r in ran.rows("failed.csv")} == {
        str(WRONG): "wrong_result", str(NONE): "no_candidate",
    }, ran.said[-3000:]  # fmt: skip
    (winner,) = ran.rows("tuned.csv")
    every = ran.candidates()
    right = [r for r in every if r["status"] == "ok"]
    assert (winner["M"], float(winner["us"])) == (str(HURT), min(float(r["us"]) for r in right))
    hurt = {number: row for number in (*ENDS, OFF, FAR, REFUSED, PARTIAL) for row in ran.candidates(number)}
    for number, word in ENDS.items():
        assert (hurt[number]["status"], word in hurt[number]["detail"]) == ("error", True)
    for number in (OFF, FAR):
        assert hurt[number]["status"] == "wrong", hurt[number]
    # before v0.1.15 half an output is compared with whatever the memory held; an exception is inf until 2025-12-30
    assert hurt[PARTIAL]["status"] in (("wrong",) if ran.version != "v0.1.9" else ("wrong", "ok"))
    assert hurt[REFUSED]["status"] == ("unsupported" if ran.version != "v0.1.9" else "error")
    others = [r for r in every if r not in hurt.values()]
    assert len(others) >= 12
    assert {r["status"] for r in others} == {"ok"}
    assert len({p.parent.name for p in ran.run.rglob("repro/*/reproduce.sh")}) == len(ENDS)


@of("a16w16")
def test_a16w16_falls_back_on_torch_where_that_is_a_candidate(ran: Driven) -> None:
    winners = {r["M"]: r["kernelName"] for r in ran.rows("tuned.csv")}
    reasons = {r["M"]: r["reason"] for r in ran.rows("failed.csv")}
    assert str(HURT) in winners, ran.said[-3000:]
    if ran.version == "v0.1.9":
        assert reasons == {str(WRONG): "wrong_result", str(NONE): "no_candidate"}
    else:
        assert (winners[str(WRONG)], winners[str(NONE)]) == ("native", "native")
    # not each number has a kernel without split K
    assert {r["status"] for n in ENDS for r in ran.candidates(n)} == {"error"}
    assert {r["status"] for n in (OFF, FAR) for r in ran.candidates(n)} == {"wrong"}


@of("a4w4_blockscale", "a16w16")
def test_aiter_s_own_lookup_finds_the_winner_and_the_tree_was_not_changed(ran: Driven, tmp_path: Path) -> None:
    fresh, _ = make(tmp_path, ran.version)
    for path in (p for p in fresh.rglob("*") if p.suffix in (".py", ".csv", ".h", ".json") and p.is_file()):
        assert path.read_bytes() == (ran.root / path.relative_to(fresh)).read_bytes(), path
    rows = ran.rows("tuned.csv")
    env = {
        **os.environ, "REAL_AITER_ROOT": str(ran.root), "AITER_JIT_DIR": str(tmp_path),
        get_family(ran.family).env: str(ran.run / "tuned.csv"),
    }  # fmt: skip
    script, asked = Path(__file__).with_name("lookups.py"), [{"family": ran.family, "key": r} for r in rows]
    argv = [str(ran.python), str(script), json.dumps(asked)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=600)
    answers = json.loads(next(x for x in done.stdout.splitlines() if x.startswith(MARK)).removeprefix(MARK))
    for row, found in zip(rows, answers, strict=True):
        assert found is not None, done.stderr[-2000:]
        assert (float(found["us"]), found["kernelName"]) == (float(row["us"]), row["kernelName"])
