"""Workers in an image by Apptainer (options: apptainer.org/docs/user, `apptainer exec`). Never run by us."""

from __future__ import annotations

from typing import Any

from orchestrator.engine.process import create, scripts
from orchestrator.engine.pyxis import conflicts
from orchestrator.engines import EngineSpec
from orchestrator.transport.base import quote


def _enter(node: Any) -> str:
    """Shell words that run a command in the image; `$mounts` is what it must see."""
    image = quote(f"docker://{node.image}")
    return f'apptainer exec --rocm --no-home --bind "$mounts" --pwd "$PWD" {image}'


SPEC = EngineSpec(
    name="apptainer", scripts=scripts(), create=create, sections=("image",), conflicts=conflicts, enter=_enter,
    needs=frozenset({"tar", "find", "flock", "setsid"}),
)  # fmt: skip
