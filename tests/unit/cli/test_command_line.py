"""The command line: help on one screen that loads nothing heavy, near names, completion, `shapes check`, and the
commands that are suggested."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from orchestrator.cli import driving
from orchestrator.cli.app import ListedCommand, app, load_command
from orchestrator.cli.commands import HEADINGS, CommandEntry, GroupEntry
from orchestrator.cli.ending import NextCommand, next_lines, next_steps
from orchestrator.cli.printer import print_page
from orchestrator.command_hints import called, command, program
from orchestrator.errors import InputError
from orchestrator.ledger.reader import Counts, ShapeState
from orchestrator.paths import RunConfig, RunPaths, run_lock
from orchestrator.policy import PolicySettings
from orchestrator.policy.model import State
from orchestrator.results.run_end import RunEnd
from tests.kits.fleet import command as run
from tests.paths import ROOT
from tests.waiting import PATIENCE_S

BIN = Path(sys.executable).parent


def groups() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(words before --help, each command's line) of the program and of each group."""
    root: Any = typer.main.get_command(app)
    for words, group in (("", root), *((n, c) for n, c in root.commands.items() if hasattr(c, "commands"))):
        yield words, [(n, (c.help or "").partition("\n\n")[0]) for n, c in group.commands.items()]


@pytest.mark.parametrize(("words", "commands"), list(groups()), ids=[w or "gemmfleet" for w, _ in groups()])
def test_help_is_one_screen_with_whole_summaries(words: str, commands: list[tuple[str, str]]) -> None:
    shown = CliRunner().invoke(app, [*words.split(), "--help"], terminal_width=80).stdout
    lines = shown.splitlines()
    assert len(lines) <= 44
    assert max(map(len, lines)) <= 80
    for name, summary in commands:
        assert any(line.split() == [name, *summary.split()] for line in lines), name
    if not words:
        headings = re.findall(r"^(\w+):$", shown, re.M)
        assert headings == ["Options", "Tune", "Look", "Results", "Fleet", "Files"]


