"""`--build IMAGE` for real: an image on a node's Docker, read out of a container that is never started."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from tests.integration.heavy import HeavyFleet
from tests.integration.heavy.bench import on_nodes
from tests.kits.fleet import Bench
from tests.standins.aiter.kernel_lists import ASM, CK, CK2, tree
from tests.unit.tables.test_export import table

pytestmark = on_nodes()
IMAGE = "test/aiter-files:1"


def archive(folder: Path, inside: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.add(folder, inside)
    return out.getvalue()


def test_the_image_of_a_node_is_read(remote: Bench, fleet: HeavyFleet, tmp_path: Path) -> None:
    root = tree(tmp_path / "aiter", built={"module_gemm_a4w4_blockscale": b"\0" + CK.encode() + b"\0"})
    (root / "hsa" / "gfx950" / "f4gemm" / f"{ASM}.co").write_bytes(b"x" * 100_000)
    (root / "aiter" / "jit" / "huge.bin").write_bytes(b"y" * 100_000)
    node = fleet.nodes[0]
    done = node.exec(["docker", "import", "-", IMAGE], stdin=archive(root, "app/aiter"))
    assert done.returncode == 0, done.stderr
    try:
        rows = {"M": 1, "kernelName": ASM}, {"M": 2, "kernelName": CK}, {"M": 3, "kernelName": CK2}
        good = table(tmp_path / "good.csv", *rows)
        asked = ["--family", "a4w4_blockscale", "--build", IMAGE, "-i", str(remote.inventory)]
        found = remote.run_plain("db", "check", good, *asked, "--json").ok()
        assert found.json()["tables"][0]["build"] == {"loads": 2, "rebuild": 1}
        bad = table(tmp_path / "bad.csv", *rows, {"M": 4, "kernelName": CK + "x"})
        refused = remote.run_plain("db", "export", bad, *asked, "--gfx", "gfx950", "--cu-num", "256")
        assert (refused.code, refused.out) == (1, "")
        assert f"1 of 4 rows cannot be loaded by {IMAGE}" in refused.err
        assert node.containers() == []
    finally:
        node.sh(f"docker image rm {IMAGE}")
    gone = remote.run_plain("db", "check", good, *asked)
    assert gone.code == 2
    assert f"--build {IMAGE}: is not a folder here" in gone.err
