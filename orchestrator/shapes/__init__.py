"""Shape lists: reading a user's CSV, with everything that is wrong with it said at once, and writing one.

The format is described for users in docs/how-to/shape-lists.md.
"""

from __future__ import annotations

from orchestrator.shapes.model import Shape, ShapeList, annotations_csv, describe, render_shapes
from orchestrator.shapes.reader import MAX_BYTES, read_shapes

__all__ = ["MAX_BYTES", "Shape", "ShapeList", "annotations_csv", "describe", "read_shapes", "render_shapes"]
