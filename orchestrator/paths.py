"""The folder of a run: its paths (docs/reference/files.md) and configuration, how it is made and found, the lock of the
controller that drives the run, and requests of other commands to that controller."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from orchestrator.command_hints import command
from orchestrator.errors import InputError, RunBusyError

DEFAULT_RUNS = Path("runs")
"""The folder of runs where no --runs is given."""
FIRST_KEYS = (
    "run", "created", "argv", "version", "family", "tuner", "shapes", "shapes_sha256", "inventory", "limit", "db",
    "retune", "watchdog_s", "grace_s", "err_ratio", "options",
)  # fmt: skip
"""The first keys of run.yaml, in the order in which every version wrote them."""
RUN_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}\Z")


class _File:
    """A file or folder of a run folder, by its name there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: RunPaths, owner: type[RunPaths]) -> Path:
        return paths.root / self._name


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The folder of one run on the controller's machine."""

    root: Path

    config = _File("run.yaml")
    inventory = _File("inventory.yaml")  # as it was given, references to the environment unresolved
    ledger = _File("ledger.db")
    lock = _File("controller.lock")  # held by the controller that drives the run
    controller_log = _File("controller.log")  # output of a detached controller
    requests = _File("requests")  # requests of other commands to the controller
    nodes = _File("nodes")
    logs = _File("logs")
    attempts = _File("attempts")
    tuned = _File("tuned.csv")
    profile = _File("profile.csv")
    failed = _File("failed.csv")
    recheck = _File("recheck.json")  # only in a recheck: rows of a table, and the kernels to measure for each
    annotations = _File("annotations.csv")  # columns of the user's shapes file that gemmfleet does not use, if any
    bench = _File("bench.csv")  # a bench's backends by shape
    bench_runs = _File("bench_runs.csv")  # a bench's single runs
    texts = _File("texts")  # long texts of the tuner's options, by their hash
    provenance = _File("provenance.json")
    merge = _File("merge.json")  # the report of the merge into the tuned DB

    @property
    def run(self) -> str:
        """The run's id."""
        return self.root.name

    def node(self, node: str) -> Path:
        """The files as deployed on the node."""
        return self.nodes / node

    def log(self, node: str) -> Path:
        return self.logs / f"{node}.log"

    def traceback(self, node: str) -> Path:
        """The traceback of the last error of our own in the controller's work with a node."""
        return self.logs / f"{node}.traceback.txt"

    def attempt(self, attempt: str) -> Path:
        return self.attempts / attempt

    def folders(self) -> tuple[Path, ...]:
        """The folders of a fresh run folder, the root first."""
        return (self.root, self.nodes, self.logs, self.attempts, self.requests)

    @property
    def named(self) -> str:
        """Name of the run on a command line, with `--runs` where it is needed."""
        return f"{self.run}{runs_option(self.root.parent)}"

    def results(self) -> tuple[Path, ...]:
        """Result files, the most wanted first."""
        return (self.bench, self.bench_runs, self.tuned, self.failed, self.profile, self.provenance, self.merge)


def runs_option(runs: Path) -> str:
    """` --runs DIR` for a command line; "" for the folder that commands take by themselves."""
    return "" if runs == DEFAULT_RUNS else f" --runs {shlex.quote(str(runs))}"


def command_on_run(verb: str, run: str, runs: Path) -> str:
    """`gemmfleet VERB RUN` for a run that may be another user's. `runs`: our folder of runs; if the run is not in it,
    the command has a placeholder, so that it can hit no other run."""
    paths = RunPaths(runs / run)
    return command(f"{verb} {paths.named if paths.config.is_file() else f'{run} --runs ITS_FOLDER'}")


