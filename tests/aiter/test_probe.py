"""The probe against the real files of every version."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.aiter.checkout import AITER_GIT, git, needs_checkout
from tests.aiter.versions import VERSIONS, Version, read, tree_of
from worker.families import FAMILIES
from worker.tuners.aiter.findings import Findings, inspect
from worker.tuners.aiter.workarounds import WORKAROUNDS, apply_workarounds

pytestmark = needs_checkout


@pytest.fixture(scope="module", params=VERSIONS, ids=lambda v: v.tag)
def version(request: pytest.FixtureRequest) -> Version:
    asked: Version = request.param
    return asked


@pytest.fixture(scope="module")
def found(version: Version, tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return inspect(tree_of(version.tag, tmp_path_factory.mktemp("aiter")))


def test_facts_and_workarounds_of_the_real_files(version: Version, found: Findings, tmp_path: Path) -> None:
    assert read(version.tag, found) == version
    before = {p: p.read_bytes() for p in found.tree.root.rglob("*") if p.is_file()}
    names = [n for n in WORKAROUNDS if found.workarounds[n].verdict == "needed"]
    scratch, applied = apply_workarounds(found, names, tmp_path / "scratch")
    assert "needed" not in {v.verdict for v in inspect(scratch.tree).workarounds.values()}
    assert all(f["sha256_before"] != f["sha256_after"] for a in applied for f in a["files"])
    assert before == {p: p.read_bytes() for p in before}


def tags() -> list[str]:
    """Every release from v0.1.5 on that the clone has."""
    names = git("tag", "--list", "v0.1.*").decode().split() if AITER_GIT else []
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
    assert all(v.evidence for v in found.workarounds.values())
