"""One GEMM as our tuners compute it: sizes, formats, and the operations and bytes it takes. Needs no torch.

out[B, M, N] = X[B, M, K] @ W[B, N, K]^T, with W stored as N rows of K (the layout of a linear layer's weight). B is 1
but for the batched families.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from worker.families import FAMILIES, computed_by
from worker.protocol import Row
from worker.text import plural

MX_GROUP = 32
"""Elements along K that share one e8m0 scale (OCP Microscaling Formats 1.0)."""
SCALE_BLOCK = 128
"""a8w8_blockscale: one float32 scale per 1 x 128 elements of X and per 128 x 128 of W."""
SUSTAINED_FLOPS = 1e11
"""Operations of a call from which on candidates are measured sustained: there the power cap sets the clock."""
FLOATS = ("bfloat16", "float16", "float32")
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1}
_EIGHT_BITS = ("int8", "float8_e4m3fn", "float8_e4m3fnuz")
_FP4 = "float4_e2m1fn_x2"
_SCALES = {"row8": "row", "block8": "block", "mx4": "mx"}

Key = Mapping[str, int | str]


class UnsupportedError(Exception):
    """This shape, or this candidate, cannot be run here; the text names what would be needed."""


class UnavailableError(Exception):
    """This backend, or library, cannot run here at all; the text says why."""


class NotImportableError(UnavailableError):
    """AITER's module is there, but this Python cannot import it: a package is missing, or its own code fails."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One GEMM. `dtype` names the operands' format, `outdtype` the output's, both as torch does (no `torch.`).

    `scale` is `none`, `tensor` (one float32 an operand), `row` (one a row of X and a row of W), `block` (1 x 128 and
    128 x 128) or `mx` (one e8m0 byte per 32 along K); the family's own where it is not given.
    """

    family: str
    b: int
    m: int
    n: int
    k: int
    dtype: str
    outdtype: str = "bfloat16"
    bias: bool = False
    scale: str = ""

    def __post_init__(self) -> None:
        if not self.scale:
            object.__setattr__(self, "scale", _SCALES.get(FAMILIES[self.family].format, "none"))

    @property
    def flops(self) -> int:
        return 2 * self.b * self.m * self.n * self.k

    @property
    def is_sustained(self) -> bool:
        """True where candidates are measured at the clock that they can sustain (worker/tuners/common/measure.py)."""
        return self.flops >= SUSTAINED_FLOPS

    @property
    def bits(self) -> int:
        """Bits of an operand's element as stored."""
        return 4 if self.dtype == _FP4 else 8 * _BYTES[self.dtype]

    @property
    def out_size(self) -> int:
        """Bytes of an output element."""
        return _BYTES[self.outdtype]

    @property
    def x_bytes(self) -> int:
        """X in its stored format, without scales."""
        return self.b * self.m * self.k * self.bits // 8

    @property
    def w_bytes(self) -> int:
        """W in its stored format, without scales."""
        return self.b * self.n * self.k * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """The scales of both operands as stored."""
        if self.scale == "tensor":
            return 8
        if self.scale == "row":
            return 4 * self.b * (self.m + self.n)
        if self.scale == "block":
            return 4 * -(-self.k // SCALE_BLOCK) * (self.m + -(-self.n // SCALE_BLOCK))
        if self.scale == "mx":
            return (self.m + self.n) * self.k // MX_GROUP
        return 0

    @property
    def out_bytes(self) -> int:
        return self.b * self.m * self.n * self.out_size

    @property
    def moved_bytes(self) -> int:
        """Bytes of `bw`, as AITER counts: both operands read once in their stored format, the output written once."""
        return self.x_bytes + self.w_bytes + self.out_bytes

    @property
    def group_key(self) -> tuple[object, ...]:
        """All but M: problems of one group_key share W and compiled kernels."""
        return (self.family, self.b, self.n, self.k, self.dtype, self.outdtype, self.bias, self.scale)


def parse(family: str, key: Key) -> Problem:
    """The problem of a shape's key columns for the tuner torch. Raises UnsupportedError for a family or a format that
    it has no candidates for."""
    computed = computed_by("torch")
    if family not in computed:
        raise UnsupportedError(f"the tuner torch has no candidates for family {family}; it has {', '.join(computed)}")
    operand_format = FAMILIES[family].format
    m, n, k = (size_of(key, column) for column in "MNK")
    if operand_format == "mx4":
        if k % MX_GROUP:
            raise UnsupportedError(f"K is {k}; MXFP4 needs a multiple of {MX_GROUP}")
        return Problem(family, 1, m, n, k, _FP4)
    if operand_format == "row8":
        return Problem(family, 1, m, n, k, format_of(key, "q_dtype_w", _EIGHT_BITS, "int8"))
    for column in ("scaleAB", "bpreshuffle"):
        if flag_of(key, column):
            raise UnsupportedError(f"{column} is True; the tuner torch measures plain {family} operands only")
    dtype = format_of(key, "dtype", FLOATS, "bfloat16")
    return Problem(family, 1, m, n, k, dtype, format_of(key, "outdtype", FLOATS, dtype), flag_of(key, "bias"))


def fp8_of(arch: object) -> str:
    """The e4m3 that a device multiplies: gfx942 has its own."""
    return "float8_e4m3fnuz" if arch == "gfx942" else "float8_e4m3fn"


def size_of(key: Key, column: str) -> int:
    """A dimension. Raises UnsupportedError unless it is a whole number from 1 to 2^31-1."""
    try:
        value = int(key[column])
    except (KeyError, ValueError) as e:
        raise UnsupportedError(f"the shape has no whole number {column}") from e
    if not 1 <= value < 2**31:
        raise UnsupportedError(f"{column} is {value}; it must be from 1 to 2^31-1")
    return value


def flag_of(key: Key, column: str) -> bool:
    """True or False as text or number; False where the column is missing. Raises UnsupportedError."""
    value = str(key.get(column, "False")).strip().lower()
    if value not in ("true", "false", "0", "1"):
        raise UnsupportedError(f"{column} is {key[column]!r}, neither True nor False")
    return value in ("true", "1")


def format_of(key: Key, column: str, legal: Sequence[str], default: str) -> str:
    """A format's name without `torch.`; `default` where the column is missing. Raises UnsupportedError for others."""
    name = str(key.get(column, default)).strip().removeprefix("torch.")
    if name not in legal:
        legal_types = ", ".join(f"torch.{dtype}" for dtype in legal)
        raise UnsupportedError(f"{column} is {key[column]!r}; this tuner takes {legal_types}")
    return name


_FATAL = (
    "illegal memory access",
    "illegal instruction",
    "illegal address",
    "invalid program counter",
    "invalid address space",
    "invalid pc",
    "misaligned address",
    "unspecified launch failure",
    "launch timed out",
    "hardware stack error",
    "device-side assert",
    "hardware exception",
    "memory access fault",
    "memory aperture violation",
    "hsa_status_error",
    "uncorrectable ecc",
    "nvlink error",
    "unknown error",
    "context is destroyed",
    "illegal state",
    "hiperrorillegal",
)
_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "alloc_failed")
_UNSUPPORTED = (
    "out of resource",
    "too many resources",
    "shared memory",
    "registers",
    "exceeds available",
    "no native support",
    "doesn't support",
    "invalid device function",
    "not implemented",
    "not supported",
    "unsupported",
    "only supported",
    "could not create a primitive",
    "not_supported",
    "could not run",
    "needs the cpu support",
    "is only available",
    "requires compute capability",
    "not compiled with",
    "not available",
    "divisible by",
    "multiple of",
    "multiples of",
    "unexpected keyword",
    "got an unexpected",
    "expected self.size",
    "cannot convert scalartype",
)


