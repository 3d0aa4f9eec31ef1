"""Files of ROCm/aiter at a version, from the clone that AITER_GIT names. Nothing of it is kept."""

from __future__ import annotations

import os
import subprocess
import tarfile
from functools import cache
from io import BytesIO
from pathlib import Path

import pytest

VERSIONS = {
    "v0.1.7.post5": "22122345c0", "v0.1.8": "9402062ebd", "v0.1.9.post1": "0011ff440b", "v0.1.10": "da29487171",
    "v0.1.10.post3": "6a0e7b26cc", "v0.1.14": "bd0534e963", "v0.1.16": "0730b33fcf", "v0.1.20": "fc2e5d57fb",
    "newest": "e4048607a5",
}  # fmt: skip
"""Commits of the versions that the page of known issues speaks of, the oldest (2025-12-08) first."""
AITER_GIT = os.environ.get("AITER_GIT", "")

needs_checkout = pytest.mark.skipif(not AITER_GIT, reason="AITER_GIT names no clone of ROCm/aiter")


def commit_of(version: str) -> str:
    """The commit of a name of VERSIONS; any other name is one of git's."""
    return VERSIONS.get(version, version)


def git(*args: str) -> bytes:
    """Output of git in the clone; raises CalledProcessError."""
    folder = Path(AITER_GIT)
    at = folder / ".git" if (folder / ".git").exists() else folder
    return subprocess.run(["git", f"--git-dir={at}", *args], capture_output=True, check=True, timeout=60).stdout


@cache
def show(version: str, path: str) -> str:
    """A file at a version; raises FileNotFoundError where it had none."""
    try:
        return git("show", f"{commit_of(version)}:{path}").decode(errors="replace")
    except subprocess.CalledProcessError as e:
        raise FileNotFoundError(f"{path} at {version}: {e.stderr.decode(errors='replace').strip()}") from e


def take_out(version: str, folder: Path, *paths: str) -> None:
    """Write files or folders of a version below `folder`."""
    with tarfile.open(fileobj=BytesIO(git("archive", commit_of(version), *paths))) as tar:
        tar.extractall(folder, filter="data")
