"""The page: its document agrees with the ledger; nothing in it ends a script or sends a request; never too large."""

from __future__ import annotations

import copy
import html
import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.ledger.reader import LedgerReader
from orchestrator.ledger.writer import Ledger
from orchestrator.report import page
from orchestrator.report.collector import Collector
from orchestrator.report.live import changes
from orchestrator.report.page import embedded, fit, render_page
from tests.kits.fleet import command
from tests.kits.results import BEGAN, FP8, MODEL_FAMILY, empty_run, fill_ledger, plan_with_faults, simulated_run
from tests.simulator.simulator import Simulator

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><!--&amp;\u2028\u202eevil\x1b[31m\x00\ud800"


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return Collector(simulated_run(tmp_path_factory.mktemp("runs"), 60)).document()


def test_embedded_data_is_ascii_without_markup() -> None:
    text = embedded({"a": HOSTILE, HOSTILE: [1.5, None, "\u2029"]})
    assert text.isascii()
    assert not set("<>&") & set(text)
    with pytest.raises(ValueError, match="JSON"):
        embedded(float("nan"))


@pytest.mark.parametrize("events", ["", "events?from=1"])
def test_the_policy_allows_this_script_and_style_only(document: dict[str, Any], events: str) -> None:
    """That the hashes are right shows in a browser (tests/integration/test_report_page.py)."""
    page = html.unescape(render_page(fit(document), events=events))
    policy = page.partition('http-equiv="Content-Security-Policy" content="')[2].partition('">')[0]
    assert policy.startswith("default-src 'none'; ")
    assert ("connect-src 'self'" in policy, "unsafe" in policy) == (bool(events), False)


def test_a_page_that_would_be_too_large_is_cut_and_failures_stay(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "MAX_BYTES", 1_000_000)
    at = {name: i for i, name in enumerate(document["columns"]["row"])}
    tuned = next(r for r in document["shapes"] if r[at["state"]] == "tuned")
    failed = next(r for r in document["shapes"] if r[at["state"]] == "failed")
    rows = [[i, *(failed if i % 100 == 0 else tuned)[1:]] for i in range(1, 10_001)]
    for row in rows:
        row[at["kernel"]] = "k" * 300
    large = fit(document | {"shapes": rows})
    assert len(render_page(large).encode()) <= 1_000_000
    assert large["left_out"] == 10_000 - len(large["shapes"])
    assert sum(r[at["state"]] == "failed" for r in large["shapes"]) == 100


def test_the_page_goes_into_the_run_by_id_or_folder_and_replaces_only_its_own(tmp_path: Path) -> None:
    paths, _ = empty_run(tmp_path / "runs", 3)
    for given in ([], [paths.run[:9]], [str(paths.root)]):
        told = command("report", *given, "--runs", str(tmp_path / "runs"), "--json").json()
        assert told["file"] == str(paths.root / "report.html")
        assert told["bytes"] == (paths.root / "report.html").stat().st_size
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    for run, out, why in (
        (paths.run, "mine.html", "not one of our pages"), (paths.run, "nowhere/x.html", "there is no folder"),
        (str(tmp_path), "x.html", "there is no run"), ("2027", "x.html", "there is no run"),
    ):  # fmt: skip
        done = command("report", run, "-o", str(tmp_path / out), "--runs", str(tmp_path / "runs"))
        assert (done.code, why in done.err) == (2, True), done.err
    assert (tmp_path / "mine.html").read_text() == "<p>mine</p>"


def column(document: dict[str, Any], name: str) -> list[Any]:
    at = document["columns"]["row"].index(name)
    return [row[at] for row in document["shapes"]]


def test_it_agrees_with_the_ledger(tmp_path: Path) -> None:
    run = simulated_run(tmp_path, 120)
    document = Collector(run).document()
    with LedgerReader.open_readonly(run.ledger) as ledger:
        counts, winners = ledger.counts(), {w.shape: w.kernel_name for w in ledger.winners()}
        failed, failures = {f.id: f.reason for f in ledger.failed()}, ledger.failures()
        attempts = sum(a.started_at is not None for a in ledger.replayed.attempts.values())
    assert document["counts"] == counts.to_json()
    assert (counts.tuned > 100, counts.failed > 3) == (True, True)
    ids = column(document, "id")
    assert ids == list(range(1, 121))
    assert {i: k for i, k in zip(ids, column(document, "kernel"), strict=True) if k} == winners
    assert {i: r for i, r in zip(ids, column(document, "reason"), strict=True) if r} == failed
    assert {f["reason"]: f["count"] for f in document["failures"]} == failures
    assert all(f["advice"] for f in document["failures"])
    assert all(s["story"] for f in document["failures"] for s in f["shapes"] if not s["verdict"])
    assert sum(len(segments) for _, _, segments in document["fleet"]["lanes"]) == attempts
    assert f"{counts.tuned} tuned, {counts.failed} failed" in document["sentences"][1]
    json.dumps(document, allow_nan=False)
    for (m, n, k), t, rate in zip(*(column(document, name) for name in ("key", "us", "tflops")), strict=True):
        assert not t or rate == pytest.approx(2 * m * n * k / t / 1e6, rel=1e-3)
    assert all(0 < s < 1 for s in column(document, "share") if s), "no rate is above its roof"


def changed(old: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The document after a change, as the page's script applies it."""
    new: dict[str, Any] = change.get("full") or copy.deepcopy(old) | change["parts"]
    for i, row in change.get("rows", ()):
        new["shapes"][i] = row
    return new


def test_read_as_it_grew_it_is_what_it_is_at_once_and_its_changes_are_small(tmp_path: Path) -> None:
    paths, asked = empty_run(tmp_path / "grown", 48)
    growing = Collector(paths)
    old = growing.document()
    assert (old["state"], old["counts"]["pending"], old["noise"]["spread"]) == ("planned", 48, {"n": 0})
    assert old["fleet"]["lanes"] == old["failures"] == old["backends"] == old["gpus"] == []
    assert changes(None, old) == {"full": old}
    simulator = Simulator(plan_with_faults(48))
    simulator.run()
    partial = 0
    with Ledger.open(paths.ledger) as ledger:
        for i in range(0, len(simulator.journal), 40):
            fill_ledger(ledger, simulator.journal[i : i + 40], asked)
            new = growing.document()
            change = changes(old, new)
            assert changed(old, change) == new
            partial += "rows" in change and len(change["rows"]) < 48
            old = new
        with ledger.transaction():
            ledger.set_meta("state", "finished")
            ledger.set_meta("ended", BEGAN + simulator.now)
    assert partial > 3
    one, other = growing.document(), Collector(paths).document()
    assert one | {"made": ""} == other | {"made": ""}


def test_the_previous_table_by_the_merge_and_by_itself(tmp_path: Path) -> None:
    table = tmp_path / "tuned.csv"
    key = "gfx950,256,1,1280,8192,torch.float8_e4m3fn"
    table.write_text(",".join(MODEL_FAMILY.tuned_header) + f"\n{key},ck,7,0,100.0,a8w8_old,1,1,0.0\n")
    paths = simulated_run(tmp_path / "runs", 24, db=str(table))
    at = Collector(paths).document()
    assert (at["earlier"]["n"], column(at, "old_us")[0]) == (1, 100.0)
    names = ("gfx", "cu_num", *MODEL_FAMILY.key_names)
    row = {"action": "replaced", "key": dict(zip(names, ("gfx950", 256, 1, 1280, 8192, FP8), strict=True))}
    paths.merge.write_text(json.dumps({"path": "t.csv", "rows": [row | {"old_us": 50.0, "new_us": 6.0}]}))
    merged = Collector(paths).document()
    assert (merged["earlier"]["counts"], column(merged, "old_us")[0]) == ({"replaced": 1}, 50.0)
    for text in ("", "[]", '{"rows": [{}]}', '{"rows": 5}', '{"rows": [{"key": 1, "action": 2}]}'):
        paths.merge.write_text(text)
        assert "merge.json cannot be read" in Collector(paths).document()["earlier"]["note"]
