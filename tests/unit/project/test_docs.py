"""All that a user can type is documented, and all that is documented exists."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator

import pytest
import typer.main

from orchestrator.cli.app import app
from orchestrator.reasons import Reason
from tests.aiter.versions import VERSIONS, table
from tests.paths import ROOT

COMMANDS = (ROOT / "docs" / "reference" / "commands.md").read_text()


def commands() -> Iterator[tuple[str, object]]:
    """(name as typed, command) of everything on the command line."""

    def walk(prefix: str, group: object) -> Iterator[tuple[str, object]]:
        for name, command in getattr(group, "commands", {}).items():
            if hasattr(command, "commands"):
                yield from walk(f"{prefix}{name} ", command)
            else:
                yield f"{prefix}{name}", command

    yield from walk("", typer.main.get_command(app))


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=lambda v: v if isinstance(v, str) else "")
def test_every_command_and_option_is_documented_and_has_help(name: str, command: object) -> None:
    assert f"## gemmfleet {name}\n" in COMMANDS
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


def test_every_make_target_has_help() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^TARGETS +:= (.+)$", text, re.M)
    assert phony
    described = set(re.findall(r"^([a-z-]+):.*## ", text, re.M))
    assert set(phony[1].split()) - described <= {"system-packages", "shapes-named"}
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in described:
        assert re.search(rf"^  {target} ", shown, re.M), target


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("merge DB=t.csv RUN=r1", "db merge \"r1\" --into 't.csv'"),
        ("export DB=t.csv FAMILY=a8w8 ARGS=--env", "db export 't.csv' --family 'a8w8' --env"),
        ("verify RUN=r1 INVENTORY=i.yaml", "verify r1 -i 'i.yaml'"),
        ("compare GOLDEN=a.csv TOT=b.csv", "compare 'a.csv' 'b.csv'"),
    ],
)
def test_targets_of_tables_are_the_commands(words: str, command: str) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKEOVERRIDES", "ARGS")}  # of an outer make
    make = ["make", "--no-print-directory", "-n", *words.split()]
    shown = subprocess.run(make, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    assert " ".join(shown.splitlines()[-1].split()) == f".venv/bin/gemmfleet {command}"


def test_every_reason_is_explained() -> None:
    text = (ROOT / "docs" / "explanation" / "failures.md").read_text()
    for reason in Reason:
        if reason.fails_shapes:
            assert f"`{reason.value}`" in text, reason


def test_the_table_of_aiter_versions_is_the_tested_one() -> None:
    """tests/aiter/test_probe.py holds VERSIONS to the probe's answers for the real files."""
    assert table(VERSIONS) in (ROOT / "docs" / "explanation" / "aiter.md").read_text()


def test_links_in_the_docs_lead_somewhere() -> None:
    pages = [
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
    for page in pages:
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
    roots = [ROOT, ROOT / "orchestrator", ROOT / "orchestrator" / "analysis"]
    assert [f for f in named if not any((r / f).exists() for r in roots)] == []


def anchors(markdown: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", markdown, re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}
