"""The probe's answers for real trees of AITER: against the table, and against the scripts' own argument parsers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.aiter.checkout import AITER_GIT, git, needs_checkout
from tests.aiter.versions import VERSIONS, Version, read, tree_of
from worker.families import FAMILIES
from worker.tuners.aiter.findings import Findings, inspect
from worker.tuners.aiter.workarounds import WORKAROUNDS, prepare

pytestmark = needs_checkout

PARSERS = Path(__file__).with_name("parsers.py")
A4W4 = "a4w4_blockscale"


@pytest.fixture(scope="module", params=VERSIONS, ids=lambda v: v.tag)
def version(request: pytest.FixtureRequest) -> Version:
    asked: Version = request.param
    return asked


@pytest.fixture(scope="module")
def found(version: Version, tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return inspect(tree_of(version.tag, tmp_path_factory.mktemp("aiter")))


def test_the_table(version: Version, found: Findings) -> None:
    assert read(version.tag, found) == version
    link = found.workarounds["asm_dir_symlink"].verdict
    assert link == ("needed" if version.asm_dir == "hsa" else "harmless")
    assert found.problems == ()


def test_options_and_columns_are_what_the_script_s_own_parser_has(found: Findings) -> None:
    """The flat reader finds what the parser has at run time."""
    for name, script in found.families.items():
        argv = [sys.executable, str(PARSERS), str(found.tree.root), str(script.path)]
        done = subprocess.run(argv, cwd=found.tree.root, capture_output=True, text=True, check=False, timeout=60)
        told = json.loads(next(line for line in done.stdout.split("\n") if line.startswith("{")))
        assert told.get("options") == dict(script.flags), f"{name}: {told.get('error')}"
        if told["keys"] is not None and found.promised:
            assert tuple(k for k in told["keys"] if k not in ("gfx", "cu_num")) == script.columns, name


def test_workarounds_on_the_real_files(version: Version, found: Findings, tmp_path: Path) -> None:
    before = {p: p.read_bytes() for p in found.tree.root.rglob("*") if p.is_file()}
    scratch, applied = prepare(found, FAMILIES[A4W4], [{"M": 64, "N": 256, "K": 384}], tmp_path / "scratch")
    wanted = [n for n in WORKAROUNDS if found.workarounds[n].verdict == "needed"]
    assert [a["name"] for a in applied] == wanted
    if scratch is not None:
        after = {n: v.verdict for n, v in inspect(scratch.tree).workarounds.items()}
        assert "needed" not in after.values()
        for file in (f for a in applied for f in a["files"]):
            assert file["sha256_before"] != file["sha256_after"]
    assert before == {p: p.read_bytes() for p in before}


def tags() -> list[str]:
    """Every release from v0.1.5 on that the clone has."""
    if not AITER_GIT:
        return []
    names = git("tag", "--list", "v0.1.*").decode().split()
    return [n for n in names if int(n.split(".")[2].split("-")[0].removesuffix("rc")) >= 5]


@pytest.mark.parametrize("tag", tags())
def test_every_tag_is_understood(tag: str, tmp_path: Path) -> None:
    found = inspect(tree_of(tag, tmp_path))
    assert found.problems == ()
    assert found.asm_dir in ("hsa", "hsa/{gfx}")
    assert len(found.families) >= 8
    for name, script in found.families.items():
        assert {"--untune_file", "--input_file"} & {*script.flags}, name
        ours = set(FAMILIES[name].from_aiter(script.columns))
        assert {"M", "N", "K"} <= ours or "token" in ours, name
    for name, verdict in found.workarounds.items():
        assert verdict.evidence, name
        assert not any("unknown" in e for e in verdict.evidence), name
