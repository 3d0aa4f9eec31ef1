"""A real headless Chromium for the tests of the page, with its console and its requests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from tests.waiting import PATIENCE_S, wait_until

PROGRAMS = ("chromium", "chromedriver")


def missing() -> str:
    """Reason for which there is no browser to test with; "" where there is one."""
    gone = [p for p in PROGRAMS if shutil.which(p) is None]
    return f"needs {' and '.join(gone)} (Debian: chromium, chromium-driver)" if gone else ""


class Browser:
    """One window."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Load a page and wait until its script is through."""
        self.driver.get(url)
        self.until(lambda: bool(self.run("return document.documentElement.dataset.ready")), "the page is ready")

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def texts(self, selector: str) -> list[str]:
        found = self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)
        return [str(t) for t in found]

    def until(self, holds: Callable[[], bool], what: str) -> None:
        wait_until(holds, what)

    def console(self) -> list[str]:
        """Errors and warnings on the console since the last call."""
        return [str(entry["message"]) for entry in self._log("browser")]

    def requests(self) -> list[str]:
        """URLs that were requested since the last call."""
        messages = (json.loads(entry["message"])["message"] for entry in self._log("performance"))
        sent = (
            m["params"] for m in messages if m["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated")
        )
        return [str(params.get("request", params)["url"]) for params in sent]

    def _log(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.driver.get_log(kind)
        return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a fresh profile."""
    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                 "--disable-background-networking", "--window-size=1280,900"):  # fmt: skip
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.set_page_load_timeout(PATIENCE_S)
        yield Browser(driver)
    finally:
        driver.quit()
