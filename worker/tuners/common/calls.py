"""Calls of functions of AITER's, whatever their date: found where they are, called by the names of their parameters.

The order of parameters changed (2025-05: x, w, y, x_scales, w_scales; later y after dtype; a bias came between), the
names hardly.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from worker.tuners.common.problem import NotImportableError, UnavailableError, UnsupportedError, short

ROLES = {
    **dict.fromkeys(("x", "xq", "a", "inp", "x_fp4"), "x"),
    **dict.fromkeys(("w", "wq", "b", "weights", "w_fp4", "w_preshuf"), "w"),
    **dict.fromkeys(("x_scale", "x_scales", "a_scale", "a_scales"), "xs"),
    **dict.fromkeys(("w_scale", "w_scales", "b_scale", "b_scales"), "ws"),
    **dict.fromkeys(("y", "yq", "out"), "out"),
    **dict.fromkeys(("dtype", "otype"), "dtype"),
    "bias": "bias",
    "bpreshuffle": "bpreshuffle",
    "config": "config",
    "backend": "backend",
}  # meaning of AITER's parameters, by their names in lower case


def find_function(places: Sequence[tuple[str, str]]) -> tuple[Callable[..., Any], str]:
    """Return the first of (module, name) that is there, and where it was.

    Raises UnavailableError with all the reasons, or NotImportableError if the fault is this Python's.
    """
    why: list[str] = []
    here: list[str] = []
    for module, name in places:
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except ModuleNotFoundError as e:
            of_tree = (e.name or "").partition(".")[0] == module.partition(".")[0]
            (why if of_tree else here).append(f"no module {e.name}")
        except (ImportError, AttributeError) as e:
            why.append(f"{module}: {type(e).__name__}: {short(str(e))}")
        except Exception as e:  # noqa: BLE001 - AITER runs code of its own when it is imported
            here.append(f"{module} cannot be imported: {type(e).__name__}: {short(str(e))}")
        else:
            return found, f"{module}.{name}"
    if here:
        raise NotImportableError(here[0])
    raise UnavailableError("; ".join(dict.fromkeys(why)))


def arguments_of(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
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
