"""The page as text: nothing in it can end a script or send a request, and it is never too large."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.errors import InputError
from orchestrator.report import page
from orchestrator.report.collector import Collector
from orchestrator.report.page import embedded, fit, fitted, render_page, run_or_folder, safe, write_report
from tests.paths import ROOT
from tests.support.report_kit import empty_run, simulated_run

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><!--&amp;\u2028\u202eevil\x1b[31m\x00\ud800"
STYLE = (ROOT / "templates" / "report" / "style.css").read_text()


class Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self._in = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = dict(attrs).get("id") or tag if tag in ("script", "style") else ""

    def handle_data(self, data: str) -> None:
        if self._in:
            self.text[self._in] = self.text.get(self._in, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._in = ""


def seen(page: str) -> Seen:
    out = Seen()
    out.feed(page)
    return out


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
    found = seen(page)
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
        found = seen(render_page(fit(document), events=events))
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


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast(theme: int) -> None:
    """WCAG 2: 4.5 for text, 3 for what is drawn."""
    pairs = dict(re.findall(r"--([\w-]+): light-dark\(([^)]+)\)", STYLE))
    colour = {name: pair.split(", ")[theme] for name, pair in pairs.items()}
    for ground in ("page", "card", "soft"):
        for text in ("ink", "dim", "accent", "good", "bad", "warn"):
            assert contrast(colour[text], colour[ground]) >= 4.5, (text, ground)
    for ground in ("page", "card"):
        for drawn in (f"c{i}" for i in range(8)):
            assert contrast(colour[drawn], colour[ground]) >= 3.0, (drawn, ground)
    assert contrast(colour["page"], colour["ink"]) >= 7.0


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_command_writes_into_the_run_and_replaces_only_its_own(tmp_path: Path) -> None:
    paths, _ = empty_run(tmp_path / "runs", 3)
    runner = CliRunner()
    for _ in range(2):
        out = runner.invoke(app, ["report", "--runs", str(tmp_path / "runs"), "--json"], catch_exceptions=False)
        told = json.loads(out.stdout)
        assert told["file"] == str(paths.root / "report.html")
        assert told["bytes"] == (paths.root / "report.html").stat().st_size
    other = tmp_path / "mine.html"
    other.write_text("<p>mine</p>")
    with pytest.raises(InputError, match="no page of ours"):
        write_report(paths, other)
    assert other.read_text() == "<p>mine</p>"
    with pytest.raises(InputError, match="there is no folder"):
        write_report(paths, tmp_path / "nowhere" / "x.html")


def test_a_run_by_id_by_folder_and_none(tmp_path: Path) -> None:
    paths, _ = empty_run(tmp_path / "runs", 3)
    assert run_or_folder(tmp_path / "runs", paths.run[:9]).root == paths.root
    assert run_or_folder(tmp_path, str(paths.root)).root == paths.root
    with pytest.raises(InputError, match="no run folder"):
        run_or_folder(tmp_path, str(tmp_path))
    with pytest.raises(InputError, match="there is no run"):
        run_or_folder(tmp_path / "runs", "2027")
