"""Code that is not ours, run on its own: what it sees, what it can do to us, and what is left of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from tests.kits.worker import interpreters
from tests.paths import ROOT
from tests.support import foreign_code as code
from tests.waiting import wait_until
from worker.foreign import runner
from worker.foreign.runner import ForeignCodeError, Limits, call, call_each, run, unprotected
from worker.foreign.values import decode, encode

SECRET = "of-the-parent-and-nobody-else"
NOBODY = 65534


@pytest.fixture(params=["this user", "ordinary user"])
def ask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Calls a function of `foreign_code` from a process that holds the secret; skips without namespaces."""
    monkeypatch.setenv("GEMMFLEET_TEST_SECRET", SECRET)
    if request.param == "this user":
        yield _asking(sys.executable, ROOT, None)
        return
    if os.geteuid():
        pytest.skip("we are an ordinary user")
    usable = [p for p in (*interpreters().values(), "/usr/bin/python3") if _can_run(p, NOBODY)]
    if not usable:
        pytest.skip("an ordinary user can run no Python here")
    # not in pytest's folder: every pytest that starts on this machine shuts it for other users
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        for part in ("worker", "tests/support"):
            shutil.copytree(ROOT / part, Path(folder, part))
        yield _asking(usable[0], Path(folder), NOBODY)


def _asking(python: str, root: Path, user: int | None) -> Callable[..., Any]:
    def ask(function: Callable[..., Any], *arguments: str) -> Any:
        argv = [python, str(root / "tests/support/foreign_code.py"), function.__name__, *arguments]
        done = subprocess.run(argv, user=user, capture_output=True, text=True, check=True, cwd="/", umask=0o022)
        answer, reason = json.loads(done.stdout)
        if reason:
            pytest.skip(reason)
        return answer

    return ask


def _can_run(python: str, user: int) -> bool:
    program = "import sys; sys.exit(sys.version_info < (3, 10))"
    try:
        return subprocess.run([python, "-c", program], user=user, check=False, cwd="/").returncode == 0
    except OSError:
        return False


def test_it_sees_no_process_and_no_variable_of_ours(ask: Callable[..., Any]) -> None:
    seen = ask(code.see, SECRET)
    assert seen["holding"] == []
    assert seen["numbers"] == ["1", "2"]
    assert set(seen["variables"]) <= {*runner.KEPT_VARIABLES, "HOME", "TMPDIR", "PYTHONDONTWRITEBYTECODE"}


def test_nothing_of_it_outlives_the_call(ask: Callable[..., Any]) -> None:
    seconds = f"{600 + os.getpid() / 1e6:.6f}"
    ask(code.leave_one_behind, seconds)
    assert seconds.encode() not in b"".join(_command_lines())


