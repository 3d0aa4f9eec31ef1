"""The example of a third party's tuner: installed beside gemmfleet, shipped to nodes, tuned with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kits.fleet import Bench, read_csv
from tests.paths import ROOT
from tests.standins.installing import install

EXAMPLE = ROOT / "examples" / "numpy_tuner"
WITH_NUMPY = {"numpy_float32", "numpy_float64", "numpy_einsum"}
PLAIN = {"numpy_python_rows", "numpy_python_columns"}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return install(EXAMPLE, tmp_path / "site")


def test_tuned_by_a_process_of_this_machine(bench: Bench, site: Path) -> None:
    bench.site.append(site)
    n = bench.shapes(groups=3, per_group=2)
    table = bench.root / "own.csv"
    bench.inventory.write_text(bench.inventory.read_text().replace("tuner: replay", "tuner: numpy"))
    bench.run("tune", bench.shapes_csv, "-i", bench.inventory, "--db", table).ok()
    bench.check_books(tuned=n, failed={})
    rows = read_csv(bench.paths.root / "profile.csv")
    kernels = {r["kernelName"] for r in rows}
    assert kernels in (WITH_NUMPY, PLAIN)
    assert all(float(r["us"]) > 0 for r in rows)
    assert {r["kernelName"] for r in read_csv(table)} <= kernels
    # the node has the package from us: tune.sh sets PYTHONPATH to the code folder alone
    (code,) = (p for p in (bench.folder() / "code").iterdir() if (p / "worker").is_dir())
    assert (code / "gemmfleet_numpy" / "__init__.py").is_file()
    assert "numpy = gemmfleet_numpy:SPEC" in (code / "gemmfleet_numpy-0.dist-info" / "entry_points.txt").read_text()
