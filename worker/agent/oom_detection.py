"""Was it the kernel's out-of-memory killer? Its counters, read before and after.

A SIGKILL has no sender's name. The kernel counts its own: `oom_kill` in a cgroup's memory.events (v2) or
memory.oom_control (v1), and for the whole machine in /proc/vmstat. A cgroup's counter is the better witness
(it counts only ours, also when the whole machine ran out); the machine's is asked where none can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_VMSTAT = Path("/proc/vmstat")


def oom_counters(pid: int, cgroups: Path = Path("/sys/fs/cgroup")) -> dict[str, int]:
    """The counters that see the process, by file; empty where none can be read."""
    out: dict[str, int] = {}
    for path in _cgroup_files(pid, cgroups):
        count = _field(path, "oom_kill")
        if count is not None:
            out[str(path)] = count
    if not out and (count := _field(_VMSTAT, "oom_kill")) is not None:
        out[str(_VMSTAT)] = count
    return out


def oom_killed(before: Mapping[str, int]) -> bool:
    """Whether one of the counters has risen since."""
    now = {path: _field(Path(path), "oom_kill") for path in before}
    return any((now[path] or 0) > count for path, count in before.items())


def _cgroup_files(pid: int, cgroups: Path) -> list[Path]:
    """Where the process's memory counters may lie; within a container the path of /proc may be the host's."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []
    out: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if controllers == "":
            out += [cgroups / inside / "memory.events", cgroups / "memory.events"]
        elif "memory" in controllers.split(","):
            out += [
                cgroups / "memory" / inside / "memory.oom_control",
                cgroups / "memory" / "memory.oom_control",
            ]
    return _first_readable_of_each_kind(out)


def _first_readable_of_each_kind(paths: list[Path]) -> list[Path]:
    found: dict[str, Path] = {}
    for path in paths:
        if path.name not in found and path.is_file():
            found[path.name] = path
    return list(found.values())


def _field(path: Path, name: str) -> int | None:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return None
