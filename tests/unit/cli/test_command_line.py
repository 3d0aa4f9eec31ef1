"""The command line: help on one screen that loads nothing heavy, near names, and completion in shells."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from orchestrator.cli.app import app
from tests.paths import ROOT

BIN = Path(sys.executable).parent


def groups() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(words before --help, the first line of each command's docstring) of the program and of each group."""
    root: Any = typer.main.get_command(app)
    for words, group in (("", root), *((n, c) for n, c in root.commands.items() if hasattr(c, "commands"))):
        yield words, [(n, (c.help or "").partition("\n\n")[0]) for n, c in group.commands.items()]


@pytest.mark.parametrize(("words", "commands"), list(groups()), ids=[w or "gemmfleet" for w, _ in groups()])
def test_help_is_one_screen_with_whole_summaries(words: str, commands: list[tuple[str, str]]) -> None:
    lines = CliRunner().invoke(app, [*words.split(), "--help"], terminal_width=80).stdout.splitlines()
    assert len(lines) <= 44
    assert max(map(len, lines)) <= 80
    for name, summary in commands:
        assert any(line.split() == [name, *summary.split()] for line in lines), name


def test_commands_stand_under_the_headings_of_the_docs() -> None:
    shown = CliRunner().invoke(app, ["--help"], terminal_width=80).stdout
    headings = re.findall(r"^(\w+):$", shown, re.M)
    assert headings == ["Options", "Tune", "Look", "Results", "Fleet", "Files"]


def test_options_of_a_tuner_stand_under_its_name() -> None:
    shown = CliRunner().invoke(app, ["tune", "--help"]).stdout
    common, _, own = shown.partition("\nTuner aiter:\n")
    assert "--family" in common
    assert "--tuner-timeout" not in common
    assert "--tuner-timeout" in own.partition("\n\n")[0]


@pytest.mark.parametrize("words", ["--help", "--version", "tune --help", "nodes check --help"])
def test_help_loads_nothing_heavy(words: str) -> None:
    heavy = (
        "numpy", "pandas", "pydantic", "rich", "torch", "docker", "paramiko", "fabric", "jinja2", "yaml",
        "importlib.metadata",
    )  # fmt: skip
    code = (
        "import sys\nfrom orchestrator.cli.main import main\n"
        f"try:\n    main({words.split()})\nexcept SystemExit as e:\n    assert not e.code\n"
        f"print(*(m for m in sys.modules if m in {heavy}), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout
    assert done.stderr.split() == []


def test_a_near_name_is_suggested() -> None:
    result = CliRunner().invoke(app, ["statsu"])
    assert result.exit_code == 2
    assert "Did you mean 'status'?" in result.stderr


BASH = """
source <(_GEMMFLEET_COMPLETE=source_bash gemmfleet)
COMP_WORDS=({words}) COMP_CWORD={at}
_gemmfleet_completion gemmfleet
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("gemmfleet st", ["status"]),
        ("gemmfleet re", ["recheck", "resume", "retry", "report"]),
        ("gemmfleet db un", ["undo"]),
        ("gemmfleet shapes from", ["from-model", "from-log"]),
        ("gemmfleet tune --tuner-", ["--tuner-option", "--tuner-timeout", "--tuner-arg"]),
        ("gemmfleet tune s.csv --busy s", ["skip", "share"]),
        ("gemmfleet --vers", ["--version"]),
    ],
)
def test_bash_completes(typed: str, offered: list[str]) -> None:
    """The script that `--show-completion` prints, in a real bash: what Tab would offer."""
    words = typed.split()
    script = BASH.format(words=" ".join(words), at=len(words) - 1)
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True, env=env)
    assert sorted(done.stdout.split()) == sorted(offered), done.stderr


def test_completion_can_be_installed(tmp_path: Path) -> None:
    env = {**os.environ, "HOME": str(tmp_path), "PATH": f"{BIN}:{os.environ['PATH']}"}
    typed = "gemmfleet --install-completion; exit $?"  # the shell must live on, as the parent that is looked at
    subprocess.run(["bash", "--norc", "-c", typed], capture_output=True, text=True, check=True, env=env)
    script = tmp_path / ".bash_completions" / "gemmfleet.sh"
    assert "complete_bash" in script.read_text()
    assert str(script) in (tmp_path / ".bashrc").read_text()
