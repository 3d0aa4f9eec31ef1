"""The page as text: nothing in it can end a script or send a request, and it is never too large."""

from __future__ import annotations

import base64
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from orchestrator.report import page
from orchestrator.report.collector import Collector
from orchestrator.report.page import embedded, fit, fitted, render_page, safe
from tests.support.command import command
from tests.support.report_kit import empty_run, simulated_run

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><!--&amp;\u2028\u202eevil\x1b[31m\x00\ud800"


class Seen(HTMLParser):
    """A page as a browser reads it: its tags, and the text of scripts and styles by id or tag."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self._in = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = dict(attrs).get("id") or tag if tag in ("script", "style") else ""

    def handle_data(self, data: str) -> None:
        self.text[self._in] = self.text.get(self._in, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._in = ""


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return Collector(simulated_run(tmp_path_factory.mktemp("runs"), 60)).document()


def spoiled(value: Any) -> Any:
    """Every text of a document made hostile."""
    if isinstance(value, str):
        return value + HOSTILE
    if isinstance(value, dict):
        return {k: spoiled(v) for k, v in value.items()}
    return [spoiled(v) for v in value] if isinstance(value, list) else value


def test_hostile_text_stays_text(document: dict[str, Any]) -> None:
    hostile = spoiled(document) | {"columns": document["columns"]}
    page = render_page(fitted(hostile, 1000, 10_000))
    found = Seen(page)
    assert [t for t, _ in found.tags if t in ("img", "iframe", "object")] == []
    assert sum(t == "script" for t, _ in found.tags) == 2
    assert json.loads(found.text["data"]) == safe(fitted(hostile, 1000, 10_000))
    for bad in ("\u2028", "\u202e", "\x1b", "\x00", "\ud800"):
        assert bad not in page


def test_embedded_data_is_ascii_without_markup() -> None:
    text = embedded({"a": HOSTILE, HOSTILE: [1.5, None, "\u2029"]})
    assert text.isascii()
    assert not set("<>&") & set(text)
    with pytest.raises(ValueError, match="JSON"):
        embedded(float("nan"))


def test_the_policy_allows_this_script_and_style_only(document: dict[str, Any]) -> None:
    for events in ("", "events?from=1"):
        found = Seen(render_page(fit(document), events=events))
        policy = next(a["content"] for t, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
        assert policy is not None
        assert policy.startswith("default-src 'none'; ")
        assert ("connect-src 'self'" in policy) == bool(events)
        for kind in ("script", "style"):
            digest = base64.b64encode(hashlib.sha256(found.text[kind].encode()).digest()).decode()
            assert f"{kind}-src 'sha256-{digest}'" in policy
        assert "unsafe" not in policy
        assert [a for _, a in found.tags if any(n.startswith("on") or n == "style" for n in a)] == []
        links = [a.get("src") or a.get("href") or "" for _, a in found.tags]
        assert [u for u in links if u and not u.startswith(("#", "data:"))] == []


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
        (str(tmp_path), "x.html", "no run folder"), ("2027", "x.html", "there is no run"),
    ):  # fmt: skip
        done = command("report", run, "-o", str(tmp_path / out), "--runs", str(tmp_path / "runs"))
        assert (done.code, why in done.err) == (2, True), done.err
    assert (tmp_path / "mine.html").read_text() == "<p>mine</p>"
