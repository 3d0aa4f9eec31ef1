"""The command table: what it lists is what the commands say, commands load when they run, and shells complete them."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.cli.commands import COMMANDS, OPTIONS, Entry, help_of
from tests.paths import ROOT

BIN = Path(sys.executable).parent


def leaves(entries: Sequence[Entry], prefix: str = "") -> Iterator[tuple[str, Entry]]:
    for e in entries:
        if e.commands:
            yield from leaves(e.commands, f"{prefix}{e.name} ")
        else:
            yield f"{prefix}{e.name}", e


ALL = [e for entries in COMMANDS.values() for e in entries]
LEAVES = list(leaves(ALL))


@pytest.mark.parametrize(("name", "entry"), LEAVES, ids=[n for n, _ in LEAVES])
def test_a_summary_is_the_first_paragraph_of_its_command(name: str, entry: Entry) -> None:
    module, _, function = entry.target.partition(":")
    doc = inspect.getdoc(getattr(import_module(module), function)) or ""
    assert doc.split("\n\n")[0] == entry.summary


def test_help_is_one_screen_with_whole_summaries() -> None:
    shown = CliRunner().invoke(app, ["--help"], terminal_width=80).stdout
    lines = shown.splitlines()
    assert 24 <= len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert [h for h in COMMANDS if f"{h}:" in lines] == list(COMMANDS)
    for e in ALL:
        assert any(line.split() == [e.name, *e.summary.split()] for line in lines), e.name


@pytest.mark.parametrize("name", [e.name for e in ALL if e.commands])
def test_help_of_a_group_has_whole_summaries(name: str) -> None:
    (entry,) = (e for e in ALL if e.name == name)
    lines = CliRunner().invoke(app, [name, "--help"], terminal_width=80).stdout.splitlines()
    for e in entry.commands:
        assert any(line.split() == [e.name, *e.summary.split()] for line in lines), e.name


def test_options_of_a_tuner_stand_under_its_name() -> None:
    shown = CliRunner().invoke(app, ["tune", "--help"]).stdout
    common, _, own = shown.partition("\nTuner aiter:\n")
    assert "--family" in common
    assert "--tuner-timeout" not in common
    assert "--tuner-timeout" in own.partition("\n\n")[0]


@pytest.mark.parametrize(
    ("words", "modules"),
    [
        ("--help", set()),
        ("--version", set()),
        ("db --help", set()),
        ("status --help", {"runs"}),
        ("tune --help", {"tune"}),
        ("db diff --help", {"db"}),
        ("nodes check --help", {"nodes"}),
    ],
)
def test_only_the_module_of_the_command_is_imported(words: str, modules: set[str]) -> None:
    heavy = (
        "pydantic", "rich", "importlib.metadata", "worker.protocol", "worker.families",
        *(() if modules else ("typer",)),
    )  # fmt: skip
    code = (
        f"import sys\nsys.argv = ['gemmfleet', *{words.split()}]\n"
        "from orchestrator.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code\n"
        f"print(*(m for m in sys.modules if m.startswith('orchestrator.') or m in {heavy}), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {m.removeprefix("orchestrator.") for m in done.stderr.split()}
    entry = {"cli", "cli.main", "cli.commands"}
    if not modules:
        assert loaded == entry
    assert loaded - entry - {"cli.app", "cli.options", "errors", "command_hints", "tuners"} == {
        f"cli.{m}" for m in modules
    }


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


@pytest.mark.parametrize("words", [[], *([e.name] for e in ALL if e.commands)], ids=str)
def test_help_without_typer_is_that_of_typer(words: list[str]) -> None:
    shown = CliRunner().invoke(app, [*words, "--help"], prog_name="gemmfleet").stdout
    assert shown == f"{help_of('gemmfleet', [*words, '--help'])}\n"


def test_the_listed_options_are_those_of_the_program() -> None:
    command = typer.main.get_command(app)
    assert [*(o for p in command.params for o in p.opts), "--help"] == list(OPTIONS)


def test_completion_can_be_installed(tmp_path: Path) -> None:
    env = {**os.environ, "HOME": str(tmp_path), "PATH": f"{BIN}:{os.environ['PATH']}"}
    typed = "gemmfleet --install-completion; exit $?"  # the shell must live on, as the parent that is looked at
    subprocess.run(["bash", "--norc", "-c", typed], capture_output=True, text=True, check=True, env=env)
    script = tmp_path / ".bash_completions" / "gemmfleet.sh"
    assert "complete_bash" in script.read_text()
    assert str(script) in (tmp_path / ".bashrc").read_text()
