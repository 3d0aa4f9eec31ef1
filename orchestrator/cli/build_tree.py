"""The files behind `--build`: a folder with an AITER (or vLLM), an image whose files are copied out, or a wheel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.files.scratch import scratch_folder
from orchestrator.tables.aiter_build import Build
from worker.triton_configs.engine_package import ServingEngineError, unpack_wheel


@contextmanager
def opened_build(build: str | None, inventory: Path | None) -> Iterator[Build | None]:
    """Yield the build of `--build TREE|IMAGE`, None without one. Raises as `opened_tree`."""
    if build is None:
        yield None
        return
    with opened_tree(build, inventory) as path:
        yield Build(path, build, whole=not Path(build).expanduser().is_dir())


@contextmanager
def opened_tree(build: str, inventory: Path | None, *, triton: bool = False) -> Iterator[Path]:
    """Yield the folder of `--build TREE|IMAGE`, which holds `aiter/`; `triton`: an image's Triton operators suffice.

    The files of an image are copied out of a container that is created and never started, by the Docker of this
    machine, or of the first node of the inventory that has the image. Raises InputError, NodeError.
    """
    path = Path(build).expanduser()
    if path.is_dir():
        yield path
        return
    with scratch_folder("gemmfleet-build-") as scratch:
        if triton and path.suffix == ".whl":
            yield _unpacked(path, scratch)
            return
        if path.exists() or not build or build.startswith(("/", "./", "../", "~")):
            raise InputError(
                f"{build}: is neither a folder with an AITER, vLLM or SGLang (a checkout, or site-packages) nor an"
                " image"
            )
        _take_out_of_image(build, inventory, scratch, triton=triton)
        yield scratch


def _unpacked(wheel: Path, scratch: Path) -> Path:
    try:
        return unpack_wheel(wheel, scratch)
    except ServingEngineError as e:
        raise InputError(str(e)) from e


def _take_out_of_image(image: str, inventory: Path | None, scratch: Path, *, triton: bool) -> None:
    from orchestrator.image.image_files import ENGINES, EVERYTHING, TRITON, take_out  # imports docker

    take_out(image, scratch, inventory, (*TRITON, *ENGINES) if triton else EVERYTHING)