def test_options_of_a_tuner_stand_under_its_name() -> None:
    common, _, own = run("tune", "--help").out.partition("\nTuner aiter:\n")
    assert ("--family" in common, "--tuner-timeout" in common) == (True, False)
    assert "--tuner-timeout" in own.partition("\n\n")[0]
    refused = run("tune", str(ROOT / "examples" / "llm.csv"), "--plan", "--again", "3", "--tuner", "replay")
    assert refused.err.startswith("error: --again: for the tuners aiter-triton, sglang, torch and vllm only")
    assert "Did you mean 'status'?" in run("statsu").err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("tune examples/llm.csv --tuner trch", "unknown tuner 'trch'; did you mean torch?"),
        ("tune examples/llm.csv --tuner torch -O rotat=3", "unknown option 'rotat'; did you mean rotate_mb?"),
        ("tune examples/llm.csv --tuner replay -O gfy=x", "unknown option 'gfy'; did you mean gfx?"),
        ("bench examples/llm.csv -O runs=1", "-O runs: only rotate_mb and seed are set so"),
        ("bench examples/llm.csv -b torhc", "'torhc' is not a backend; did you mean torch?"),
        ("tune inventories/local.yaml", "inventories/local.yaml: this is YAML and no list of shapes: an inventory is"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_nearest(
    words: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    done = run(*words.split(), "--plan", "--runs", str(tmp_path))
    assert (done.code, done.out) == (2, "")
    assert says in done.err


LOADED = """
import sys
from orchestrator.cli.main import main
try:
    main({words})
except SystemExit as e:
    assert not e.code
print(*sys.modules, file=sys.stderr)
"""


def loaded(words: str) -> set[str]:
    """Modules that a command loads in a fresh process."""
    code = LOADED.format(words=words.split())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout
    return set(done.stderr.split())


def test_ctrl_c_while_the_program_loads_is_no_traceback() -> None:
    code = """
import sys
class CtrlC:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, CtrlC())
from orchestrator.cli.main import main
main([])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("words", ["status", "runs list", "--version"])
def test_a_closed_standard_output_is_no_traceback(tmp_path: Path, words: str) -> None:
    line = f"{BIN / 'gemmfleet'} {words}"
    done = subprocess.run(["sh", "-c", f"{line} >&-"], capture_output=True, text=True, cwd=tmp_path)
    said = "error: standard output is closed; let it go to a file or to /dev/null\n"
    assert (done.returncode, done.stderr) == (1, said)
    done = subprocess.run(["sh", "-c", f"{line} 2>&-"], capture_output=True, text=True, cwd=tmp_path)
    assert "error" not in done.stdout


def test_ctrl_c_while_a_run_is_created_leaves_none_and_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press_ctrl_c(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunConfig, "write", press_ctrl_c)
    shapes = tmp_path / "shapes.csv"
    shapes.write_text("M,N,K\n1,64,64\n")
    done = run("tune", shapes, "--tuner", "replay", "--runs", tmp_path / "runs")
    assert (done.code, list((tmp_path / "runs").iterdir())) == (130, [])
    assert "\nrun " not in done.out


@pytest.mark.parametrize("words", ["--help", "--version", "db --help"])
def test_a_list_of_commands_loads_the_table_and_the_glue_to_typer_only(words: str) -> None:
    modules = loaded(words)
    ours = {m for m in modules if m.partition(".")[0] == "orchestrator"}
    assert ours == {
        "orchestrator", "orchestrator.cli", "orchestrator.cli.main", "orchestrator.cli.app",
        "orchestrator.cli.commands", "orchestrator.errors",
    }  # fmt: skip
    assert not modules & {"numpy", "pandas", "pydantic", "rich", "jinja2", "yaml", "importlib.metadata"}


@pytest.mark.parametrize("words", ["tune --help", "nodes check --help", "configs check --help", "image build --help"])
def test_the_help_of_a_command_loads_no_package_that_may_be_absent_or_slow(words: str) -> None:
    assert not loaded(words) & {"torch", "triton", "docker", "kubernetes", "paramiko", "fabric"}


def entries() -> Iterator[CommandEntry]:
    for entry in (e for under in HEADINGS.values() for e in under):
        yield from entry.commands if isinstance(entry, GroupEntry) else (entry,)


@pytest.mark.parametrize("entry", list(entries()), ids=lambda entry: entry.function)
def test_the_line_of_the_table_is_the_first_of_the_docstring(entry: CommandEntry) -> None:
    command: Any = load_command(ListedCommand(entry, None))
    assert (command.name, command.help.partition("\n\n")[0]) == (entry.name, entry.summary)


BASH = """
source <(_GEMMFLEET_COMPLETE=source_bash gemmfleet)
for line in {lines}; do
    COMP_WORDS=($line) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
    _gemmfleet_completion gemmfleet
    echo "${{COMPREPLY[@]}}"
done
gemmfleet --install-completion; exit $?  # the shell must live on, as the parent that is looked at
"""
OFFERED = {
    "gemmfleet re": ["recheck", "report", "resume", "retry"],
    "gemmfleet db un": ["undo"],
    "gemmfleet tune --tuner-": ["--tuner-arg", "--tuner-option", "--tuner-timeout"],
    "gemmfleet tune s.csv --busy s": ["share", "skip"],
}


def test_bash_completes_and_keeps_it(tmp_path: Path) -> None:
    """The script that `--show-completion` prints, in a real bash: what Tab would offer."""
    script = BASH.format(lines=" ".join(f"'{line}'" for line in OFFERED))
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True, env=env)
    offered = [sorted(line.split()) for line in done.stdout.splitlines()[: len(OFFERED)]]
    assert offered == list(OFFERED.values()), done.stderr
    kept = tmp_path / ".bash_completions" / "gemmfleet.sh"
    assert "complete_bash" in kept.read_text()
    assert str(kept) in (tmp_path / ".bashrc").read_text()


def test_shapes_check_as_a_document(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("token,model_dim,inter_dim,expert,topk\n7,2,3,4,5\n")
    found = run("shapes", "check", str(path), "--family", "fmoe", "--json").json()
    assert (found["ok"], found["shapes"], found["groups"]) == (True, 1, 1)
    assert found["m"] == {"column": "token", "min": 7, "max": 7}
    assert "q_type = QuantType.per_Token" in found["notes"][0]
    bad = run("shapes", "check", str(tmp_path / "none.csv"), "--json")
    assert (bad.code, [f"error: {fault}" for fault in bad.json()["faults"]]) == (2, bad.err.splitlines())


def test_examples_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "how-to" / "shape-lists.md").read_text(), re.DOTALL)
    assert [kind for kind, _ in blocks] == ["csv", "text", "csv", "text"]
    good = "\ufeffM,N,K\r\n1, 28672, 4096\r\n16,28672,4096\r\n\r\n16,28672,4096\r\n32,4096,14336\r\n"
    Path("llm.csv").write_bytes(good.encode())
    Path("broken.csv").write_text(blocks[2][1])
    assert run("shapes", "check", "llm.csv").out == blocks[1][1]
    assert run("shapes", "check", "broken.csv").err == blocks[3][1]


PATHS = RunPaths(Path("runs/20260131-154500-3f9a"))
CONFIG = RunConfig(PATHS.run, 0.0, [], "0", "a4w4_blockscale", "aiter", "s.csv", "", "inv.yaml")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty or no mapping of keys to values"),
        ("null", "it is empty or no mapping of keys to values"),
        ("run: r1\ncreated: 0.0\nargv: []\n", "it lacks version, family, tuner, shapes, shapes_sha256, inventory"),
        ("run: [", "while parsing a flow node"),
    ],
)
def test_a_damaged_run_yaml_is_named_with_the_way_out(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    done = run("status", tmp_path)
    assert done.code == 2
    assert done.err.startswith(f"error: {tmp_path}/run.yaml is damaged ({why}")
    assert done.err.endswith("); restore it from a copy, or tune again\n")


def test_the_program_is_named_as_it_can_be_typed_from_here(tmp_path: Path) -> None:
    ours, other, blanks = (tmp_path / name for name in ("project/.venv/bin", "other", "my env"))
    for folder in (ours, other, blanks):
        folder.mkdir(parents=True)
        (folder / "gemmfleet").touch(0o755)
    for folder, path, cwd, expected in (
        (ours, f"/usr/bin:{ours}", tmp_path, "gemmfleet"),
        (ours, str(other), tmp_path / "project", ".venv/bin/gemmfleet"),  # another one on the path is not ours
        (ours, "/usr/bin", tmp_path, "project/.venv/bin/gemmfleet"),
        (ours, "/usr/bin", ours / "x", str(ours / "gemmfleet")),
        (blanks, "", tmp_path, "'my env/gemmfleet'"),
        (tmp_path / "x", "", tmp_path, "x/python -m orchestrator"),
    ):
        assert called(str(folder / "python"), path, cwd) == expected


def test_no_message_spells_the_program_by_hand() -> None:
    """In the controller's code a suggested command comes from `command`, for only that can be typed everywhere."""
    by_hand = re.compile(r"[:(`] ?gemmfleet [a-z]+")
    found = [
        f"{path.relative_to(ROOT)}:{n}: {line.strip()}"
        for path in sorted((ROOT / "orchestrator").rglob("*.py"))
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if by_hand.search(line) and not line.startswith(('"""', "`"))
    ]
    assert found == []


def run_end(config: RunConfig, *, tuned: int = 3, reasons: Sequence[str] = (), state: str = "finished") -> RunEnd:
    """A run that ended so; a table named refused.csv refused its winners."""
    failed = [ShapeState(i, (i,), "failed", reason) for i, reason in enumerate(reasons)]
    counts = Counts(total=tuned + len(failed) + (state != "finished"), tuned=tuned, failed=len(failed))
    results: Any = SimpleNamespace(counts=counts, failed=failed)
    refusal = InputError("not a table") if config.db == "refused.csv" else None
    return RunEnd(PATHS, config, state, results, State(PolicySettings()), None, None, refusal, None, [], {})


@pytest.mark.parametrize(
    ("config", "how", "words"),
    [
        (CONFIG, {}, [f"db merge {PATHS.root} --into a4w4_blockscale_tuned_gemm.csv", f"report {PATHS.run}",
                      f"verify {PATHS.run}", f"db export {PATHS.tuned} --env"]),
        (replace(CONFIG, db="my tables/t.csv"), {}, [
            f"report {PATHS.run}", f"verify {PATHS.run}", "db export 'my tables/t.csv' --env"]),
        (replace(CONFIG, db="refused.csv"), {}, [
            f"report {PATHS.run}", f"verify {PATHS.run}", f"db export {PATHS.tuned} --env"]),
        # tables of our own tuners are not for AITER
        (replace(CONFIG, tuner="torch"), {}, [f"db merge {PATHS.root} --into a4w4_blockscale-torch.csv",
                                              f"report {PATHS.run}"]),
        (CONFIG, {"state": "interrupted"}, [f"resume {PATHS.run}"]),
        (CONFIG, {"reasons": ["fault", "unsupported"], "tuned": 0}, [f"explain {PATHS.run}", f"retry {PATHS.run}"]),
        # a verdict is the same the next time
        (CONFIG, {"reasons": ["unsupported"], "tuned": 0}, [f"explain {PATHS.run}"]),
    ],
)  # fmt: skip
def test_next_steps_once_a_run_has_ended(config: RunConfig, how: dict[str, Any], words: list[str]) -> None:
    assert [step.words for step in next_steps(run_end(config, **how))] == words
    assert next_lines([NextCommand("report r", "the page"), NextCommand("status run", "how it stands")]) == [
        f"next: {program()} report r    # the page", f"      {command('status run')}  # how it stands",
    ]  # fmt: skip
    assert RunPaths(Path("/my runs/r1")).named == "r1 --runs '/my runs'"


@pytest.mark.parametrize(
    ("controller", "patience_s", "says"),
    [
        ("exec sleep 1000", 0.0, "process {pid} was started 0 s ago, and does not drive the run yet: look into "),
        ("exit 1", PATIENCE_S, "the controller has ended already, with code 1: "),
        ("exec {python} {holder} {root}", PATIENCE_S, "the controller is process {pid}; watch it: "),
        ("echo another drives it; exit 2", PATIENCE_S, None),
    ],
)
def test_detach_says_what_became_of_the_controller(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    controller: str,
    patience_s: float,
    says: str | None,
) -> None:
    paths, holder, program_ = RunPaths(tmp_path / "r1"), tmp_path / "holder.py", tmp_path / "python"
    paths.root.mkdir()
    holder.write_text(
        "import sys, time; from pathlib import Path; from orchestrator.paths import RunPaths, run_lock\n"
        "with run_lock(RunPaths(Path(sys.argv[1]))):\n    time.sleep(1000)\n"
    )
    words = controller.format(python=sys.executable, holder=holder, root=paths.root)
    program_.write_text(f"#!/bin/sh\n{words}\n")
    program_.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "executable", str(program_))
    monkeypatch.setattr(driving, "DETACH_S", patience_s)
    if says is None:
        with (
            run_lock(paths),
            pytest.raises(InputError, match="ended at once with code 2:\nanother drives it"),
        ):
            driving.detach(paths)
        return
    page = driving.detach(paths)
    document: Any = page.document
    pid = document["pid"]
    try:
        print_page(page)
        assert capsys.readouterr().err.startswith(says.format(pid=pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
