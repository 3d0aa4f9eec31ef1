"""Workers in an image within a Slurm lease, by the plugin pyxis (options: github.com/NVIDIA/pyxis). Never run by us."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from orchestrator.engine import process
from orchestrator.transport.commands import quote


def _enter(node: Any) -> str:
    """Shell words that run a command in the image, as a step that shares the lease; `$mounts` is what it must see."""
    return (
        'srun --jobid="$SLURM_JOB_ID" --overlap --nodes=1 --ntasks=1 --mpi=none --unbuffered --quiet'
        f" --container-image={quote(node.image or '')}"
        ' --container-mounts="$mounts" --container-workdir="$PWD" --no-container-mount-home'
    )


def conflicts(node: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path below the node, problem and way out): it needs an image, and a lease of Slurm."""
    if node.image is None:
        yield (), f"engine: {node.engine} needs an image: add image: NAME:TAG, here or under defaults"
    if node.engine == "pyxis" and node.lease != "slurm":
        yield ("engine",), "pyxis is a plugin of Slurm: add lease: slurm, or choose engine: docker"


SPEC = replace(
    process.SPEC, name="pyxis", sections=("image",), conflicts=conflicts, enter=_enter, preflight=lambda *_: ()
)
