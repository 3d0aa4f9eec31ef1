"""Shape lists: read a user's CSV, with every fault named at once, and write one.

The format is described for users in docs/how-to/shape-lists.md.
"""

from __future__ import annotations

from orchestrator.shapes.model import Shape, ShapeList, annotations_csv, describe, render_shapes
from orchestrator.shapes.reader import MAX_BYTES, read_shapes

__all__ = ["MAX_BYTES", "Shape", "ShapeList", "annotations_csv", "describe", "read_shapes", "render_shapes"]
