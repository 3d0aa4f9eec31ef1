"""Long texts of a bench travel once, by their hash."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.bench import request
from orchestrator.controller.node_plan import node_files
from orchestrator.controller.prepare import RunRequest, prepare
from orchestrator.families import get_family
from orchestrator.paths import RunConfig
from orchestrator.results.bench import redacted
from worker.protocol.bench import fetch, lodge

FP4 = get_family("a4w4_blockscale")
GIVEN = {
    "table": "M,N\n1,2\n",
    "gluon": {"aiter/x.py": "# a\n", "aiter/y.json": "{}"},
    "sides": [{"name": "a", "configs": ""}, {"name": "b", "configs": "{1}"}],
    "seed": 3,
}


def stored(texts: dict[str, str], folder: Path) -> Path:
    folder.mkdir(parents=True)
    for digest, text in texts.items():
        (folder / digest).write_text(text)
    return folder


def test_texts_become_hashes_and_come_back(tmp_path: Path) -> None:
    lodged, texts = lodge(GIVEN)
    assert len(texts) == 4
    assert "M,N" not in json.dumps(lodged)
    folder = stored(texts, tmp_path / "texts")
    assert fetch(lodged, folder) == GIVEN
    assert fetch(GIVEN, folder) == GIVEN
    digest = lodged["table"].removeprefix("sha256:")
    (folder / digest).write_text("other")
    with pytest.raises(ValueError, match="its hash differs"):
        fetch(lodged, folder)
    (folder / digest).unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        fetch(lodged, folder)


def test_a_run_holds_hashes_and_a_node_gets_each_text_once(tmp_path: Path) -> None:
    rows = "".join(f"gfx950,256,{m},512,1024,1,0,5.0,k,1,1,0\n" for m in range(1, 2000))
    (tmp_path / "t.csv").write_text("gfx,cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio\n" + rows)
    (tmp_path / "s.csv").write_text("M,N,K\n16,512,1024\n")
    options, texts = lodge(request.options([], ["aiter"], tmp_path / "t.csv"))
    asked = RunRequest(tmp_path / "s.csv", tmp_path / "runs", family=FP4.name, tuner=request.TUNER, bench=True)
    ready = prepare(replace(asked, options=options, texts=texts))
    paths = ready.create()
    config = RunConfig.read(paths.config)
    assert len(json.dumps(config.options)) < 1000
    assert paths.config.stat().st_size < 4000
    files = node_files(ready.nodes[0], config.run, config.tuner, config.options, 1.0, paths.texts)
    (text,) = [n for n in files if n.startswith("code/texts/")]
    assert b"1999,512" in files[text].data
    assert b"1999,512" not in files["node.json"].data
    assert list(files).index(text) < list(files).index(next(n for n in files if n.endswith("/complete")))
    assert config.options["table"] == redacted(config.options)["table"]
