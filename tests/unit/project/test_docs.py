"""All that a user can type is documented, and all that is documented exists: commands, faults, laws, links, modules."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import typer.main

from orchestrator.cli.app import app, load_command
from orchestrator.reasons import Reason
from orchestrator.results.selftest import CHECKS
from tests.aiter.versions import VERSIONS, table
from tests.paths import ROOT
from tests.planted.bugs import LAWS

COMMANDS = (ROOT / "docs" / "reference" / "commands.md").read_text()


def commands() -> Iterator[tuple[str, object]]:
    """(name as typed, command) of everything on the command line."""

    def walk(prefix: str, group: object) -> Iterator[tuple[str, object]]:
        for name, command in getattr(group, "commands", {}).items():
            if hasattr(command, "commands"):
                yield from walk(f"{prefix}{name} ", command)
            else:
                yield f"{prefix}{name}", load_command(command)

    yield from walk("", typer.main.get_command(app))


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=lambda v: v if isinstance(v, str) else "")
def test_every_command_and_option_is_documented_and_has_help(name: str, command: object) -> None:
    section = COMMANDS.split(f"## gemmfleet {name}\n", 1)[1].split("\n## ", 1)[0]
    assert getattr(command, "help", "")
    for param in getattr(command, "params", []):
        for option in param.opts:
            if option.startswith("--") and option not in ("--help", "--runs"):
                assert option in section, f"{name} {option}"
        if param.name not in ("help", None):
            assert getattr(param, "help", "x"), f"{name} {param.name} has no help"


def test_no_command_is_documented_that_is_not_there() -> None:
    documented = re.findall(r"^## gemmfleet (.+)$", COMMANDS, re.M)
    assert sorted(documented) == sorted(name for name, _ in commands())


def test_every_reason_is_explained() -> None:
    text = (ROOT / "docs" / "explanation" / "failures.md").read_text()
    for reason in Reason:
        if reason.fails_shapes:
            assert f"`{reason.value}`" in text, reason


def test_the_table_of_aiter_versions_is_the_tested_one() -> None:
    """tests/aiter/test_probe.py holds VERSIONS to the probe's answers for the real files."""
    assert table(VERSIONS) in (ROOT / "docs" / "explanation" / "aiter.md").read_text()


def test_the_statements_of_the_selftest_are_the_listed_ones() -> None:
    listed = "".join(f"{number}. {statement}\n" for number, statement, _ in CHECKS)
    assert f"\n\n{listed}\n" in (ROOT / "docs" / "explanation" / "aiter.md").read_text()


def test_every_fault_of_the_list_has_its_test() -> None:
    text = (ROOT / "tests" / "faults.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 30
    named = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert [row for row, names in zip(rows, named, strict=True) if len(names) != 1] == []
    source = "".join(p.read_text() for x in ("fleet", "integration") for p in (ROOT / "tests" / x).glob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)\(", source, re.MULTILINE))
    assert {name for names in named for name in names} <= defined


def test_every_law_has_its_tests() -> None:
    """tests/laws.md has each law once, with tests that exist."""
    text = (ROOT / "tests" / "laws.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if re.match(r"\| \d+ \| ", line)]
    assert [int(row[0].removeprefix("| ")) for row in rows] == list(LAWS) == list(range(1, 18))
    for row in rows:
        named = re.findall(r"`([\w/.]+)::(\w+)`", row[2])
        assert named, row
        for file, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), (file, name)


def test_the_tests_that_the_page_on_security_names_are_there() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    named = re.findall(r"`([\w/.]+)::(\w+)`", text)
    assert len(named) > 15
    assert len(text.split()) <= 700
    for file, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), (file, name)


def test_links_in_the_docs_lead_somewhere() -> None:
    folders = ("docs", "benchmarks", "examples", "tests")
    for page in (*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))):
        prose = re.sub(r"`[^`\n]*`", "", page.read_text())
        for link in re.findall(r"\]\(([^)\s]+)\)", prose):
            path, _, anchor = link.partition("#")
            if ":" in path:
                continue
            target = page.parent / path if path else page
            assert target.exists(), f"{page.relative_to(ROOT)}: {link}"
            if anchor:
                assert anchor in anchors(target.read_text()), f"{page.relative_to(ROOT)}: {link}"


def test_modules_that_the_architecture_names_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", page, re.M)
    named = [f"{room}/{file}" for room, files in rows for file in re.findall(r"`([\w/]+\.py)`", files)]
    assert len(named) > 15, "the table of rooms"
    named += [f for f in re.findall(r"`([\w/.]+\.\w+)`", page) if "/" in f and f.endswith((".py", ".j2", ".sh"))]
    roots = [ROOT, ROOT / "orchestrator"]
    assert [f for f in named if not any((r / f).exists() for r in roots)] == []


QUESTION = re.compile(r'\s*r?"""(What|Whether|How|Who|Whose|Which|Where|When|Why)\b')


def test_no_docstring_begins_with_a_question_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{n}: {line.strip()}"
        for folder in ("orchestrator", "worker", "benchmarks", "examples", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if QUESTION.match(line)
    ]
    assert not found, "\n".join(["begin with a noun or an imperative:", *found])


def anchors(markdown: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", markdown, re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}
