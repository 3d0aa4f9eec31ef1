"""The live page: real server, real browser, a ledger that grows meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.errors import LedgerError
from orchestrator.ledger.writer import Ledger
from orchestrator.paths import RunPaths, run_lock
from orchestrator.report.live import PageServer
from tests.integration.browser import chromium, missing
from tests.kits.fleet import command
from tests.kits.results import empty_run, fill_ledger, plan_with_faults, simulated_run
from tests.simulator.simulator import Simulator
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def serving(paths: RunPaths) -> Iterator[PageServer]:
    server = PageServer(paths)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(30.0)
        assert not thread.is_alive()


def get(url: str, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of the answer. `path`: URL for that of the address; TOKEN in it is the right one."""
    host, _, rest = url.removeprefix("http://").partition("/")
    path = f"/{rest}" if path == "URL" else path.replace("TOKEN", url.partition("token=")[2])
    connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
    try:
        connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


def test_only_who_was_given_the_address_gets_the_page(tmp_path: Path) -> None:
    paths = simulated_run(tmp_path, 12)
    before = paths.ledger.read_bytes()
    with serving(paths) as server:
        own = server.url.split("/")[2]
        name = f"gemmfleet_{own.partition(':')[2]}"
        for status, path, given in (
            (403, "/", {}), (403, "/?token=", {}), (403, "/?token=%E2%98%83", {}), (403, "/", {"Cookie": f"{name}="}),
            (403, "/", {"Cookie": f"{name}=wrong"}), (403, "/", {"Cookie": f'{name}="\\'}),
            (403, "/events?token=TOKEN", {}), (405, "/?token=TOKEN", {"method": "POST"}),
            (421, "/?token=TOKEN", {"Host": "evil.example"}), (421, "/?token=TOKEN", {"Host": "127.0.0.1:1"}),
            (403, "/?token=TOKEN", {"Sec_Fetch_Site": "cross-site"}),
            (403, "/?token=TOKEN", {"Sec_Fetch_Site": "same-site"}),
        ):  # fmt: skip
            got, headers, _ = get(server.url, path, **given)
            assert (got, "set-cookie" in headers) == (status, False), (path, given)
        status, headers, _ = get(server.url, "URL")
        assert (status, headers["location"]) == (303, "/")
        cookie, *flags = headers["set-cookie"].split("; ")
        assert set(flags) == {"HttpOnly", "SameSite=strict", "Path=/"}
        status, headers, page = get(server.url, Host=own.replace("127.0.0.1", "localhost"), Cookie=f"other=1; {cookie}")
        assert (status, headers["cache-control"], headers["referrer-policy"]) == (200, "no-store", "no-referrer")
        assert paths.run in page
        assert server.url.partition("token=")[2] not in f"{page} {cookie}"
        assert get(server.url, "/other", Cookie=cookie)[0] == 404
    assert paths.ledger.read_bytes() == before


def test_idle_connections_without_the_key_shut_nobody_out(tmp_path: Path) -> None:
    paths = simulated_run(tmp_path, 12)
    with serving(paths) as server, contextlib.ExitStack() as stack:
        own = server.url.split("/")[2]
        cookie = get(server.url, "URL")[1]["set-cookie"].split("; ")[0]
        page = http.client.HTTPConnection(own, timeout=PATIENCE_S)
        page.request("GET", "/events", headers={"Cookie": cookie})
        stream = page.getresponse()
        host, port = own.split(":")
        for _ in range(300):
            stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
        assert get(server.url, Cookie=cookie)[0] == 200
        assert stream.status == 200
        assert stream.readline()  # whoever has shown the key stays
        page.close()


def test_what_cannot_be_served_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, _ = empty_run(tmp_path, 3)
    command("report", "--live", "2027", "--runs", tmp_path).failed_with(2, "there is no run '2027'")
    with serving(paths) as server:
        port = server.url.split(":")[2].partition("/")[0]
        taken = command("report", "--live", "--port", port, "--runs", tmp_path)
        taken.failed_with(2, f"port {port} of this machine cannot be used")
    paths.ledger.write_bytes(b"no ledger")
    command("report", "--live", "--runs", tmp_path).failed_with(2, "is damaged, or not a ledger")
    with pytest.raises(LedgerError):
        PageServer(paths).run()
    paths, _ = empty_run(tmp_path / "good", 3)
    monkeypatch.setitem(sys.modules, "orchestrator.report.live", None)
    command("report", "--live", "--runs", tmp_path / "good").failed_with(2, "pip install '.[live]'")


def test_ctrl_c_ends_it_cleanly_also_with_a_page_open(tmp_path: Path) -> None:
    simulated_run(tmp_path, 12)
    argv = [sys.executable, "-u", "-m", "orchestrator", "report", "--live", "--runs", str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip().rpartition(" ")[2]
        cookie = get(url, "URL")[1]["set-cookie"].partition(";")[0]
        stream = http.client.HTTPConnection(url.split("/")[2], timeout=PATIENCE_S)
        stream.request("GET", "/events?from=1", headers={"Cookie": cookie})
        assert stream.getresponse().readline() == b"retry: 2000\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
        stream.close()
    assert (process.returncode, err) == (0, "")
    assert "server ended; the run is not affected" in out


@pytest.mark.system
@pytest.mark.skipif(bool(missing()), reason=missing() or "there is one")
def test_the_page_lives_with_the_run_and_outlives_it(tmp_path: Path) -> None:
    paths, asked = empty_run(tmp_path, 48)
    simulator = Simulator(plan_with_faults(48))
    simulator.run()
    half = len(simulator.journal) // 2
    with Ledger.open(paths.ledger) as ledger, serving(paths) as server, chromium() as browser:
        with run_lock(paths):
            browser.open(server.url)
            assert browser.run("return location.pathname + location.search") == "/"
            assert browser.text("#state") == "planned"
            assert browser.text("#chart-fleet") == "No node has been given work yet."
            browser.run("document.querySelector('[data-field=TFLOPS]').click(); window.same = true")
            with ledger.transaction():
                ledger.set_meta("state", "running")
            fill_ledger(ledger, simulator.journal[:half], asked)
            tuned = ledger.counts().tuned
            browser.until(lambda: f"{tuned} tuned" in browser.text("#sentences"), "the page has what was tuned")
            assert (browser.text("#state"), browser.text("#live")) == ("running", "live")
            assert browser.run("return document.querySelectorAll('#chart-fleet path.k-done').length") > 0
            assert browser.run("return document.querySelector('[aria-sort=descending]').textContent") == "TFLOPS"
            fill_ledger(ledger, simulator.journal[half:], asked)
            with ledger.transaction():
                ledger.set_meta("state", "finished")
        browser.until(lambda: browser.text("#state") == "finished", "the page says that it is over")
        assert browser.run("return window.same") is True, "it was never loaded again"
        assert int(browser.run("return document.documentElement.dataset.changes")) >= 2
        assert browser.texts("#failed article")
        own = server.url.partition("?")[0]
        assert [u for u in browser.requests() if not u.startswith((own, "data:"))] == []
        assert browser.console() == []
        server.stop()
        browser.until(lambda: browser.run("return document.getElementById('live').dataset.at") == "off", "it is told")
