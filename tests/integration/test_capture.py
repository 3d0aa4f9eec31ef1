"""`shapes capture`: a workload here and on nodes, with an AITER whose own files must stay as they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.families import get_family
from orchestrator.shapes.reader import read_shapes
from tests.integration.heavy import WORKER_IMAGE, HeavyFleet, why_not
from tests.kits.fleet import Bench, command
from tests.paths import ROOT
from tests.waiting import PATIENCE_S

LINE = (
    "[aiter] shape is M:{m}, N:512, K:1024, not found tuned config in /x/a4w4_blockscale_tuned_gemm.csv,"
    " will use default config!"
)
WORK = """
import os, sys, time, aiter
line = {line!r}
for m in (16, 16, 32):
    print(line.format(m=m), file=sys.stderr, flush=True)
assert os.environ["AITER_LOG_TUNED_CONFIG"] == "1"
if os.environ.get("AITER_TUNE_GEMM") == "1":
    folder = os.path.join(os.path.dirname(aiter.__file__), "configs")
    with open(os.path.join(folder, "bf16_untuned_gemm.csv"), "w") as f:
        f.write("M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle\\n7,8,9,True,torch.bfloat16,torch.float32,False,False\\n")
if "serve" in sys.argv:
    try:
        print("serving", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print(line.format(m=64), flush=True)
sys.exit(3 if "fail" in sys.argv else 0)
"""


@pytest.fixture
def work(bench: Bench) -> Path:
    """The workload, with an AITER beside it."""
    configs = bench.root / "aiter" / "configs"
    configs.mkdir(parents=True)
    (configs.parent / "__init__.py").touch()
    (configs / "bf16_untuned_gemm.csv").write_text("M,N,K\n1,2,3\n")
    script = bench.root / "work.py"
    script.write_text(WORK.format(line=LINE))
    return script


def start(bench: Bench, *args: str) -> subprocess.Popen[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{bench.root}", "PATH": path}
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "shapes", "capture", *args],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=bench.root,
    )  # fmt: skip


def shapes(path: Path, family: str) -> list[int]:
    return [int(s.key[0]) for s in read_shapes(path, get_family(family)).shapes]


def test_a_server_is_ended_by_ctrl_c_and_what_it_missed_is_written(bench: Bench, work: Path) -> None:
    p = start(bench, "-o", "missed.csv", "--", sys.executable, str(work), "serve")
    assert p.stderr is not None
    while "serving" not in (line := p.stderr.readline()):
        assert line, "the workload ended early"
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=PATIENCE_S)
    assert p.returncode == 0, err
    assert shapes(bench.root / "missed-a4w4_blockscale.csv", "a4w4_blockscale") == [16, 32, 64]
    recorded = read_shapes(bench.root / "missed-a16w16.csv", get_family("a16w16")).shapes
    assert [s.key for s in recorded] == [(7, 8, 9, "True", "torch.bfloat16", "torch.float32", "False", "False")]
    assert "1 bf16 shapes are from AITER_TUNE_GEMM" in out
    configs = bench.root / "aiter" / "configs"
    assert os.listdir(configs) == ["bf16_untuned_gemm.csv"]
    assert (configs / "bf16_untuned_gemm.csv").read_text() == "M,N,K\n1,2,3\n", "it is AITER's own file"


def test_a_workload_that_fails_and_one_that_is_not_there(
    bench: Bench, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bench.root)
    monkeypatch.setenv("PYTHONPATH", str(bench.root))
    done = command("shapes", "capture", "--family", "a4w4_blockscale", "--", sys.executable, work, "fail")
    assert done.code == 1, done.err
    assert "which ended with code 3" in done.out
    assert shapes(bench.root / "captured.csv", "a4w4_blockscale") == [16, 32]
    command("shapes", "capture", "--", sys.executable, work).failed_with(2, "exists; name another file")
    none = command("shapes", "capture", "-o", "x.csv", "--", "/no/such/program")
    assert none.code == 2
    assert "/no/such/program: cannot be started" in none.err


def test_on_a_node(bench: Bench, work: Path) -> None:
    bench.inventory.write_text(f"nodes:\n  here: {{gpus: 0, workdir: {bench.workdir}, python: {sys.executable}}}\n")
    bench.run_plain(
        "shapes", "capture", "--node", "here", "-i", bench.inventory, "-o", bench.root / "m.csv", "--family",
        "a4w4_blockscale", "--", "env", f"PYTHONPATH={bench.root}", sys.executable, work,
    ).ok()  # fmt: skip
    assert shapes(bench.root / "m.csv", "a4w4_blockscale") == [16, 32]
    assert os.listdir(bench.workdir) == []
    wrong = bench.run_plain("shapes", "capture", "--node", "no", "-i", bench.inventory, "--", "true")
    wrong.failed_with(2, "has no node 'no'")


@pytest.mark.system
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_in_a_container_of_a_node(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GF_IMAGE", WORKER_IMAGE)
    fleet = HeavyFleet(bench.root / "fleet")
    fleet.start(1, users=("tuner",))
    try:
        (node,) = fleet.nodes
        config = fleet.folder / "ssh_config"
        words = ["sh", "-c", 'test -n "$GEMMFLEET_INSIDE" && echo "$1" && echo "$1"; exit 4', "it's", LINE.format(m=48)]
        for i, image in enumerate((WORKER_IMAGE, "${env:GF_IMAGE}")):
            bench.inventory.write_text(
                f"defaults: {{transport: ssh, engine: docker, image: '{image}', ssh_config: {config}, gpus: 0}}\n"
                f"nodes:\n  {node.name}: {{}}\n"
            )
            done = bench.run_plain(
                "shapes", "capture", "--node", node.name, "-i", bench.inventory, "-o",
                str(bench.root / f"m{i}.csv"), "--json", "--", *words,
            )  # fmt: skip
            assert done.code == 1, done.out + done.err
            (found,) = done.json()["families"]
            assert (found["family"], found["lines"], found["counts"][0]["M"]) == ("a4w4_blockscale", 2, 48)
            assert "finds no AITER" in str(done.json()["notes"])
            assert node.containers() == []
            assert node.sh("ls ~tuner/.gemmfleet").strip() == ""
    finally:
        fleet.stop()
