"""Every fault in docs/explanation/failures.md names a test, and each of these tests exists."""

from __future__ import annotations

import re

from tests.paths import ROOT
from tests.planted.bugs import LAWS


def test_every_fault_in_the_docs_has_its_test() -> None:
    text = (ROOT / "docs" / "explanation" / "failures.md").read_text()
    section = text.partition("## Every fault, done for real")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 30
    named = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert [row for row, names in zip(rows, named, strict=True) if len(names) != 1] == []
    source = "".join(p.read_text() for x in ("fleet", "integration") for p in (ROOT / "tests" / x).glob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)\(", source, re.MULTILINE))
    assert {name for names in named for name in names} <= defined


def test_every_law_has_its_tests() -> None:
    """docs/contributing/tests.md has each law once, with tests that exist."""
    text = (ROOT / "docs" / "contributing" / "tests.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if re.match(r"\| \d+ \| ", line)]
    assert [int(row[0].removeprefix("| ")) for row in rows] == list(LAWS)
    for row in rows:
        named = re.findall(r"`([\w/.]+)::(\w+)`", row[2])
        assert named, row
        for file, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), (file, name)
