"""Files that a test needs: some texts in a folder, a program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_files(root: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files by their path below `root`, which is returned, with the folders above them."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def write_program(path: Path, text: str) -> Path:
    """Write an executable file, in place of a program that a test cannot have, with the folder above it."""
    write_files(path.parent, {path.name: text})
    path.chmod(0o755)
    return path
