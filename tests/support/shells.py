"""Rendered scripts as shells and shellcheck see them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def check(*scripts: Path) -> None:
    """All are valid shell, and shellcheck has nothing to say."""
    for path in scripts:
        for shell in ("sh", "bash"):
            subprocess.run([shell, "-n", path], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (SYSTEM=1 installs it)")
    for home in {path.parent for path in scripts}:
        argv = ["shellcheck", "-x", "-S", "warning", *(path.name for path in scripts if path.parent == home)]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=home)
        assert done.returncode == 0, done.stdout
