"""Messages to a served page, and the clients that get them."""

from __future__ import annotations

import asyncio
import copy
import itertools
from pathlib import Path
from typing import Any

import pytest

from orchestrator.ledger import Ledger
from orchestrator.report.collector import Collector
from orchestrator.report.live import Guard, Message, Receive, Send, changes
from tests.simulator.simulator import Simulator
from tests.support import report_kit as kit
from tests.support.report_kit import empty_run


def applied(old: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return the document after a change, as the page's script applies it."""
    if "full" in change:
        return dict(change["full"])
    new: dict[str, Any] = copy.deepcopy(old) | change["parts"]
    for i, row in change["rows"]:
        new["shapes"][i] = row
    return new


def test_changes_applied_give_the_new_document(tmp_path: Path) -> None:
    paths, asked = empty_run(tmp_path, 48)
    collector = Collector(paths)
    documents = [collector.document()]
    simulator = Simulator(kit.plan(48))
    simulator.run()
    journal = simulator.journal
    with Ledger.open(paths.ledger) as ledger:
        for i in range(0, len(journal), 40):
            kit.fill(ledger, journal[i : i + 40], asked, {})
            documents.append(collector.document())
    partial = 0
    for old, new in itertools.pairwise(documents):
        change = changes(old, new)
        assert applied(old, change) == new
        if "rows" in change:
            partial += 1
            assert len(change["rows"]) < 48
    assert partial > 3
    assert changes(None, documents[0]) == {"full": documents[0]}
    assert changes(documents[-1], documents[-1]) == {"parts": {}, "rows": []}


class Inner:
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"the page"})


def ask(
    guard: Guard, path: str = "/", query: str = "", method: str = "GET", host: str = "127.0.0.1:8000", **headers: str
) -> tuple[int, dict[str, str]]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    given = [(b"host", host.encode())] + [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    scope = {"type": "http", "path": path, "query_string": query.encode(), "method": method, "headers": given}
    asyncio.run(guard(scope, receive, send))
    return sent[0]["status"], {k.decode(): v.decode() for k, v in sent[0]["headers"]}


def test_the_token_becomes_a_cookie_and_leaves_the_address() -> None:
    inner = Inner()
    guard = Guard(inner, 8000)
    status, headers = ask(guard, query=f"token={guard.token}")
    assert (status, headers["location"]) == (303, "/")
    name_value, *flags = headers["set-cookie"].split("; ")
    assert set(flags) == {"HttpOnly", "SameSite=Strict", "Path=/"}
    assert guard.token not in name_value
    assert inner.asked == []
    status, headers = ask(guard, cookie=f"other=1; {name_value}")
    assert status == 200
    assert headers["cache-control"] == "no-store"
    assert headers["referrer-policy"] == "no-referrer"
    assert ask(guard, path="/events", host="localhost:8000", cookie=name_value)[0] == 200
    assert inner.asked == ["/", "/events"]


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (403, {}),
        (403, {"query": "token="}),
        (403, {"query": "token=wrong"}),
        (403, {"query": "token=\u2603"}),
        (403, {"cookie": "gemmfleet_8000="}),
        (403, {"cookie": "gemmfleet_8000=wrong"}),
        (403, {"cookie": 'gemmfleet_8000="\\'}),
        (403, {"path": "/events", "query": "token=TOKEN"}),
        (421, {"host": "evil.example:8000", "query": "token=TOKEN"}),
        (421, {"host": "127.0.0.1", "query": "token=TOKEN"}),
        (421, {"host": "127.0.0.1:8001", "query": "token=TOKEN"}),
        (405, {"method": "POST", "query": "token=TOKEN"}),
        (405, {"method": "DELETE", "query": "token=TOKEN"}),
        (403, {"query": "token=TOKEN", "sec_fetch_site": "cross-site"}),
        (403, {"query": "token=TOKEN", "sec_fetch_site": "same-site"}),
    ],
)
def test_others_are_refused(status: int, request_: dict[str, str]) -> None:
    inner = Inner()
    guard = Guard(inner, 8000)
    given = {k: v.replace("TOKEN", guard.token) for k, v in request_.items()}
    got, headers = ask(guard, **given)
    assert got == status
    assert "set-cookie" not in headers
    assert inner.asked == []
