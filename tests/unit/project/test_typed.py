"""Commands that README and docs tell people to type: they parse, their files are there, and pip finds its packages."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tomllib
import typer.main

from orchestrator import __version__
from orchestrator.cli.app import app, load_command
from tests.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("gemmfleet", "make", "pip", "python", "python3", "cp", "export", ".", "kubectl")
FILE = re.compile(r"[\w./-]+\.(?:csv|yaml|json|log|py)")
MAKES = ("-o", "--out", "--into", "--db", "--again")
"""Options of gemmfleet whose file need not be there before."""
YOURS = {"shapes.csv", "llm.csv", "few.csv", "mine.csv", "calls.csv", "profile.csv", "tuned.csv", "fleet.yaml"}
YOURS |= {"day1.csv", "day2.csv", "golden.csv", "tot.csv", "config.json", "server.log", "serve.log", "serve.py"}
YOURS |= {"bench_fp4.log"}
"""The reader's own files, as the pages name them."""


def lines(text: str) -> Iterator[str]:
    """Commands of a page: each line of an `sh` block, and those in indented blocks that begin with a program."""
    text = text.replace("\\\n", " ")
    shell = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S))
    indented = re.findall(rf"^ {{4,}}((?:\.venv/bin/)?(?:{'|'.join(map(re.escape, PROGRAMS))}) .*)", text, re.M)
    for line in (*shell.splitlines(), *indented):
        yield from re.split(r"; (?=gemmfleet )", line)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_of_a_page_can_be_typed(page: Path) -> None:
    text = page.read_text()
    there = YOURS | set(re.findall(r"^ *# (\S+\.yaml)$", text, re.M))
    for line in lines(text):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        program = words[0].removeprefix(".venv/bin/")
        assert program in PROGRAMS, line
        if program == "gemmfleet":
            parse(words[1:])
        elif program == "make":
            check_make(words[1:])
        elif program == "cp":
            there.add(words.pop())
        there |= {b for a, b in pairwise(words) if a in MAKES}
        if words[1:3] == ["shapes", "from-log"]:  # with lines about both kinds of layer it writes a list for each
            there |= {"shapes-a8w8_blockscale.csv", "shapes-fmoe.csv"}
        there |= {word.removeprefix("DB=") for word in words if word.startswith("DB=")}
        for name in (word.partition("=")[2] or word for word in words):
            if FILE.fullmatch(name) and not name.startswith(("runs/", "/", "aiter/")):
                assert name in there or (ROOT / name).exists(), f"{line}\n{name}: not here, and no command makes it"


def parse(words: list[str]) -> None:
    """Let the real command line read the words, without running anything."""
    command: Any = typer.main.get_command(app)
    name = "gemmfleet"
    while hasattr(command, "commands"):
        name = words[0]
        command, words = command.commands[name], words[1:]
    load_command(command).make_context(name, [word for word in words if word != "..."])


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    known = {key: set(re.findall(rf"^{key} *:= (.*)$", makefile, re.M)[0].split()) for key in ("TARGETS", "VARIABLES")}
    variables = {word.partition("=")[0] for word in words if "=" in word}
    assert variables <= known["VARIABLES"], words
    assert {word for word in words if "=" not in word} <= known["TARGETS"], words


def test_pip_installs_what_exists() -> None:
    """Until there is a release: a checkout, a wheel of `make wheel`, or a package of others."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = [*PAGES, *(p for room in ("orchestrator", "worker", "examples") for p in (ROOT / room).rglob("*.*"))]
    named = [
        (page_id(p), what)
        for p in sources
        if p.suffix in (".md", ".py", ".j2", ".sh")
        for what in re.findall(r"pip install ([^\s`#;)]+)", p.read_text())
    ]
    assert named
    for where, what in named:
        path, _, extra = what.strip("'\"").rstrip("],").partition("[")
        assert path in (".", "./gemmfleet", "torch", "dist/*.whl") or (ROOT / path).is_dir(), (where, what)
        assert set(filter(None, extra.split(","))) <= set(extras), (where, what)


def test_version_tag_and_changelog_agree_and_the_changelog_is_short() -> None:
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1:]
    assert sections[0].split()[0] == __version__
    if git := shutil.which("git"):
        argv = [git, "-C", str(ROOT), "tag", "--points-at", "HEAD"]
        tags = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.split()
        assert {t for t in tags if re.match(r"v?\d", t)} <= {f"v{__version__}"}
    assert {s.split()[0]: n for s in sections if (n := len(s.strip().splitlines())) > 40} == {}
