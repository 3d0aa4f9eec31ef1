"""Workers in an image by Apptainer (options: apptainer.org/docs/user, `apptainer exec`). Never run by us."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.engine import process
from orchestrator.engine.pyxis import conflicts
from orchestrator.transport.commands import quote


def _enter(node: Any) -> str:
    """Shell words that run a command in the image; `$mounts` is what it must see."""
    image = quote(f"docker://{node.image}")
    return f'apptainer exec --rocm --no-home --bind "$mounts" --pwd "$PWD" {image}'


SPEC = replace(
    process.SPEC, name="apptainer", sections=("image",), conflicts=conflicts, enter=_enter, preflight=lambda *_: ()
)
