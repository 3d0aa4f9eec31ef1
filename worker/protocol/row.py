"""Fields of a measured row: one table that gives the worker's check, the columns of the ledger and of profile.csv."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.protocol.records import ProtocolError

Row = dict[str, Any]  # a measured candidate by the names of FIELDS, without what is not known


@dataclass(frozen=True, slots=True)
class Field:
    """A value of a row.

    `limit`: characters of a text at most. `column`: its column in the ledger; without one it is part of `extra` there.
    `shown`: a column of profile.csv beyond those of AITER's tables.
    """

    name: str
    kind: type[int] | type[float] | type[str]
    meaning: str
    limit: int = 0
    column: str = ""
    shown: bool = False


FIELDS = (
    Field("us", float, "device time in microseconds; -1: there is none", column="us"),
    Field("errRatio", float, "share of outputs beyond atol + rtol * abs(reference), 1e-2 each", column="err_ratio"),
    Field(
        "status", str, "`ok`, `wrong` (errRatio above the limit), `unsupported`, `error`, `oom` or `timeout`",
        100, "status", shown=True,
    ),
    Field("kernelId", int, "AITER's number of the kernel", column="kernel_id"),
    Field("splitK", int, "AITER's number of splits of K, 0: one", column="split_k"),
    Field("kernelName", str, "the kernel", 1000, "kernel_name"),
    Field("libtype", str, "the backend", 100, "libtype"),
    Field("tflops", float, "1e12 operations a second: 2 M N K B / us / 1e6", column="tflops"),
    Field("bw", float, "GB/s of operands read once and output written once", column="bw"),
    Field("spread", float, "half the interquartile range of the samples over the median", column="spread", shown=True),
    Field("samples", int, "number of samples", column="samples", shown=True),
    Field("detail", str, "why there is no time, or a remark", 2000, "detail", shown=True),
    # a winner that was ranked against others in rounds
    Field("margin", float, "lead of a winner over its runner-up in standard errors of their ratio", shown=True),
    # a bench; its rows may also have the statuses unavailable and fault
    Field("run", int, "round of a bench: equal numbers were measured side by side"),
    Field("env", str, "name of the software stack, where there are several", 40),
    Field("op", str, "the operation by a name that is the same over dates and stacks", 200),
    Field("timer", str, "how a bench took the time", 40),
    Field("aiter_config", str, "file, bucket and values of the config that was read, of config sets", 400),
    # a tuner of config files
    Field("triton_config", str, "the bucket's config, old and new, with its points, as JSON", 2000),
    # both stages of AITER's fused MoE
    Field("block_m", int, "fmoe: rows of a block"),
    Field("run_1stage", int, "fmoe: 1 where one kernel does both stages"),
    Field("xbf16", int, "fmoe: 1 where the first operand is bf16"),
    Field("flat", int, "fmoe: 1 where the tokens are flat"),
    Field("us1", float, "fmoe: time of the first stage"),
    Field("us2", float, "fmoe: time of the second stage"),
    Field("kernelName1", str, "fmoe: kernel of the first stage", 1000),
    Field("kernelName2", str, "fmoe: kernel of the second stage", 1000),
    Field("err1", str, "fmoe: share of wrong elements of the first stage", 40),
    Field("err2", str, "fmoe: share of wrong elements of the second stage", 40),
)  # fmt: skip

_BY_NAME = {f.name: f for f in FIELDS}
_HUGE = 1e30


def is_wrong(err_ratio: float, limit: float) -> bool:
    """Return whether a share of wrong elements is above the limit of the run (or is no share)."""
    return not 0 <= err_ratio <= limit


def checked_row(raw: Any, err_limit: float) -> Row:
    """Return a tuner's row with known fields of the right types, and `wrong` where its error is above the limit.

    nan and inf are left out, long text is cut. Raises ProtocolError.
    """
    if not isinstance(raw, Mapping):
        raise ProtocolError("row is not a mapping")
    out: Row = {}
    for name, value in raw.items():
        field = _BY_NAME.get(name)
        if field is None or not _is(value, field.kind):
            raise ProtocolError(f"row field {name!r} holds {type(value).__name__}")
        if field.kind is str:
            out[name] = value[: field.limit]
        elif -_HUGE < value < _HUGE:
            out[name] = value
    if out.get("status", "ok") == "ok" and "errRatio" in out and is_wrong(out["errRatio"], err_limit):
        out["status"] = "wrong"
    return out


def _is(value: Any, kind: type) -> bool:
    if kind is int:
        return type(value) is int and abs(value) < 2**62
    return isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
