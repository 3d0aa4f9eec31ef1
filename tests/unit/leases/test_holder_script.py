"""The holder's script for shells, and the rows in its output."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

import pytest

from orchestrator.leases.holder import BEGIN, END, folder_word, leftovers_in, prelude, script


@pytest.mark.parametrize("workdir", ["", "~/a b", "/scratch/$(touch hacked)'"])
def test_the_script_and_the_way_into_it_pass_the_shell_and_shellcheck(tmp_path: Path, workdir: str) -> None:
    holder, way = tmp_path / "lease.sh", tmp_path / "way.sh"
    holder.write_text(script("r1", "p", workdir, out=folder_word("~/out 'put")))
    way.write_text(f"#!/bin/sh\n{prelude(workdir, '17_3')}\n")
    for shell in ("sh", "bash"):
        for path in (holder, way):
            subprocess.run([shell, "-n", path], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (SYSTEM=1 installs it)")
    done = subprocess.run(["shellcheck", "-S", "warning", holder, way], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_folders_are_one_word_for_a_shell() -> None:
    def words(folder: str) -> str:
        line = f"printf '%s|' {folder_word(folder)}"
        env = {"HOME": "/home/u x", "TMPDIR": "/t p"}
        return subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True, env=env).stdout

    assert words("~/a b") == "/home/u x/a b|"
    assert words("/a $b") == "/a $b|"
    assert words("").startswith("/t p/gemmfleet-")
    assert words("").count("|") == 1


def test_the_last_whole_archive_of_an_output_is_found() -> None:
    def block(data: bytes, end: str = END) -> bytes:
        return f"{BEGIN}\n".encode() + base64.encodebytes(data) + f"{end}\n".encode()

    assert leftovers_in(b"") is None
    assert leftovers_in(b"words\n" + block(b"x" * 200)) == b"x" * 200
    assert leftovers_in(block(b"first") + block(b"second") + b"words") == b"second"
    assert leftovers_in(block(b"cut off", "")) is None
    assert leftovers_in(f"{BEGIN}\n?\n{END}\n".encode()) is None
