"""A finished run of an engine's tuner, as a user has it on disk: ledger, results, `configs/vllm`.

    folder = engine_run(tmp_path / "runs" / "r1", LAYER, H200, {(1, ""): (20.6, 19.3), (2, ""): (20.2, None)})

Times are microseconds of today's config and of the new one by (M, routing); None: the new one was not measured there.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.configs.winners import write_winners
from orchestrator.families import get_family
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.results.export import export, make_provenance
from orchestrator.results.run_results import RunResults
from orchestrator.shapes.model import Key, Shape, render_shapes
from tests.kits.results import Run, ended, row, started
from tests.standins.aiter.checkout import commit, git
from tests.support.engines import tree
from worker.protocol import record
from worker.triton_configs.engine_package import EngineDevice, Layer
from worker.triton_configs.point_record import ConfigTime, PointRecord
from worker.triton_configs.serving_engine import load_engine

NEW = {
    "BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8, "num_warps": 8, "num_stages": 5,
}  # fmt: skip
Times = Mapping[tuple[int, str], tuple[float, float | None]]


def engine_run(
    folder: Path,
    layer: Layer,
    device: EngineDevice,
    times: Times,
    counts: Mapping[int, int] | None = None,
    project: str = "vllm",
    new: Mapping[str, Any] = NEW,
) -> Path:
    """The folder of a run that measured `layer`. `counts`: calls of the workload by M, whose M are the run's shapes;
    without them all M are. `new`: the new config."""
    engine = load_engine(tree(project), device)
    facts = {"project": project, "version": engine.version, "source": engine.source_hash(layer.op)}
    file = {**facts, "layer": asdict(layer), "device": asdict(device), "file": engine.file_name(layer)}
    calls = counts or dict.fromkeys(sorted({m for m, _ in times}), 1)
    family = get_family("fmoe" if layer.op == "moe" else "a8w8_blockscale")
    shapes = [Shape(i, _key_of(layer, m)) for i, m in enumerate(calls, 1)]
    about = {"gfx": f"sm_{device.arch}", "cu_num": 132, "device": device.name, "torch": "2.11.0", "cuda": "13.0"}
    about |= {"triton": "3.6.0", "driver": "580.95", "engine": facts}
    folder.mkdir(parents=True)
    with Run(folder, groups=(tuple(shape.id for shape in shapes),), family=family, asked=shapes) as run:
        with run.ledger.transaction():
            run.ledger.set_meta("tuner", project)
        run.says(
            record("worker_started", 0.5, info={"pid": 7}),
            record("tuner_ready", 0.6, tuner=project, device=about, seconds=0.1),
        )
        run.send("g0001-1")
        run.says(started("g0001-1") | {"device": about})
        for (m, label), (old_us, new_us) in times.items():
            measured = [ConfigTime(engine.config(layer, m), old_us, old_us, 0.0)]
            if new_us is not None:
                measured.append(ConfigTime(dict(new), new_us, new_us, 0.001))
            point = PointRecord(file, m, label, float(calls.get(m, 0)), measured).to_document()
            run.says(record("point_timed", 1.0, attempt="g0001-1", shape=1, point=point))
        for shape in shapes:
            m = int(shape.key[0])
            best = min(us for (at, _), pair in times.items() for us in pair if at == m and us is not None)
            run.says(
                record("shape_started", 1.0, attempt="g0001-1", shape=shape.id),
                row("shape_tuned", "g0001-1", shape.id, us=best, kernelName="vllm_x", libtype="triton"),
            )
        run.says(ended("g0001-1"))
        config = RunConfig(folder.name, 0.0, ["tune", "shapes.csv", "--tuner", project], "", "", "", "", "", "")
        config.write(folder / "run.yaml")
        results = RunResults.read(run.ledger)
        export(results, RunPaths(folder), make_provenance(results, config))
        write_winners(run.ledger, folder)
    if counts:
        by_key = {shape.key: counts[int(shape.key[0])] for shape in shapes}
        (folder / "annotations.csv").write_text(render_shapes(by_key, family, by_key))
    return folder


def _key_of(layer: Layer, m: int) -> Key:
    """A shape's key of the families that the tuner has."""
    if layer.op == "linear":
        return (m, layer.n, layer.k)
    scale = "QuantType.No"
    if layer.dtype:
        scale = "QuantType.per_1x128" if layer.block else "QuantType.per_Tensor"
    operands = "torch.float8_e4m3fn" if layer.dtype else "torch.bfloat16"
    sizes = (m, layer.k, layer.n, layer.e, layer.topk)
    return (*sizes, "ActivationType.Silu", "torch.bfloat16", operands, operands, scale, 1, 0)


def repository(folder: Path, root: Path) -> Path:
    """A git repository whose branch main has the files of `root`, such as a tree of `tests.support.engines.copy`."""
    shutil.copytree(root, folder)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "config", "user.name", "A Person")
    git(folder, "config", "user.email", "a@person")
    commit(folder, "base")
    return folder
