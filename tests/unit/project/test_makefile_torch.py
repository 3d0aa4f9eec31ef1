"""Set-up by make keeps the torch and the Triton that the user measures with."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("target", "there", "extras"),
    [
        ("torch", "", "[torch]"),
        ("torch", "torch", ""),
        ("dev", "", "[torch,triton,live,kubernetes,dev]"),
        ("dev", "torch", "[triton,live,kubernetes,dev]"),
        ("dev", "torch triton", "[live,kubernetes,dev]"),
    ],
)
def test_what_imports_is_not_installed_again(tmp_path: Path, target: str, there: str, extras: str) -> None:
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
    assert (tmp_path / ".venv" / f".installed-{target}").exists()
