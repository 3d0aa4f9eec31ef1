from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cut_engine import DEVICES, LAYERS, cut
from tests.support.engines import ENGINES, tree
from worker.triton_configs.serving_engine import load_engine


def answers(root: Path) -> Iterator[object]:
    for device in DEVICES:
        engine = load_engine(root, device)
        for layer in LAYERS:
            yield engine.version, engine.file_name(layer), engine.table(layer), engine.source_hash(layer.op)


@pytest.mark.parametrize("project", ENGINES)
def test_a_cut_engine_answers_as_the_whole(tmp_path: Path, project: str) -> None:
    whole = list(answers(tree(project)))  # first: a process that loaded the engine before cuts the same
    files = cut(tree(project), tmp_path)
    assert len([file for file in files if file.suffix == ".py"]) < 12
    assert sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file()) < 8 << 20
    assert list(answers(tmp_path)) == whole
