"""The page in a real browser, from a file: it loads, sorts, filters, explains, logs no error, and requests nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from orchestrator.report.collector import Collector
from orchestrator.report.page import fit, render_page, write_report
from tests.integration.browser import Browser, chromium, missing
from tests.kits.results import simulated_run
from tests.unit.report.test_page import HOSTILE

pytestmark = [
    pytest.mark.xdist_group("report_page"),
    pytest.mark.system,
    pytest.mark.skipif(bool(missing()), reason=missing() or "there is one"),
]

ROWS = "#grid tbody tr[data-id]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(simulated_run(tmp_path_factory.mktemp("runs"), 600), None)[0]


@contextmanager
def opening(browser: Browser, page: Path) -> Iterator[None]:
    """Open a page, which logs no error and requests nothing."""
    browser.console(), browser.requests()
    browser.open(page.as_uri())
    yield
    assert browser.console() == []
    assert [u for u in browser.requests() if not u.startswith(("file:", "data:"))] == []


@pytest.fixture
def opened(browser: Browser, page: Path) -> Iterator[Browser]:
    with opening(browser, page):
        yield browser


def cells(browser: Browser, name: str) -> list[str]:
    """The cells in sight of a column."""
    at = browser.texts("#grid th").index(name)
    return browser.texts(f"{ROWS} > :nth-child({at + 1})")


def numbers(texts: list[str]) -> list[float]:
    return [float(t.replace(",", "")) for t in texts if t]


def test_it_shows_everything_and_keeps_few_rows_in_the_page(opened: Browser) -> None:
    assert opened.text("#count") == "600 shapes"
    assert 10 < len(opened.texts(ROWS)) < 100
    for box in ("backends", "roofline", "choice", "fleet", "spread", "repeat"):
        assert opened.run("return document.querySelectorAll(arguments[0]).length", f"#chart-{box} svg path") > 0, box
    assert "No tuned table was named" in opened.text("#chart-gain")
    assert len(opened.texts("#failed article")) >= 3
    assert len(opened.texts("#provenance dt")) > 8
    opened.run("const g = document.getElementById('grid'); g.scrollTop = g.scrollHeight")
    opened.until(lambda: "600" in cells(opened, "#"), "the last row is in sight")
    assert len(opened.texts(ROWS)) < 100
    opened.run("dispatchEvent(new Event('beforeprint'))")
    assert len(opened.texts(ROWS)) == 400, "on paper the table has its rows"
    opened.run("dispatchEvent(new Event('afterprint'))")
    assert len(opened.texts(ROWS)) < 100


def test_the_last_column_is_in_sight_at_1280_pixels(opened: Browser) -> None:
    before = opened.driver.get_window_size()
    opened.driver.set_window_size(1280, 900)
    cut = "const g = document.getElementById('grid'); return g.scrollWidth - g.clientWidth"
    opened.until(lambda: opened.run("return innerWidth") == 1280, "the window has its size")
    assert opened.run(cut) == 0
    opened.driver.set_window_size(before["width"], before["height"])


def test_it_sorts_both_ways_and_filters_by_words_columns_states_and_backends(opened: Browser) -> None:
    def click(selector: str) -> None:
        opened.driver.find_element(By.CSS_SELECTOR, selector).click()

    click('#grid th button[data-field="TFLOPS"]')
    down = numbers(cells(opened, "TFLOPS"))
    assert down == sorted(down, reverse=True)
    click('#grid th button[data-field="TFLOPS"]')
    up = numbers(cells(opened, "TFLOPS"))
    assert up == sorted(up)
    opened.run("const g = document.getElementById('grid'); g.scrollTop = g.scrollHeight")
    opened.until(lambda: cells(opened, "TFLOPS")[-1] == "", "failed shapes are at the end")
    field = opened.driver.find_element(By.ID, "filter")
    field.send_keys("tflops>2000")
    opened.until(lambda: min(numbers(cells(opened, "TFLOPS")), default=0.0) > 2000, "only fast ones")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("M=16")
    opened.until(lambda: set(cells(opened, "M")) == {"16"}, "only those of M=16")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(Keys.DELETE)
    opened.until(lambda: opened.text("#count") == "600 shapes", "all are back")
    click('[data-chip="failed"]')
    assert set(cells(opened, "State")) == {"failed"}
    click('[data-chip="all"]')
    opened.run("const b = document.getElementById('backend'); b.value = 'ck'; b.dispatchEvent(new Event('change'))")
    assert set(cells(opened, "Backend")) == {"CK"}


def test_a_row_opens_and_closes_by_keyboard(opened: Browser) -> None:
    opened.run("document.querySelector('.row').focus()")
    ActionChains(opened.driver).send_keys(Keys.ENTER).perform()
    assert "1x1280x8192" in opened.text("#details-title")
    assert "gemmfleet explain" in opened.text("#details")
    ActionChains(opened.driver).send_keys(Keys.ESCAPE).perform()
    opened.until(lambda: not opened.run("return document.getElementById('details').open"), "it is closed")
    assert opened.run("return document.activeElement.dataset.row") == "1"


def spoiled(value: Any) -> Any:
    """Every text of a document made hostile."""
    if isinstance(value, str):
        return value + HOSTILE
    if isinstance(value, dict):
        return {k: spoiled(v) for k, v in value.items()}
    return [spoiled(v) for v in value] if isinstance(value, list) else value


def test_hostile_names_and_details_are_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    paths = simulated_run(tmp_path, 24, name=HOSTILE, shapes=HOSTILE, argv=["tune", HOSTILE])
    document = spoiled(Collector(paths).document())
    for kept in ("columns", "backends", "roof"):
        document[kept] = Collector(paths).document()[kept]
    at = document["columns"]["row"].index("state")
    for row in document["shapes"]:
        row[at] = row[at].removesuffix(HOSTILE)
    for name, text in (("kept", render_page(fit(Collector(paths).document()))), ("raw", render_page(document))):
        (tmp_path / f"{name}.html").write_text(text)
        with opening(browser, tmp_path / f"{name}.html"):
            browser.run("document.querySelector('.row').click()")
            markup = "return document.querySelectorAll('img, body script:not(#data):not([type=module])').length"
            assert browser.run(markup) == 0
            assert browser.run("return document.title") != "owned"
            assert "</script><img src=x" in browser.text("#grid") + browser.text("#provenance")
            assert not {"\u202e", "\x1b", "\u2028"} & set(browser.run("return document.body.textContent"))