def test_the_home_of_a_command_is_removed_although_who_ran_it_is_killed(tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "tests/support/foreign_code.py"), "run_without_end"]
    with subprocess.Popen(argv, env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        wait_until(lambda: any(tmp_path.glob("gemmfleet-foreign-*")), "the command has a home")
        process.kill()
    wait_until(lambda: not any(tmp_path.iterdir()), "its home is removed")


def test_it_cannot_end_who_watches_it(ask: Callable[..., Any]) -> None:
    assert ask(code.end_the_watcher) == "alive"


def _command_lines() -> list[bytes]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:
            continue
    return lines


@pytest.mark.parametrize(
    ("function", "limits", "words"),
    [
        (code.give_wrong_type, Limits(), "gave a wrong answer: the answer.count is not int, but 'many'"),
        (code.give_half_a_character, Limits(), "gave a wrong answer: the answer is not text"),
        (code.give_deep_json, Limits(), "gave an answer that is not JSON"),
        (code.give_long_number, Limits(), "gave an answer that is not JSON"),
        (code.give_two_answers, Limits(), "gave an answer that is not JSON: Extra data"),
        (code.give_other_document, Limits(), "gave a wrong answer: the answer is neither a value nor an error"),
        (code.write_without_end, Limits(output=1 << 16), "ended with status 1|was killed by signal 25|File too large"),
        (code.ask_for_memory, Limits(), "raised MemoryError"),
        (code.fork_without_end, Limits(), "had more than 64 processes at once"),
        (code.run_without_end, Limits(seconds=1), "was not done within 1 s"),
        (code.stop_itself, Limits(seconds=1), "was not done within 1 s"),
        (code.exit_with_status, Limits(), "ended with status 3"),
        (code.crash, Limits(), "was killed by signal 11"),
        (code.raise_system_exit, Limits(), "raised SystemExit: stop$"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_whatever_it_does_is_one_error(function: Callable[..., Any], limits: Limits, words: str) -> None:
    if function is code.fork_without_end and unprotected():
        pytest.skip("the number of processes is held only with namespaces")
    with pytest.raises(ForeignCodeError, match=words) as caught:
        call(function, limits=limits)
    assert len(str(caught.value).splitlines()) == 1


def test_calls_answer_in_their_order_and_the_first_failure_ends_the_others() -> None:
    counts: list[int] = []
    assert call_each(code.exit_or_run, [(2,), (1,)], finished=counts.append) == [2, 1]
    assert counts == [1, 2]
    with pytest.raises(ForeignCodeError, match="ended with status 3"):
        call_each(code.exit_or_run, [(3600,), (0,), (3600,)], limits=Limits(seconds=3600))


def test_what_it_prints_is_no_answer_and_what_it_writes_is_gone() -> None:
    assert call(code.write_to_standard_output) == "real"
    folders = call(code.write_here)
    assert len(set(folders)) == 1
    assert not Path(folders[0]).exists()


def test_a_command_leaves_its_output_and_status(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w+b") as log:
        assert run(["/bin/sh", "-c", "pwd; echo $HOME; exit 7"], log, cwd=tmp_path) == 7
    where, home = (tmp_path / "log").read_text().split()
    assert (where, Path(home).exists()) == (str(tmp_path.resolve()), False)


def test_without_namespaces_it_runs_and_the_user_is_told_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`enter.py` with a kernel that refuses all of them."""
    shutil.copytree(runner._HERE, tmp_path / "foreign")
    script = tmp_path / "foreign" / "enter.py"
    script.write_text(script.read_text().replace('_call("unshare", kinds)', 'raise OSError("unshare: refused")'))
    monkeypatch.setattr(runner, "ENTER", script)
    monkeypatch.setattr(runner, "_shared", [])
    assert call(code.write_to_standard_output) == "real"
    assert "could read what your other processes hold (unshare: refused)" in unprotected()
    with pytest.raises(ForeignCodeError, match="was not done within 1 s"):
        call(code.run_without_end, limits=Limits(seconds=1))


class Pair(NamedTuple):
    left: int
    right: str


@dataclass(frozen=True)
class Record:
    place: Path
    pairs: dict[int, tuple[Pair, ...]]
    kind: Literal["a", "b"] = "a"
    size: float | None = None


def test_values_travel_by_their_types() -> None:
    record = Record(Path("/x"), {7: (Pair(1, "one"), Pair(2, "two"))}, "b", 2)
    assert decode(json.loads(json.dumps(encode([record]))), list[Record], "it") == [record]
    document = encode(record)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"place": 1}, "it.place is not str, but 1"),
        ({"pairs": {"x": []}}, "it.pairs is not a number"),
        ({"pairs": {"1": [[1]]}}, r"it.pairs.1\[0\] is not 2 values, but a list"),
        ({"pairs": {"1": [[True, "x"]]}}, r"it.pairs.1\[0\]\[0\] is not int, but True"),
        ({"kind": ["a"]}, "it.kind is not one of"),
        ({"size": "big"}, "it.size is not float, but 'big'"),
        ({"more": 1}, "it is not an object with"),
    ]
    for change, words in changes:
        with pytest.raises(ValueError, match=words):
            decode({**document, **change}, Record, "it")
