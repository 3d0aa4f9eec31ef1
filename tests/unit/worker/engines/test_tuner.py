"""The tuner vllm as the worker sees it: in Triton's interpreter, with the kernel and the look-ups of a real wheel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backend_names import backend_name
from orchestrator.errors import InputError
from orchestrator.families import check_family, check_tuner_options, get_tuner
from orchestrator.tables.row_kernels import kind_by_names
from tests.kits.worker import of_type, run_group
from tests.support.engines import config_values, copy_without_files, linear_file, linear_folder, tree
from tests.support.marks import WITH_TORCH
from worker.protocol.paths import CACHE_ENV
from worker.triton_configs.point_record import PointRecord
from worker.tuners.base import Place
from worker.tuners.search.measuring_process import NoDeviceError
from worker.tuners.search.tile_config import tile_config

pytestmark = WITH_TORCH


def test_its_rows_are_not_taken_for_aiters() -> None:
    name = tile_config({"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128}, "vllm_").name
    assert (kind_by_names("triton", name), backend_name("a8w8_blockscale", name, libtype="triton")) == ("own", "vllm")


def run(folder: Path, ms: list[int], *, interpreted: bool = True, **options: Any) -> tuple[int, str, list[Any]]:
    keys = [{"M": m, "N": 64, "K": 256} for m in ms]
    return run_group(folder, "vllm", "a8w8_blockscale", keys, options, interpreted=interpreted)


def test_a_file_is_measured_at_many_m_each_with_its_record(tmp_path: Path) -> None:
    root = copy_without_files(tmp_path)
    wrong = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 256, "GROUP_SIZE_M": 1, "num_warps": 4}
    entries = {"1": {**wrong, "num_stages": 2}, "6": config_values(32, 64)}
    (linear_folder(root) / linear_file(64, 256)).write_text(json.dumps(entries))
    code, output, records = run(tmp_path, [5, 1], root=str(root), counts={"5x64x256": 9})
    assert code == 0, output
    tuned = {r["shape"]: r["row"] for r in of_type(records, "shape_tuned")}
    verdicts = {shape: json.loads(row["triton_config"]) for shape, row in tuned.items()}
    points = {r["point"]["m"]: PointRecord.from_document(r["point"]) for r in of_type(records, "point_timed")}
    assert {1, 4, 5, 6} <= set(points), "both ends of a range are measured"
    assert {p.count for m, p in points.items() if m in (1, 5)} == {1.0, 9.0}
    assert {p.count for m, p in points.items() if m not in (1, 5)} == {0.0}
    file = points[5].file
    assert all(point.file == file for point in points.values())
    assert (file["project"], file["version"], file["named_by"]) == ("vllm", "0.33.0", "")
    assert file["file"] == linear_file(64, 256)
    assert file["device"] == {"name": "NVIDIA H200", "arch": 90}
    layer = {"op": "linear", "n": 64, "k": 256, "e": 0, "topk": 0, "dtype": "fp8_w8a8", "block": [128, 128]}
    assert file["layer"] == layer
    assert points[1].today == ({**wrong, "num_stages": 2}, -1.0, -1.0, 1.0), "today's is wrong: no time can outweigh it"
    assert verdicts[2]["values"] is not None
    assert "today's does not run" in tuned[2]["detail"]
    assert {r["row"]["status"] for r in of_type(records, "row") if r["shape"] == 2} >= {"ok", "wrong"}
    assert points[5].today.values == config_values(32, 64)
    assert points[5].today.us > 0
    assert tuned[1]["kernelName"] == tile_config(verdicts[1]["values"] or config_values(32, 64), "vllm_").name


def test_a_wheel_an_engine_of_others_and_no_engine_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zipfile

    import torch

    from worker.tuners.engines.tuner import VllmTuner

    def tuner(root: Path) -> VllmTuner:
        made = VllmTuner()
        made.configure({"family": "a8w8_blockscale", "root": str(root)}, Place(node_dir=tmp_path))
        return made

    monkeypatch.delenv(CACHE_ENV, raising=False)
    wheel = tmp_path / "vllm-9.whl"
    package = tree("vllm")
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in package.rglob("*.py"):
            archive.write(path, path.relative_to(package))
        archive.writestr(str(linear_folder(Path()) / "none.json"), "{}")
    if not torch.cuda.is_available():
        with pytest.raises(NoDeviceError, match="torch sees no GPU here"):
            tuner(package).open()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(NoDeviceError, match=f"{tmp_path}/nothing holds neither vLLM nor SGLang"):
        tuner(tmp_path / "nothing").open()
    with pytest.raises(NoDeviceError, match="is sglang, whose kernels are others"):
        tuner(tree("sglang")).open()
    source, _ = tuner(wheel).source()
    assert source.engine().package.is_relative_to(tmp_path / "cache" / "engines")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "a16w16"}, "unknown option 'kind'"),
        ({"counts": {"1x2x3": -1}}, "not numbers of calls"),
        ({"captured_only": True}, "no captured routings; name their folder with --topk-ids DIR"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    spec = get_tuner("vllm")
    check_tuner_options(spec, {"search": "exhaustive", "root": "/opt/vllm"})
    with pytest.raises(InputError, match=words):
        check_tuner_options(spec, options)
    with pytest.raises(
        InputError, match=r"does not tune family a16w16; .*\(--tuner for a16w16: aiter, aiter-triton, torch\)"
    ):
        check_family(spec, "a16w16", {})