class SettingFlag(NamedTuple):
    """Annotates a setting of a run with its option of `tune`, `bench` and `recheck` (orchestrator/cli/options.py)."""

    flag: str
    """Such as `--grace`."""
    help: str
    minimum: float | None = None
    metavar: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings that a user may give for a run, and that run.yaml keeps as they were given.

    A request (controller/request.py) and a run's configuration have them all. A new one needs a line here with its
    `SettingFlag`, and the code that reads it. Those without a flag have options that not all three commands share, or
    that need to be parsed.
    """

    limit: str | None = None
    retune: bool = False
    accept_new_host_keys: Annotated[
        bool, SettingFlag("--accept-new-host-keys", "Trust keys of hosts not seen before.")
    ] = False
    lost_after_s: Annotated[
        float, SettingFlag("--lost-after", "Seconds without an answer until a node is given up.", 1.0, "SECONDS")
    ] = 90.0
    busy: Annotated[
        Literal["wait", "skip", "share"] | None,
        SettingFlag(
            "--busy",
            "Nodes in use by others: wait until they are free, skip them, or share them; default: the inventory's,"
            " else wait.",
        ),
    ] = None
    hold: Annotated[
        bool, SettingFlag("--hold", "Keep leases that have no work; default: give them back after 2 minutes.")
    ] = False
    watchdog_s: Annotated[
        float, SettingFlag("--watchdog", "Seconds without progress that make a hang.", 1.0, "SECONDS")
    ] = 300.0
    grace_s: Annotated[
        float, SettingFlag("--grace", "Seconds that running groups get after Ctrl-C.", 0.0, "SECONDS")
    ] = 30.0
    until_gain: float | None = None
    """Start no more work once this share of the expected gain is won."""
    gpu_hours: float | None = None
    """Start no more work once the slots have used this many hours in all."""

    def settings(self) -> dict[str, Any]:
        """Only these settings, also of a subclass."""
        return {field.name: getattr(self, field.name) for field in fields(RunSettings)}


@dataclass(frozen=True, slots=True)
class RunConfig(RunSettings):
    """Configuration of a run as requested. The inventory lies beside it unchanged, references unresolved."""

    run: str
    created: float
    argv: list[str]
    version: str
    family: str
    tuner: str
    shapes: str
    shapes_sha256: str
    inventory: str
    db: str | None = None
    err_ratio: float = 0.05
    options: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        import yaml

        values = asdict(self)
        ordered = {name: values.pop(name) for name in FIRST_KEYS}
        path.write_text(yaml.safe_dump(ordered | values, sort_keys=False, allow_unicode=True))

    @classmethod
    def change(cls, path: Path, **changes: Any) -> None:
        """Set the options that are not None in a file. Its modification time stays, because it is the run's age."""
        changes = {name: value for name, value in changes.items() if value is not None}
        if changes:
            stat = path.stat()
            aside = path.with_suffix(".tmp")
            replace(cls.read(path), **changes).write(aside)
            os.utime(aside, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            os.rename(aside, path)

    @classmethod
    def read(cls, path: Path) -> RunConfig:
        import yaml

        try:
            raw = yaml.safe_load(path.read_text())
        except FileNotFoundError:
            raise InputError(f"{path} is missing: this is not a run folder") from None
        except OSError as e:
            raise InputError(f"{path} cannot be read: {e.strerror or e}") from e
        except (ValueError, yaml.YAMLError) as e:
            raise _damaged(path, " ".join(str(e).split())) from e
        if not isinstance(raw, dict):
            raise _damaged(path, "it is empty or no mapping of keys to values")
        required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
        missing = [name for name in required if name not in raw]
        if missing:
            raise _damaged(path, f"it lacks {', '.join(missing)}")
        return cls(**{f.name: raw[f.name] for f in fields(cls) if f.name in raw})


def _damaged(path: Path, why: str) -> InputError:
    return InputError(f"{path} is damaged ({why}); restore it from a copy, or tune again")


def create_run_folder(runs: Path, run: str) -> RunPaths:
    """Create a run folder with mode 0700. Raise InputError if that fails."""
    paths = RunPaths(runs / run)
    try:
        runs.mkdir(parents=True, exist_ok=True)
        os.mkdir(paths.root, 0o700)
        for folder in paths.folders()[1:]:
            folder.mkdir(mode=0o700)
    except OSError as e:
        raise InputError(
            f"cannot make the run folder {paths.root}: {e.strerror}; choose another place with --runs DIR"
        ) from e
    return paths


def new_run_id(now: float) -> str:
    """`20260131-154500-3f9a`: local time, so that names sort by age, and a random part that makes it unique."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{os.urandom(2).hex()}"


def list_runs(runs: Path) -> list[RunPaths]:
    """The runs in a folder, oldest first (by the creation of run.yaml, then by name)."""
    if not runs.is_dir():
        return []
    created = {}
    for path in runs.glob("[!.]*/run.yaml"):
        with contextlib.suppress(FileNotFoundError):  # its folder was removed meanwhile
            if path.is_file():
                created[path.parent] = path.stat().st_mtime
    return [RunPaths(root) for root in sorted(created, key=lambda root: (created[root], root.name))]


def find_run(runs: Path, run: str | None, *, tuned: bool = False) -> RunPaths:
    """The run in that folder or with that id (a unique beginning will do). If `run` is None the latest, but for runs
    that skipped every shape; with `tuned` the latest that has tuned rows.

    Raises InputError.
    """
    if run is not None and (Path(run) / "run.yaml").is_file():
        return RunPaths(Path(run).absolute())
    known_runs = list_runs(runs)
    if run is None:
        return _latest_run(runs, known_runs, tuned=tuned)
    if RUN_RE.match(run):
        exact = [paths for paths in known_runs if paths.run == run]
        matching = exact or [paths for paths in known_runs if paths.run.startswith(run)]
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise InputError(f"run {run!r} could be any of {_names(matching)}; give more of its id")
    known = f" (there are {_names(known_runs)})" if known_runs else ""
    listing = command(f"runs list{runs_option(runs)}")
    raise InputError(f"there is no run {run[:80]!r} in {runs}{known}; `{listing}` shows them")


def _latest_run(folder: Path, runs: Sequence[RunPaths], *, tuned: bool) -> RunPaths:
    """The last run that did not skip every shape, else the last. Raises InputError if there is none."""
    if tuned:
        runs = [paths for paths in runs if paths.tuned.is_file() and paths.tuned.read_bytes().count(b"\n") > 1]
    if not runs:
        what = "there are no runs with tuned rows" if tuned else "there are no runs"
        raise InputError(f"{what} in {folder}; begin one with: {command('tune SHAPES.csv')}, or give --runs DIR")
    return next((paths for paths in reversed(runs) if not _skipped_all(paths)), runs[-1])


def _skipped_all(paths: RunPaths) -> bool:
    """Return whether the run ended and had nothing to do, because the table had every shape."""
    try:
        counts = json.loads(paths.provenance.read_bytes())["counts"]
        return bool(counts["skipped"] == counts["total"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _names(runs: Sequence[RunPaths]) -> str:
    names = [paths.run for paths in runs[-5:]]
    if len(runs) > len(names):
        names.insert(0, "...")
    return ", ".join(names)


LOOK_S = 1.0
"""A command that looks who holds a run's lock (`holder`) holds it for an instant, so the lock is tried for this long if
nobody else has it."""


@contextlib.contextmanager
def run_lock(paths: RunPaths) -> Iterator[None]:
    """Hold the lock of the controller that drives the run. Raise RunBusyError, which names the process that has it."""
    path = paths.lock
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + LOOK_S
    while not _is_locked(fd):
        who = holder(path)
        if not who and time.monotonic() < until:
            time.sleep(0.01)
            continue
        os.close(fd)
        raise RunBusyError(
            f"run {paths.run} is driven by process {who.get('pid', '?')} on {who.get('host', 'this machine')}"
            f" (since {who.get('since', '?')}); watch it with: {command(f'status {paths.named} --watch')}"
        )
    who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with contextlib.suppress(OSError):  # on a full disk, where a run can still be removed, the others read no name
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(who).encode(), 0)
    try:
        yield
    finally:
        os.ftruncate(fd, 0)
        os.close(fd)


def _is_locked(fd: int) -> bool:
    """Lock the open file for us alone. Return False if another process holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder(path: Path) -> dict[str, Any]:
    """The holder of the lock (pid, host, since); {} if nobody holds it."""
    try:
        with path.open("rb") as f:
            try:
                fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raw = json.loads(f.read() or b"{}")
                return raw if isinstance(raw, dict) and raw else {"pid": "?"}
    except (OSError, ValueError):
        return {}
    return {}


KINDS = ("cancel", "retry", "drain", "join")
"""Kinds of requests: {"kind": "drain", "node": "gpu01"}, {"kind": "retry", "shapes": [3, 7]}, cancel and join alone."""


def leave_request(folder: Path, kind: str, **fields: Any) -> Path:
    """Leave a request for the controller, which removes the file when it takes it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{time.time_ns()}-{kind}.json"
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps({"kind": kind, **fields}))
    os.rename(aside, path)
    return path


def take_requests(folder: Path) -> list[dict[str, Any]]:
    """Take the waiting requests out of the folder, oldest first. Files that are not requests are only removed.
    Raises InputError if the folder is gone, as it is when a person removes the run."""
    if not folder.is_dir():
        raise InputError(
            f"{folder.parent} was removed while the run was driven, so its results are lost;"
            " its workers finish the groups that they have, and then end"
        )
    requests = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            raw = json.loads(path.read_text())
            if isinstance(raw, dict) and raw.get("kind") in KINDS:
                requests.append(raw)
        path.unlink(missing_ok=True)
    return requests
