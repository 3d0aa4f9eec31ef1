"""Stand-ins for /sys of hosts with GPUs: the trees of tests/data/health, each a readable file with a line a file."""

from __future__ import annotations

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
