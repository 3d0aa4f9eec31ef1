"""make: targets have help, a mistyped word is an error (else the default shapes would be tuned), set-up keeps torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """`make -n`, without what an outer make hands down (one that knows its level says which folder it enters)."""
    outer = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", "ARGS")
    env = {k: v for k, v in os.environ.items() if k not in outer}
    return subprocess.run(["make", "-n", *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tune", "SHAPE=my.csv"], ["unknown variable SHAPE: did you mean SHAPES?"]),
        (["tune", "shapes=my.csv"], ["unknown variable shapes: did you mean SHAPES?"]),
        (["tune", "examples/llm.csv"], ["examples/llm.csv is not a target: write SHAPES=examples/llm.csv"]),
        (["status", "watch"], ["watch is not a target: write ARGS=--watch"]),
        (["status", "--", "--watch"], ["--watch is not a target: write ARGS=--watch"]),
        (["nodes", "fleet.yaml"], ["fleet.yaml is not a target: write INVENTORY=fleet.yaml"]),
        (["tun", "INV=f.yaml"], ["variable INV: did you mean INVENTORY?", "tun is not a target: did you mean tune?"]),
        (["tune", "it's=1", "xyzzy"], ["variable it's: there are", "xyzzy is not a target: make help lists them"]),
    ],
)  # fmt: skip
def test_a_mistyped_word_is_an_error_with_the_right_spelling(words: list[str], says: list[str]) -> None:
    done = make(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == len(says) + 1, done.stderr
    for sentence in says:
        assert sentence in done.stderr


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["tune", "SHAPES=my.csv", "ARGS=--limit 3 -O SHAPE=3"], "tune 'my.csv' --limit 3 -O SHAPE=3"),
        (["tune", "SHAPES=a.csv  b.csv", "TUNER=vllm"], "tune 'a.csv' 'b.csv' --tuner 'vllm'"),
        (["-j4", "-k", "plan", "SHELL=/bin/bash", "PATH=/usr/bin:/bin", "HIP_VISIBLE_DEVICES=3"], "--plan"),
        (["merge", "DB=t.csv", "RUN=r1"], "db merge \"r1\" --into 't.csv'"),
        (["export", "DB=t.csv", "FAMILY=a8w8", "ARGS=--env"], "db export 't.csv' --family 'a8w8' --env"),
        (["verify", "RUN=r1", "INVENTORY=i.yaml"], "verify r1 -i 'i.yaml'"),
        (["compare", "GOLDEN=a.csv", "TOT=b.csv"], "compare 'a.csv' 'b.csv'"),
    ],
)
def test_targets_are_the_commands(words: list[str], command: str) -> None:
    done = make(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert command in " ".join(done.stdout.split())


def test_the_name_of_a_list_may_hold_spaces(tmp_path: Path) -> None:
    words = "tune", f"SHAPES={tmp_path}/a list.csv"
    assert f"tune '{tmp_path}/a' 'list.csv'" in make(*words).stdout
    (tmp_path / "a list.csv").touch()
    assert f"tune '{tmp_path}/a list.csv'" in make(*words).stdout


def test_every_target_has_help() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^TARGETS +:= (.+)$", text, re.M)
    described = set(re.findall(r"^([a-z-]+):.*## ", text, re.M))
    assert phony
    assert set(phony[1].split()) - described <= {"system-packages", "shapes-named"}
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [t for t in described if not re.search(rf"^  {t} ", shown, re.M)] == []


@pytest.mark.parametrize(
    ("target", "there", "extras"),
    [
        ("torch", "", "[torch]"), ("torch", "torch", ""), ("dev", "", "[torch,triton,live,kubernetes,dev]"),
        ("dev", "torch triton", "[live,kubernetes,dev]"),
    ],
)  # fmt: skip
def test_the_torch_and_triton_that_are_there_are_not_installed_again(
    tmp_path: Path, target: str, there: str, extras: str
) -> None:
    """`.venv/bin/python` is a stand-in: these modules import, and pip writes down what it is asked for."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f'"-c import "*) case " {there} " in *" ${{2#import }} "*) ;; *) exit 1 ;; esac ;;\n'
        '"-m pip install"*) for last; do :; done; echo "$last" >asked ;;\n'
        "*) exit 9 ;;\nesac\n"
    )
    python.chmod(0o755)
    env = {"PATH": os.environ["PATH"]}
    subprocess.run(["make", f".venv/.installed-{target}"], cwd=tmp_path, check=True, env=env, capture_output=True)
    assert (tmp_path / "asked").read_text() == f".{extras}\n"
    (tmp_path / "asked").unlink()
    parts = ("", "-torch") if target == "torch" else ("", "-torch", "-live", "-dev")
    stamps = [f".venv/.installed{part}" for part in parts]
    subprocess.run(["make", *stamps], cwd=tmp_path, check=True, env=env, capture_output=True)
    assert not (tmp_path / "asked").exists(), "installed already"
