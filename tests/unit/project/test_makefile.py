"""A mistyped variable or target of make is an error; without the check it would tune the default shapes."""

from __future__ import annotations

import os
import subprocess

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
        (["tune", "SHAPES=my.csv", "TUNNER=aiter"], ["unknown variable TUNNER: did you mean TUNER?"]),
        (["tune", "my.csv"], ["my.csv is not a target: write SHAPES=my.csv"]),
        (["tune", "examples/llm.csv"], ["examples/llm.csv is not a target: write SHAPES=examples/llm.csv"]),
        (["nodes", "fleet.yaml"], ["fleet.yaml is not a target: write INVENTORY=fleet.yaml"]),
        (["tun", "INV=f.yaml"], ["variable INV: did you mean INVENTORY?", "tun is not a target: did you mean tune?"]),
        (["tune", "qqqq=1"], ["unknown variable qqqq: there are SHAPES INVENTORY FAMILY"]),
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
    "words",
    [
        ["tune", "SHAPES=my.csv", "ARGS=--limit 3 -O SHAPE=3 my.csv"],
        ["-j4", "-k", "tune", "PYTHON=python3", "SHELL=/bin/bash", "MAKEFLAGS=s", "PATH=/usr/bin:/bin"],
        ["unit", "SYSTEM=1", "FULL=1", "KUBE_BIN=/x", "HIP_VISIBLE_DEVICES=3", "PYTHONPATH=x", "PIP_INDEX_URL=x"],
        ["plan"],
        ["help"],
        [],
    ],
)
def test_what_is_right_passes(words: list[str]) -> None:
    done = make(*words)
    assert (done.returncode, done.stderr) == (0, "")
