"""The software that a bench names, without importing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.files import write_files
from worker.bench.software import installed


def version_file(rocm: Path, version: str) -> Path:
    """A ROCm of this version; returns its folder."""
    return write_files(rocm, {".info/version": f"{version}\n"})


def test_only_a_rocm_that_is_named_or_in_its_usual_place_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(version_file(tmp_path / "here", "1.2.3"))
    named = version_file(tmp_path / "named", "7.2.0-43")
    assert installed({"ROCM_PATH": str(named)})["rocm"] == "7.2.0-43"
    for env in ({}, {"ROCM_PATH": ""}):
        assert installed(env).get("rocm") != "1.2.3", "the current folder is no ROCm"
