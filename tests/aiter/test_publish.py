"""AITER's own repository as the checkout: its merge read at several dates, and a branch held to its own checks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from orchestrator.publish.aiter_publication import open_aiter_publication
from orchestrator.publish.publication import PublishRequest, publish_winners
from orchestrator.tables.aiter_build import Build
from orchestrator.tables.table import read_table
from tests.aiter.checkout import AITER_GIT, commit_of, needs_checkout, take_out
from tests.aiter.driven import make
from worker.families import FAMILIES

pytestmark = needs_checkout
NEWEST = "e4048607a5"
A4W4 = FAMILIES["a4w4_blockscale"]
MNK = ("M", "N", "K")
MERGES = {
    # (model_configs, a key twice stops it, one header, the key's columns)
    "v0.1.7": (True, False, True, MNK),
    "94a6edda3a": (True, True, True, ("cu_num", *MNK)),
    "v0.1.12.post2": (True, True, True, ("gfx", "cu_num", *MNK)),
    NEWEST: (True, True, False, ("gfx", "cu_num", *MNK)),
}


@pytest.mark.parametrize("version", MERGES)
def test_the_merge_at_aiters_start_is_read_from_its_files(version: str, tmp_path: Path) -> None:
    take_out(version, tmp_path, "aiter/configs", "aiter/jit", "csrc", ":(glob)hsa/**/*.csv")
    build = Build(tmp_path)
    start = build.merge_rules(A4W4)
    assert (
        start.merges_model_configs,
        start.stops_at_repeated_key,
        start.stops_at_other_columns,
        start.key_columns,
    ) == MERGES[version]
    assert {"gfx942", "gfx950"} <= build.chips
    if version == NEWEST:
        without_list = FAMILIES["batched_gemm_a8w8_blockscale_mxscale"]
        assert not build.merge_rules(without_list).stops_at_repeated_key
        for family in FAMILIES.values():
            own = build.header(family)
            assert not own or family.two_stages or own == family.tuned_header, family.name


def test_a_branch_of_the_real_repository_passes_aiters_own_checks(tmp_path: Path) -> None:
    """A row of another model's table at half its time with another kernel, and one that AITER lacks."""
    root, python = make(tmp_path / "real", NEWEST)  # a Python that imports AITER on this CPU
    clone = tmp_path / "aiter"
    subprocess.run(["git", "clone", "-q", "--shared", "--no-checkout", AITER_GIT, str(clone)], check=True, timeout=300)
    words = ["update-ref --no-deref HEAD " + commit_of(NEWEST), "config user.name Person", "config user.email a@person"]
    for word in words:
        subprocess.run(["git", "-C", str(clone), *word.split()], check=True)
    model = "aiter/configs/model_configs/{}_a4w4_blockscale_{}_gemm.csv"
    shipped = read_table(root / model.format("kimik3", "tuned"), A4W4, lenient=True)
    rows = [shipped.cells(r) for r in shipped.rows]
    other = next(r for r in rows if r["kernelName"] != rows[0]["kernelName"])
    faster = rows[0] | {n: other[n] for n in ("kernelId", "kernelName")} | {"us": f"{float(rows[0]['us']) / 2:.4f}"}
    table = tmp_path / "mine_a4w4_blockscale_tuned_gemm.csv"
    lines = [shipped.header, faster.values(), (rows[0] | {"M": "77"}).values()]
    table.write_text("".join(",".join(line) + "\n" for line in lines))
    request = PublishRequest([table], clone, "mine", tmp_path / "out", "gemmfleet/mine", python=str(python))
    found = publish_winners(request, open_aiter_publication([table], None))
    assert found.ok
    assert {name: result for name, result, _ in found.checks} == {
        "`db check --build` of gemmfleet, a4w4_blockscale": "safe in this branch, over all tables that it merges",
        "`test_csv_validation`": "passes",
        "`test_config_shape_collision`": "passes",
    }
    assert found.files == {
        model.format("kimik3", "tuned"): {"edited": 1},
        model.format("mine", "tuned"): {"added": 1},
        model.format("mine", "untuned"): {"shapes": 2},
    }
