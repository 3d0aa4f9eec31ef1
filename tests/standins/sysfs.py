"""Stand-ins for /sys of hosts with GPUs: the trees of tests/data/health, each a readable file with a line a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.paths import TEST_DATA

DATA = TEST_DATA / "health"


def unfold(name: str, root: Path) -> Path:
    """Write the tree of that name below `root` and return it."""
    for line in (DATA / f"{name}.tree").read_text().splitlines():
        if line.startswith("#") or not line:
            continue
        if " -> " in line:
            path, _, target = line.partition(" -> ")
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(target)
        else:
            path, _, content = line.partition(" = ")
            put(root / path, content)
    return root


def put(path: Path, content: str) -> None:
    """Write a file of sysfs; a backslash and n stand for a new line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content.replace("\\n", "\n") + "\n")


def add_gpus(root: Path, minors: Sequence[int] = (128, 129)) -> Path:
    """Write the topology of MI355X with these render minors below `root`, which is returned."""
    for number, minor in enumerate(minors, 1):
        node = root / f"class/kfd/kfd/topology/nodes/{number}"
        put(
            node / "properties",
            f"simd_count 1024\\nsimd_per_cu 4\\ngfx_target_version 90500\\ndrm_render_minor {minor}",
        )
    return root
