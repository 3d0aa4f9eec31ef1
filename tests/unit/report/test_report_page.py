"""The page as text: nothing in it can end a script or send a request, and it is never too large."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest

from orchestrator.report import page
from orchestrator.report.collector import Collector
from orchestrator.report.page import embedded, fit, render_page
from tests.support.command import command
from tests.support.report_kit import empty_run, simulated_run

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
        (paths.run, "mine.html", "no page of ours"), (paths.run, "nowhere/x.html", "there is no folder"),
        (str(tmp_path), "x.html", "there is no run"), ("2027", "x.html", "there is no run"),
    ):  # fmt: skip
        done = command("report", run, "-o", str(tmp_path / out), "--runs", str(tmp_path / "runs"))
        assert (done.code, why in done.err) == (2, True), done.err
    assert (tmp_path / "mine.html").read_text() == "<p>mine</p>"
