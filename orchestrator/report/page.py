"""The report page: one HTML file that contains its style, script and data, and loads nothing from elsewhere.

Texts in the data come from nodes and files, so they may be hostile. The page has them twice: in HTML, where Jinja
escapes them, and in a JSON block, where `embedded` escapes every character that HTML could interpret. The script puts
them into the page as text, never as markup. A content security policy allows only this script and style, by hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.errors import InputError, OrchestratorError
from orchestrator.files.faults import escaped
from orchestrator.files.write import write_output
from orchestrator.pages import Document
from orchestrator.paths import RunPaths
from orchestrator.report.collector import Collector
from orchestrator.templating import data_folder, render

MAX_BYTES = 6_000_000
"""Largest size of a page. The longest texts are cut first, then rows of the table."""

SCRIPTS = ("base", "figures", "table", "charts", "fleet", "prose", "page")
"""Scripts of templates/report/, in their order."""
GENERATOR = "gemmfleet report"

_BUDGETS = ((50_000, 600), (50_000, 120), (20_000, 120), (10_000, 120), (5_000, 80), (2_000, 60), (500, 40))
"""Limits for rows of the table and characters of a text, tried one after the other."""
FAR_TOO_LARGE = 1.2
"""If the table alone is estimated to be this many times larger than its room, a budget is not tried."""
_SAMPLE = 500
"""The size of the table is estimated from this many rows."""
_PLAIN = frozenset((int, float, bool, type(None)))
_FRAME = 250_000
"""Room for everything in a page but its data."""


def render_page(document: Document, *, events: str = "") -> str:
    """The page of a document that `fit` has cut. `events`: the address from which a served page gets changes; "" for a
    file.

    Raises OrchestratorError if even the shortest page is too large, and TemplateError.
    """
    style = _asset("style.css")
    script = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    values = {
        "doc": safe({name: document[name] for name in ("run", "family", "tuner", "state", "sentences", "made")}),
        "data": embedded(document),
        "style": style,
        "script": script,
        "events": events,
        "generator": GENERATOR,
        "policy": security_policy(style, script, live=bool(events)),
    }
    page = render("report.html.j2", values)
    if len(page.encode()) > MAX_BYTES:
        run = escaped(str(document["run"]))
        raise OrchestratorError(f"the page of run {run} would be larger than {MAX_BYTES:,} bytes")
    return page


def fit(document: Document) -> Document:
    """Cut the document so that its page is small enough."""
    shapes = document["shapes"]
    room = MAX_BYTES - _FRAME
    sample = shapes[:: len(shapes) // _SAMPLE + 1]
    for rows, characters in _BUDGETS:
        row_bytes = len(embedded(_cut(sample, characters))) / (len(sample) or 1)
        is_last = (rows, characters) == _BUDGETS[-1]
        if not is_last and min(rows, len(shapes)) * row_bytes > FAR_TOO_LARGE * room:
            continue
        cut = cut_document(document, rows, characters)
        if len(embedded(cut)) <= room:
            break
    return cut


def security_policy(style: str, script: str, *, live: bool) -> str:
    """The content security policy: it allows this style and script, and on a live page the events of its server."""
    parts = [
        "default-src 'none'",
        f"script-src 'sha256-{_hash(script)}'",
        f"style-src 'sha256-{_hash(style)}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    if live:
        parts.append("connect-src 'self'")
    return "; ".join(parts)


def embedded(value: Any) -> str:
    """JSON for a script block: ASCII without <, > and &, so that the data cannot end the block or begin another."""
    text = json.dumps(safe(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def safe(value: Any) -> Any:
    """The value with control, bidi and broken characters in every text written as \\x1b and the like."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, dict):
        return {escaped(str(k)): safe(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [v if type(v) in _PLAIN else safe(v) for v in value]
    return value


def cut_document(document: Document, rows: int, characters: int) -> Document:
    """The document with at most `rows` rows in the table and `characters` characters in a text. Failed shapes are cut
    last."""
    cut = dict(document)
    shapes = document["shapes"]
    if len(shapes) > rows:
        state = document["columns"]["row"].index("state")
        order = {"failed": 0, "running": 1, "tuned": 2}
        by_interest = sorted(range(len(shapes)), key=lambda i: (order.get(shapes[i][state], 3), i))
        cut["shapes"] = [shapes[i] for i in sorted(by_interest[:rows])]
        cut["left_out"] = len(shapes) - rows
    for part in ("shapes", "fleet", "failures", "incidents", "origin"):
        cut[part] = _cut(cut[part], characters)
    return cut


def _cut(value: Any, characters: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= characters else value[: characters - 3] + "..."
    if isinstance(value, dict):
        return {k: _cut(v, characters) for k, v in value.items()}
    if isinstance(value, list):
        return [v if type(v) in _PLAIN else _cut(v, characters) for v in value]
    return value


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    return (data_folder("templates") / "report" / name).read_text(encoding="utf-8").strip()


_HEAD_CHARACTERS = 2000
"""The generator's meta tag of report.html.j2 must be within these, because a page of ours is known by it."""


def write_report(paths: RunPaths, out: Path | None) -> tuple[Path, Document]:
    """Write the page of a run, by default into its folder; return its path and its document.

    Raises InputError, LedgerError, TemplateError, and OrchestratorError if the page would be too large.
    """
    target = out or paths.root / "report.html"
    if target.is_dir():
        target = target / f"{paths.run}.html"
    _refuse_foreign(target)
    document = fit(Collector(paths).document())
    write_output(target, render_page(document), "; name another place with -o")
    return target, document


def _refuse_foreign(target: Path) -> None:
    """Raise InputError if the target exists and is not a page of ours."""
    if not target.exists():
        if not target.parent.is_dir():
            raise InputError(f"{target}: there is no folder {target.parent}; make it first")
        return
    if not target.is_file():
        raise InputError(f"{target} is not a file; name another place with -o")
    with target.open("rb") as f:
        head = f.read(_HEAD_CHARACTERS)
    if f'content="{GENERATOR}"'.encode() not in head:
        raise InputError(
            f"{target} exists and is not one of our pages, so we leave it alone; name another place with -o"
        )
