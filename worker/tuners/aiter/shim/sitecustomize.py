"""Writes a journal of candidates from every Python process of AITER, and leaves blocked candidates out.

AITER's pool does not say which candidate it is measuring, and a candidate that kills its process takes the others of
its shape with it. This shim wraps the function of `aiter.utility.mp_tuner` that measures a candidate, outside the timed
part. We put it on the path only if that function has the expected form (worker/tuners/aiter/findings.py); if anything
is unexpected at run time, the shim does nothing. It uses only the standard library, and nothing of gemmfleet.

GEMMFLEET_AITER_WATCH names the folder with its files: `candidates.jsonl`, its records (worker/tuners/aiter/journal.py
has their form), and `blocked.jsonl`, the candidates that are not measured (worker/tuners/aiter/choice.py). Python
imports a module of the name sitecustomize by itself when it starts.
"""

from __future__ import annotations

import builtins
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import time
from types import ModuleType
from typing import Any

TARGET = "aiter.utility.mp_tuner"


def describe(info: Any) -> tuple[list[str], list[str]]:
    """(key, candidate) of AITER's `info`: lists of text that mean the same in every process.

    `info` is ((gfx, cu_num, M, N, K, ...), kernelId, splitK, name, ...), or the key alone.
    """
    if isinstance(info, (tuple, list)) and info and isinstance(info[0], (tuple, list)):
        return [_text(value) for value in info[0]], [_text(value) for value in info[1:]]
    return [_text(value) for value in info], []


def _text(value: Any) -> str:
    item = getattr(value, "item", None)
    if callable(item) and type(value).__module__.split(".")[0] == "numpy":
        value = item()
    return str(value)[:400]


class _Choice:
    """Choice of candidates: all but the blocked ones, and of some shapes only those requested."""

    def __init__(self, path: str) -> None:
        self.blocked: list[tuple[list[str], list[str]]] = []
        """(key, candidate)"""
        self.only: list[tuple[list[str], list[dict[str, Any]]]] = []
        """(the numbers of a shape's key, kernels of a table)"""
        try:
            with open(path) as f:
                for line in f:
                    entry = json.loads(line)
                    if "only" in entry:
                        self.only.append((entry["sizes"], entry["only"]))
                    else:
                        self.blocked.append((entry["key"], entry["candidate"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def exclusion(self, key: list[str], candidate: list[str]) -> str:
        """The journal's word for a candidate that is not measured, "" for one that is."""
        if (key, candidate) in self.blocked:
            return "blocked"
        for sizes, only in self.only:
            if _has_sizes(key, sizes):
                return "" if any(_is_kernel(candidate, kernel) for kernel in only) else "skipped"
        return ""


def _has_sizes(key: list[str], sizes: list[str]) -> bool:
    """True if the key begins with these numbers; gfx and cu_num may come first."""
    return any(key[i : i + len(sizes)] == sizes for i in range(3))


def _is_kernel(candidate: list[str], kernel: dict[str, Any]) -> bool:
    """True if a candidate (kernelId, splitK, name, libtype, ...) is that kernel of a table. The number decides if the
    candidate has no name."""
    number, split, name, libtype = [*candidate, "", "", "", ""][:4]
    if split != kernel["split"]:
        return False
    if name:
        return bool(name == kernel["name"])
    return number in kernel["numbers"] and libtype in ("", kernel["libtype"])


class _Journal:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def say(self, **fields: Any) -> None:
        try:
            os.write(self._fd, json.dumps({**fields, "pid": os.getpid(), "t": time.time()}).encode() + b"\n")
        except OSError:
            pass


def wrap(module: Any, journal: _Journal, choice: _Choice) -> None:
    """Replace `module.worker`."""
    inner = module.worker
    info_position = inner.__code__.co_varnames[: inner.__code__.co_argcount].index("info")
    bound_processes: set[int] = set()
    said: list[str] = []

    def note(*words: Any, **kwargs: Any) -> None:
        """Print, and keep the text for the record: a candidate's exception is only printed here."""
        said.append(" ".join(map(str, words))[:1000])
        builtins.print(*words, **kwargs)

    @functools.wraps(inner)
    def worker(*args: Any, **kwargs: Any) -> Any:
        if os.getpid() not in bound_processes:
            bound_processes.add(os.getpid())
            _die_with_parent()
        try:
            info = kwargs["info"] if "info" in kwargs else args[info_position]
            key, candidate = describe(info)
        except Exception:  # noqa: BLE001 - whatever it is, the tuner is not to notice
            return inner(*args, **kwargs)
        exclusion = choice.exclusion(key, candidate)
        if exclusion:
            journal.say(event=exclusion, key=key, candidate=candidate)
            return info, float("inf"), 1.0
        journal.say(event="begin", key=key, candidate=candidate)
        said.clear()
        try:
            result = inner(*args, **kwargs)
        except Exception as e:
            journal.say(event="end", key=key, candidate=candidate, said=f"{type(e).__name__}: {e}"[:1000])
            raise
        us, err = _times(result)
        fields = {"us": repr(us), "err": repr(err)}
        if not 0 < us < float("inf"):
            fields["said"] = " ".join(said)[:2000]
        journal.say(event="end", key=key, candidate=candidate, **fields)
        return result

    module.worker = worker
    vars(module).setdefault("print", note)


def _times(result: Any) -> tuple[float, float]:
    try:
        return float(result[1]), float(result[2])
    except Exception:  # noqa: BLE001
        return -1.0, 1.0


def _die_with_parent() -> None:
    """A process of the pool must not outlive the tuner: a kernel that hangs would hold the GPU."""
    try:
        import ctypes
        import multiprocessing

        if multiprocessing.parent_process() is not None:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    except Exception:  # noqa: BLE001 - it is a precaution
        pass


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, journal: _Journal, choice: _Choice) -> None:
        self._journal = journal
        self._choice = choice

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == TARGET else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            try:
                wrap(module, self._journal, self._choice)
            except Exception as e:  # noqa: BLE001
                print(f"gemmfleet: {TARGET} is not watched: {e!r}", file=sys.stderr)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install() -> None:
    folder = os.environ.get("GEMMFLEET_AITER_WATCH")
    if folder:
        choice = _Choice(os.path.join(folder, "blocked.jsonl"))
        sys.meta_path.insert(0, _Finder(_Journal(os.path.join(folder, "candidates.jsonl")), choice))


def _run_the_next_one() -> None:
    """The sitecustomize that this one hides, if the image has one."""
    here = os.path.realpath(os.path.dirname(__file__))
    paths = [p for p in sys.path if os.path.realpath(p or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    try:
        _install()
    except Exception as e:  # noqa: BLE001
        print(f"gemmfleet: candidates are not watched: {e!r}", file=sys.stderr)
    _run_the_next_one()
