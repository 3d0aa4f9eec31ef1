"""The AITER of a child process: found without importing anything, put on the path, and told."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from worker.bench.case import UnavailableError
from worker.tuners.aiter.tree.locate import NotATreeError, Tree, find_trees, pick, python_path

ROOT_ENV = "GEMMFLEET_AITER_ROOT"


def chosen() -> Tree:
    """The tree that the inventory names, else the one that is imported, else one in a usual place.

    Raises UnavailableError.
    """
    named = os.environ.get(ROOT_ENV)
    wanted = Path(named) if named else None
    try:
        trees = find_trees([wanted] if wanted else (), search=None)
        return pick(trees, wanted)[0]
    except NotATreeError as e:
        raise UnavailableError(str(e)) from e


def enter(tree: Tree | None = None) -> dict[str, Any]:
    """Have `import aiter` mean this tree; what is recorded of it. Raises UnavailableError."""
    tree = tree or chosen()
    for path in reversed(python_path(tree)):
        sys.path.insert(0, str(path))
    return {"root": str(tree.root), "version": tree.version, "commit": tree.commit}
