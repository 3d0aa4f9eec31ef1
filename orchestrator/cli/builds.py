"""--build TREE|IMAGE: a folder with an AITER, or the name of an image that holds one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.tuned_db.aiter_build import Build


@contextmanager
def opened(build: str | None, inventory: Path | None) -> Iterator[Build | None]:
    """The build that is meant, None where none was named. Of an image its files are copied out of a container that is
    created and never started, by the Docker of this machine, or with an inventory of its first node that has one.

    Raises InputError, NodeError.
    """
    if build is None:
        yield None
        return
    from orchestrator.errors import InputError
    from orchestrator.tuned_db.aiter_build import Build

    path = Path(build).expanduser()
    if path.is_dir():
        yield Build(path, build)
        return
    if path.exists() or build.startswith(("/", "./", "../", "~")) or not build:
        raise InputError(f"--build {build}: is no folder with an AITER (a checkout, or site-packages), and no image")
    from orchestrator.image.takeout import take_out

    with tempfile.TemporaryDirectory(prefix="gemmfleet-build-") as scratch:
        take_out(build, Path(scratch), inventory)
        yield Build(Path(scratch), build)
