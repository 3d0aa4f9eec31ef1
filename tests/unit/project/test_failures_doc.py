"""Every fault in docs/explanation/failures.md names a test, and each of these tests exists."""

from __future__ import annotations

import re

from tests.paths import ROOT


def test_every_fault_in_the_docs_has_its_test() -> None:
    text = (ROOT / "docs" / "explanation" / "failures.md").read_text()
    section = text.partition("## Every fault, done for real")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 30
    named = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert [row for row, names in zip(rows, named, strict=True) if len(names) != 1] == []
    source = "".join(p.read_text() for p in (ROOT / "tests" / "integration").glob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)\(", source, re.MULTILINE))
    assert {name for names in named for name in names} <= defined
