"""The names of backends, as tables, columns and pages have them.

A backend is named by its owner (`aiter-triton`, `aiter-gluon`): in the FP4 guide and in AITER's tables, Triton and
Gluon mean AITER's. The worker's rule, which finds the backend of a row, is `worker.families.backend_of`.
"""

from __future__ import annotations

import re

from worker.families import BACKENDS, BENCHED, ENGINE, SGLANG, TRITON, backend_of, tuner_of

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

KNOWN = tuple(dict.fromkeys((*BACKENDS, "gluon", "cublaslt", *BENCHED)))
"""The values of a libtype cell. Beyond AITER's: those of benchmarks of ours."""

UNKNOWN = "unknown"
_ORDER = {name: i for i, name in enumerate(LABELS)}
_LEGAL = re.compile(r"[a-z0-9][a-z0-9_.+-]{0,23}\Z")


def name_by_owner(name: str) -> str:
    """The backend of a column or a libtype, named by its owner."""
    return AITERS.get(name, name)


def backend_label(backend: str) -> str:
    """The backend as people write it."""
    return LABELS.get(backend, backend)


def backend_order(backend: str) -> tuple[float, str]:
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
    libtype = libtype.strip().lower()
    kernel = kernel.strip()
    if libtype in ("", "triton") and kernel.startswith(TRITON):
        return UNKNOWN
    if kernel.startswith((ENGINE, SGLANG)):  # of the engine, and not AITER's
        return tuner_of(kernel)
    if libtype not in KNOWN:
        libtype = backend_of(family, {"libtype": libtype, "kernelName": kernel, "kernelId": kernel_id})
    if libtype == "triton" and kernel == "gluon":
        return AITERS["gluon"]
    return name_by_owner(libtype) or UNKNOWN
