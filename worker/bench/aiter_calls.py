"""AITER in a backend's process: its tree found and put on the path, its functions called whatever their date.

A function is called by the names of its parameters, not by their order.

The order changed (2025-05: x, w, y, x_scales, w_scales; later y after dtype; a bias came between), the names hardly.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from worker.aiter_tree.locate import NotATreeError, Tree, choose
from worker.bench.case import UnavailableError
from worker.protocol.environment import AITER_ROOT_ENV
from worker.tuners.common.problem import UnsupportedError

ROLES = {
    **dict.fromkeys(("x", "xq", "a", "inp", "x_fp4"), "x"),
    **dict.fromkeys(("w", "wq", "b", "weights", "w_fp4"), "w"),
    **dict.fromkeys(("x_scale", "x_scales", "a_scale", "a_scales"), "xs"),
    **dict.fromkeys(("w_scale", "w_scales", "b_scale", "b_scales"), "ws"),
    **dict.fromkeys(("y", "yq", "out"), "out"),
    **dict.fromkeys(("dtype", "otype"), "dtype"),
    "bias": "bias",
    "bpreshuffle": "bpreshuffle",
}
"""Meaning of AITER's parameters, by their names in lower case."""


def chosen() -> Tree:
    """The tree that the inventory names, else the one that is imported, else one in a usual place.

    Raises UnavailableError.
    """
    try:
        return choose(os.environ.get(AITER_ROOT_ENV, ""), search=None)[0]
    except NotATreeError as e:
        raise UnavailableError(str(e)) from e


def enter(tree: Tree | None = None) -> dict[str, Any]:
    """Have `import aiter` mean this tree; its root, version and commit. Raises UnavailableError."""
    tree = tree or chosen()
    sys.path.insert(0, str(tree.root))
    return {"root": str(tree.root), "version": tree.version, "commit": tree.commit}


def find(places: Sequence[tuple[str, str]]) -> tuple[Callable[..., Any], str]:
    """The first of (module, name) that is there, and where it was. Raises UnavailableError with all the reasons."""
    why: list[str] = []
    for module, name in places:
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except ModuleNotFoundError as e:
            why.append(f"no module {e.name}")
        except (ImportError, AttributeError) as e:
            why.append(f"{module}: {type(e).__name__}: {_short(e)}")
        except Exception as e:  # noqa: BLE001 - AITER runs code of its own when it is imported
            why.append(f"{module} cannot be imported: {type(e).__name__}: {_short(e)}")
        else:
            return found, f"{module}.{name}"
    raise UnavailableError("; ".join(dict.fromkeys(why)))


def arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a function by ROLES; what has a default and no value is left out.

    Raises UnsupportedError for a parameter that nothing is known of, or a value that it has no parameter for (`bias`).
    """
    out: dict[str, Any] = {}
    served: set[str] = set()
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        role = ROLES.get(name.lower(), "")
        if values.get(role) is not None:
            out[name] = values[role]
            served.add(role)
        elif parameter.default is parameter.empty and name != "self":
            raise UnsupportedError(f"{function.__name__} wants {name!r}, which this version of bench does not know")
    for role in ("x", "w", "xs", "ws", "bias"):
        if values.get(role) is not None and role not in served:
            raise UnsupportedError(f"{function.__name__} takes no {role}")
    return out


def _short(e: BaseException) -> str:
    return str(e).strip().split("\n", 1)[0][:200]
