"""Calls functions of AITER, whatever its version: finds them where they are, and passes arguments by name.

`find_function` imports the first place that has the function; `arguments_of` then sorts our operands to its
parameters. Positions are of no use: in 2025-05 the order was x, w, y, x_scales, w_scales; later y came after dtype, and
a bias between. The names hardly changed.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

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
    """Import the first of (module, name) that there is; return the function and its dotted path.

    Raises UnavailableError with all the reasons, or NotImportableError if the fault is this Python's.
    """
    missing: list[str] = []
    faults_of_python: list[str] = []
    for module, name in places:
        try:
            function = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
        except ModuleNotFoundError as e:
            missing_package = (e.name or "").partition(".")[0]
            is_of_aiter = missing_package == module.partition(".")[0]
            reasons = missing if is_of_aiter else faults_of_python
            reasons.append(f"no module {e.name}")
        except (ImportError, AttributeError) as e:
            missing.append(f"{module}: {type(e).__name__}: {short(str(e))}")
        except Exception as e:  # noqa: BLE001 - AITER runs code of its own when it is imported
            faults_of_python.append(f"{module} cannot be imported: {type(e).__name__}: {short(str(e))}")
        else:
            return cast("Callable[..., Any]", function), f"{module}.{name}"
    if faults_of_python:
        raise NotImportableError(faults_of_python[0])
    raise UnavailableError("; ".join(dict.fromkeys(missing)))


def arguments_of(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a function. `values`: by the names that ROLES gives (x, w, xs, ...), None if there is none.

    A parameter that has a default and no value is not passed. Raises UnsupportedError for a parameter that nothing is
    known of, or a value that it has no parameter for (`bias`).
    """
    arguments: dict[str, Any] = {}
    passed: set[str] = set()
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        role = ROLES.get(name.lower(), "")
        if values.get(role) is not None:
            arguments[name] = values[role]
            passed.add(role)
        elif parameter.default is parameter.empty and name != "self":
            raise UnsupportedError(f"{function.__name__} wants {name!r}, which this version of bench does not know")
    for role in ("x", "w", "xs", "ws", "bias"):
        if values.get(role) is not None and role not in passed:
            raise UnsupportedError(f"{function.__name__} takes no {role}")
    return arguments
