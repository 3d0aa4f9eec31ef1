"""Backends: what they are called, in which order they are shown, and which one a row is of.

The rule is the worker's (`worker.families.backend_of`: libtype, else the kernel's name by the rule of
AITER's own dispatch, else what the family leaves). Here it is written once more as SQL, made from the same table of
patterns, with backends named by their owner; tests hold the two to one another.
"""

from __future__ import annotations

import re

from orchestrator.bench.owners import THEIRS, owned
from worker.bench.options import BACKENDS as BENCHED
from worker.bench.options import OWN
from worker.families import BACKENDS as AITER_BACKENDS
from worker.families import FAMILIES, Aiter
from worker.families.backends import BY_NAME
from worker.tuners.common.kernel_names import TRITON

LABELS = {
    "asm": "ASM",
    "ck": "CK",
    "cktile": "CK-Tile",
    "aiter-gluon": "aiter-gluon",
    "aiter-triton": "aiter-triton",
    "own-triton": "own-triton",
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
"""What a libtype cell may say. Beyond AITER's: those of benchmarks of ours."""

UNKNOWN = "unknown"
_ORDER = {name: i for i, name in enumerate(LABELS)}
_LEGAL = re.compile(r"[a-z0-9][a-z0-9_.+-]{0,23}\Z")
_END = r"\Z"
_BEGIN = re.compile(r"[A-Za-z0-9_]+(?![*+?{])")
_LITERAL = re.compile(r"(\.\*)?([A-Za-z0-9_]+)(\\Z)?\Z")


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


def sql_backend(family: str, *, kernel: str | None, kernel_id: str | None, libtype: str | None) -> str:
    """An SQL expression for the backend of a row of that family.

    The other arguments are SQL expressions of VARCHAR columns (trimmed, NULL where empty or `Null`), None where the
    file has no such column.
    """
    aiter = FAMILIES[family].aiter if family in FAMILIES else Aiter()
    ck_kernels = aiter.ck_kernels
    whens: list[str] = []
    if libtype:
        names = ", ".join(f"'{b}'" for b in KNOWN if owned(b) == b)
        ours = f"WHEN lower({libtype}) = 'triton' AND starts_with({kernel}, '{TRITON}') THEN '{OWN}'"
        whens += [ours] if kernel else []
        whens += [f"WHEN lower({libtype}) = '{b}' THEN '{owner}'" for b, owner in THEIRS.items()]
        whens.append(f"WHEN lower({libtype}) IN ({names}) THEN lower({libtype})")
    if kernel:
        named = [f"WHEN {_matches(kernel, pattern)} THEN '{owned(backend)}'" for pattern, backend in BY_NAME]
        named.append(f"WHEN starts_with({kernel}, '{TRITON}') THEN '{OWN}'")
        whens += [named[0], *_short_cut(kernel), *named[1:]]
    if kernel_id and ck_kernels:
        digits, number = f"regexp_full_match({kernel_id}, '[0-9]+')", f"try_cast({kernel_id} AS HUGEINT)"
        whens.append(f"WHEN {digits} THEN CASE WHEN {number} < {ck_kernels} THEN 'ck' ELSE 'asm' END")
    other = aiter.only_backend or UNKNOWN
    return f"CASE {' '.join(whens)} ELSE '{other}' END" if whens else f"'{other}'"


def _short_cut(column: str) -> list[str]:
    """The last pattern's names, which are the most, told behind the first pattern: those that begin as it says and hold
    nothing that a pattern between looks for anywhere. A beginning that one of these may claim otherwise is left out."""
    _, *between, (last, backend) = BY_NAME
    parts = [part for pattern, _ in between for part in pattern.split("|")]
    anywhere = [part[2:] for part in parts if part.startswith(".*")]
    claims = [begin[0] for part in parts if (begin := _BEGIN.match(part))]
    own = [p for p in last.split("|") if (literal := _LITERAL.match(p)) and not literal[1] and not literal[3]]
    free = [p for p in own if all(any(a in c for a in anywhere) for c in claims if c.startswith(p) or p.startswith(c))]
    begins = " OR ".join(f"starts_with({column}, '{p}')" for p in free)
    holds = " OR ".join(f"contains({column}, '{p}')" for p in anywhere)
    return [f"WHEN ({begins}) AND NOT ({holds}) THEN '{backend}'"] if free and anywhere else []


def _matches(column: str, pattern: str) -> str:
    """`re.match(pattern, column)` in SQL; plain comparisons where they will do, which are several times faster."""
    out = []
    for part in pattern.split("|"):
        literal = _LITERAL.match(part)
        if literal is None:
            begin = _BEGIN.match(part)
            guard = f"starts_with({column}, '{begin[0]}') AND " if begin else ""
            out.append(f"({guard}regexp_matches({column}, '^(?:{part.replace(_END, _END.lower())})'))")
        elif literal[1]:
            out.append(f"contains({column}, '{literal[2]}')")
        elif literal[3]:
            out.append(f"{column} = '{literal[2]}'")
        else:
            out.append(f"starts_with({column}, '{literal[2]}')")
    return "(" + " OR ".join(out) + ")"
