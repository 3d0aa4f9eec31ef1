"""`verify` on nodes whose AITER is a stand-in of a date."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.paths import RunConfig
from tests.kits.fleet import Bench
from tests.standins.aiter import Tree, make_tree
from tests.standins.aiter.operators import make_operators
from tests.standins.sysfs import add_gpus

BF16 = "torch.bfloat16"
MOE = (
    "cu_num,token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1,us,"
    "kernelName1,kernelName2"
)
HEADER = "gfx,cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio"


def node(bench: Bench, date: str, faults: Mapping[str, Any] | None = None, gpus: str = "0") -> Tree:
    """An inventory of one node, this machine, with that AITER."""
    tree = make_tree(bench.root / date, date, faults)
    bench.inventory.write_text(
        f"nodes:\n  here:\n    python: {tree.python}\n    gpus: {gpus}\n    workdir: {bench.workdir}\n"
        f'    env: {{PATH: "{tree.site}/bin:/usr/bin:/bin"}}\n    aiter: {{root: {tree.root}}}\n'
    )
    return tree


def table(bench: Bench, *ms: int, cu_num: int = 256) -> Path:
    path = bench.root / "a4w4_blockscale_tuned_gemm.csv"
    rows = [f"gfx950,{cu_num},{m},512,1024,21,0,5.0,_ZN5aiter_k{m},9.9,8.8,0.0" for m in ms]
    path.write_text("\n".join((HEADER, *rows)) + "\n")
    return path


def test_every_slot_proves_its_share(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMFLEET_SYS", str(add_gpus(bench.root / "sys")))
    node(bench, "newest", gpus="[0, 1]")
    done = bench.run("verify", "-v", "-i", bench.inventory, "--table", table(bench, 64, 128, 192), "--json").ok()
    rows = done.json()["nodes"][0]["rows"]
    assert [(r["M"], r["verdict"], r["selected"]) for r in rows] == [(m, "ok", True) for m in ("64", "128", "192")]
    for slot in "01":
        assert f"[here] {slot}: GEMMFLEET-VERIFY" in done.err
    assert not list(bench.workdir.iterdir()), "the node folder is gone"


def test_a_run_is_verified_on_its_own_nodes(bench: Bench) -> None:
    node(bench, "newest")
    rows = table(bench, 64)
    run = bench.runs / "20261122-000000-abcd"
    run.mkdir(parents=True)
    (run / "tuned.csv").write_bytes(rows.read_bytes())
    (run / "provenance.json").write_text('{"family": "a4w4_blockscale"}')
    config = RunConfig(run=run.name, created=0.0, argv=[], version="0", family="a4w4_blockscale", tuner="aiter",
        shapes="s.csv", shapes_sha256="", inventory="i.yaml", limit=None, db=None, retune=False)  # fmt: skip
    config.write(run / "run.yaml")
    bench.run("verify", run.name).failed_with(2, "has no inventory")
    (run / "inventory.yaml").write_bytes(bench.inventory.read_bytes())
    done = bench.run("verify", run.name[:12]).ok()
    assert "here: 1 of 1 row proven (AITER of unknown version in /" in done.out
    bench.run("verify", "--table", rows).failed_with(2, "-i INV")


def test_wrong_rows_are_named_and_those_of_another_chip_or_tuner_are_refused(bench: Bench) -> None:
    node(bench, "newest", {"shapes": [{"when": {"M": 128}, "kernels": "all", "do": "wrong"}]})
    done = bench.run("verify", "-i", bench.inventory, "--table", table(bench, 64, 128), "--json")
    assert done.code == 1
    rows = {r["M"]: r for r in done.json()["nodes"][0]["rows"]}
    assert (rows["64"]["verdict"], rows["128"]["verdict"]) == ("ok", "mismatch")
    assert "err_ratio" in rows["128"]["why"]
    done = bench.run("verify", "-i", bench.inventory, "--table", table(bench, 64, cu_num=80))
    assert done.code == 1
    for words in ("0 of 1 row proven", "64x512x1024: not used by the lookup, not run"):
        assert words in done.out
    path = table(bench, 64)
    path.write_text(path.read_text() + "gfx950,256,65,512,1024,0,0,5.0,torch_lut256_t2,9.9,8.8,0.0\n")
    done = bench.run("verify", "-i", bench.inventory, "--table", path)
    done.failed_with(2, f"{path}:3: torch_lut256_t2 is a kernel of gemmfleet's")


def operators(bench: Bench, tree: Tree) -> None:
    """Put operators into a tree, which a real torch computes."""
    make_operators(tree.root, "old")
    core = tree.root / "aiter/_core.py"
    core.write_text(core.read_text().replace("what = fault(op)", 'what = fault(f"{op}-{x.shape[0]}")'))
    bench.inventory.write_text(bench.inventory.read_text().replace(str(tree.python), sys.executable))


def test_an_aiter_without_run_config_runs_the_operator_itself_and_says_so(bench: Bench) -> None:
    operators(bench, node(bench, "runbook"))
    rows = table(bench, 64, 128)
    done = bench.run("verify", "-i", bench.inventory, "--table", rows).ok()
    assert "here: 2 of 2 rows proven" in done.out
    assert "; ran the operator itself: this AITER has no --run_config (it came on 2026-04-14))" in done.out
    assert not list(bench.workdir.iterdir()), "the node folder is gone"
    text = bench.inventory.read_text()
    for fault, verdict, why in (("segv", "error", "SIGSEGV"), ("wrong", "mismatch", "of its elements are off")):
        bench.inventory.write_text(text.replace("env: {", f"env: {{STANDIN_FAULT: 'gemm_a4w4-64:{fault}', "))
        done = bench.run("verify", "-i", bench.inventory, "--table", rows, "--json")
        assert done.code == 1, done.out + done.err
        bad, good = done.json()["nodes"][0]["rows"]
        assert (bad["verdict"], why in bad["why"], bad["us"]) == (verdict, True, None)
        assert (good["verdict"], good["selected"], good["us"] > 0) == ("ok", True, True)
    bench.inventory.write_text(text)
    done = bench.run("verify", "-i", bench.inventory, "--table", table(bench, 64, cu_num=80))
    assert (done.code, "64x512x1024: not used by the lookup, ok" in done.out) == (1, True), done.out


@pytest.mark.parametrize("date", ["newest", "runbook"])
def test_an_aiter_that_cannot_be_imported_is_one_line(bench: Bench, date: str) -> None:
    tree = node(bench, date)
    (tree.root / "aiter/__init__.py").write_text("import nothing_built\n")
    done = bench.run("verify", "-i", bench.inventory, "--table", table(bench, 64, 128))
    fault = f"the AITER in {tree.root} cannot be imported: ModuleNotFoundError: No module named 'nothing_built'"
    assert (done.code, done.out) == (3, "")
    assert done.err == f"error: no node could verify: here: {fault}\n"


def test_an_image_that_cannot(bench: Bench) -> None:
    node(bench, "runbook")
    moe = bench.root / "tuned_fmoe.csv"
    moe.write_text(f"{MOE}\n256,16,7168,256,8,2,ActivationType.Silu,{BF16},{BF16},{BF16},QuantType.No,1,0,9.0,a,b\n")
    for path, code, words in (
        (moe, 3, "this AITER has no --run_config (it came on 2026-04-14), and bench has no inputs for fmoe"),
        (table(bench), 2, "has no row"),
    ):
        done = bench.run("verify", "-i", bench.inventory, "--table", path)
        assert (done.code, words in done.err) == (code, True), done.err
