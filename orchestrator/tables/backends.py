"""Backends: their names by owner (`aiter-triton`, `aiter-gluon`), their labels, their order.

In the FP4 guide and in AITER's tables, Triton and Gluon mean AITER's.
"""

from __future__ import annotations

import re

from worker.families import BACKENDS as AITER_BACKENDS
from worker.families import BENCHED, TRITON, backend_of

AITERS = {"triton": "aiter-triton", "gluon": "aiter-gluon"}
"""Names of the guide's columns and of AITER's libtype, by owner."""
LABELS = {
    "asm": "ASM",
    "ck": "CK",
    "cktile": "CK-Tile",
    "aiter-gluon": "aiter-gluon",
    "aiter-triton": "aiter-triton",
    "triton": "Triton",
    "hipblaslt": "hipBLASLt",
    "flydsl": "FlyDSL",
    "opus": "opus",
    "torch": "torch",
    "skinny": "skinny",
    "cublaslt": "cuBLASLt",
    "unknown": "unknown",
}
"""Known backends in the order of the columns; others come before `unknown`, by name."""

KNOWN = tuple(dict.fromkeys((*AITER_BACKENDS, "gluon", "cublaslt", *BENCHED)))
"""The values of a libtype cell. Beyond AITER's: those of benchmarks of ours."""

UNKNOWN = "unknown"
_ORDER = {name: i for i, name in enumerate(LABELS)}
_LEGAL = re.compile(r"[a-z0-9][a-z0-9_.+-]{0,23}\Z")


def owned(name: str) -> str:
    """The backend of a column or a libtype, named by its owner."""
    return AITERS.get(name, name)


def label(backend: str) -> str:
    """The backend as people write it."""
    return LABELS.get(backend, backend)


def order(backend: str) -> tuple[float, str]:
    """A key that sorts backends as they are shown."""
    return _ORDER.get(backend, len(_ORDER) - 1.5), backend


def legal_name(text: str) -> str | None:
    """The backend that a column such as `triton_us` is named after, None where that is no name."""
    name = text.strip().lower()
    return name if _LEGAL.match(name) else None


def backend_name(family: str, kernel: str = "", kernel_id: str = "", libtype: str = "") -> str:
    """The backend of a row by the worker's rule, named by its owner.

    A libtype calls AITER's Gluon triton; here it has its own name. Rows of our tuner triton, which is gone, are
    nobody's.
    """
    libtype, kernel = libtype.strip().lower(), kernel.strip()
    if libtype in ("", "triton") and kernel.startswith(TRITON):
        return UNKNOWN
    cells = {"libtype": libtype, "kernelName": kernel, "kernelId": kernel_id}
    found = libtype if libtype in KNOWN else backend_of(family, cells)
    return AITERS["gluon"] if found == "triton" and kernel == "gluon" else owned(found) or UNKNOWN