def is_fatal(e: BaseException | str) -> bool:
    """True where neither the device nor the process can be trusted after it: a GPU fault."""
    text = str(e).lower()
    return any(words in text for words in _FATAL)


def status_of(e: BaseException) -> str:
    """Status of a candidate that raised: `oom`, `unsupported` (this build or device lacks it) or `error`."""
    name = type(e).__name__
    text = str(e).lower()
    if isinstance(e, MemoryError) or name == "OutOfMemoryError" or any(words in text for words in _MEMORY):
        return "oom"
    if name in ("OutOfResources", "UnsupportedError") or isinstance(e, NotImplementedError):
        return "unsupported"
    return "unsupported" if any(words in text for words in _UNSUPPORTED) else "error"


DETAIL = 300
"""Characters of a row's detail at most."""


def row_of(
    problem: Problem,
    tuner: str,
    kernel: str,
    kernel_id: int,
    split_k: int,
    status: str,
    us: float = -1.0,
    err: float = 1.0,
    spread: float = 0.0,
    samples: int = 0,
    detail: str = "",
) -> Row:
    """A candidate's row; `us` is -1 where it has no time, and its rates are 0 then."""
    row = Row(
        kernelId=kernel_id,
        splitK=split_k,
        us=-1.0,
        kernelName=kernel,
        libtype=tuner,
        tflops=0.0,
        bw=0.0,
        errRatio=_rounded_error(err),
        status=status,
        spread=round(spread, 4),
        samples=samples,
        detail=short(detail),
    )
    if us > 0:
        row["us"] = round(us, 4)
        row["tflops"] = figure(problem.flops / us / 1e6)
        row["bw"] = figure(problem.moved_bytes / us / 1e3)
    return row


def _rounded_error(err: float) -> float:
    """An errRatio as a row has it: 0 for exact results alone."""
    if err == 0:
        return 0.0
    return max(1e-6, round(err, 6)) if math.isfinite(err) else 1.0


def figure(value: float) -> float:
    """Two decimals, as AITER has them, from 10 up; four significant digits below."""
    return round(value, 2) if value >= 10 else float(f"{value:.4g}")


def short(text: str) -> str:
    """The first line, cut."""
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= DETAIL else line[: DETAIL - 3] + "..."


def why_no_winner(rows: Sequence[Row], limit: float) -> tuple[str, str]:
    """Reason and detail of a shape none of whose candidates may win; `limit` is that of errRatio."""
    if not rows:
        return "no_candidate", f"of {plural(0, 'candidate')}: none ran"
    counts = Counter(row["status"] for row in rows)
    statuses = ("wrong", "unsupported", "oom", "error", "timeout")
    shown = ", ".join(f"{counts[status]} {status}" for status in statuses if counts[status])
    detail = f"of {plural(len(rows), 'candidate')}: {shown or 'none ran'}"
    if counts["wrong"]:
        least = min(row["errRatio"] for row in rows if row["status"] == "wrong")
        return "wrong_result", f"{detail}; the least errRatio is {least:g}, the limit {limit:g}"
    reason = "unsupported" if counts["unsupported"] == len(rows) else "no_candidate"
    return reason, f"{detail}; {rows[0]['kernelName']}: {rows[0]['detail']}"
