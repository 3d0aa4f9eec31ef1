"""A slot's AITER: its folders, its environment, the flags of its scripts, and a process for a few shapes."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from worker import PACKAGE_PARENT
from worker.families import Family, legal_cells
from worker.protocol import Row, SpecShape
from worker.tuners.aiter.drive.blocklist import LeftOut
from worker.tuners.aiter.drive.command import Facts, Files, argv
from worker.tuners.aiter.drive.environment import clear_stale_locks, environment, seed
from worker.tuners.aiter.drive.process import AiterProcess
from worker.tuners.aiter.drive.progress import Names
from worker.tuners.aiter.drive.run import Ended, Run
from worker.tuners.aiter.drive.shape_tracker import Job
from worker.tuners.aiter.drive.workarounds import SHIM, Applied, WorkaroundRefusedError, needed, prepare
from worker.tuners.aiter.inspect.image import Image
from worker.tuners.aiter.options import Options
from worker.tuners.base import Emit, Place, TunerFault


class Collected(Emit):
    """For what is run for our own ends: nothing is said to the agent, all is kept."""

    def __init__(self, alive: Callable[[], None] = lambda: None) -> None:
        super().__init__(self._keep)
        self.rows: list[Row] = []
        self.winner: Row | None = None
        self.verdict = ""
        self._alive = alive

    def alive(self) -> None:
        self._alive()

    def _keep(self, message: dict[str, object]) -> None:
        if message["type"] == "row":
            self.rows.append(message["row"])  # type: ignore[arg-type]
        elif message["type"] == "shape_tuned":
            self.winner = message["row"]  # type: ignore[assignment]
        elif message["type"] == "shape_failed":
            self.verdict = f"{message['reason']}: {message['detail']}"


@dataclass(frozen=True, slots=True)
class Limits:
    """What an attempt sets: the largest error, seconds of silence that are a hang, seconds from SIGINT to SIGKILL."""

    err_ratio: float
    quiet_s: float
    grace_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Process:
    """One that ended, with what is needed to run it again."""

    ended: Ended
    left: tuple[int, ...]
    current: int | None
    files: Files
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    partial: tuple[Row, ...] = ()
    """What was measured of the shape in flight where it broke off."""


@dataclass(slots=True)
class Session:
    """The slot's own folders below the node folder: `jit` (AITER_JIT_DIR) and `tmp` (TMPDIR)."""

    image: Image
    """As it is used now: the image's own tree, or a scratch copy with workarounds (see `adapt`)."""
    place: Place
    root: Path
    names: dict[str, Names] = field(default_factory=dict)
    """Kernel names by family, as far as they are known."""
    _asked: dict[Path, dict[str, str]] = field(default_factory=dict)
    _views: dict[tuple[str, ...], Image] = field(default_factory=dict)

    @classmethod
    def make(cls, image: Image, place: Place) -> Session:
        """Make the folders, link what the image has built, clear stale locks. Raises OSError."""
        root = (place.node_dir or Path.cwd()).absolute() / "aiter" / place.slot
        for folder in ("jit/build", "tmp"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        made = cls(image, place, root)
        seed(made.jit, image.package)
        for words in clear_stale_locks([made.jit, Path("/tmp/aiter_configs")]):
            print(f"gemmfleet: {words}", flush=True)
        return made

    def adapt(self, family: str, keys: Iterable[Mapping[str, object]] = ()) -> None:
        """Have what these shapes need applied to a scratch copy, and use that; or the tree as it is. Raises OSError."""
        real = self._views.setdefault((), self.image)
        keys = list(keys)
        names = tuple(needed(real.findings, family, keys))
        if names not in self._views:
            self._views[names] = self._with(real, names, family, keys)
        self.image = self._views[names]

    def _with(self, real: Image, names: tuple[str, ...], family: str, keys: list[Mapping[str, object]]) -> Image:
        try:
            scratch, applied = prepare(real.findings, family, keys, self.root / "-".join(("tree", *names)))
        except WorkaroundRefusedError as e:
            print(f"gemmfleet: a workaround is not applied: {e}", flush=True)
            return real
        if scratch is None:
            return real
        for one in applied:
            print(f"gemmfleet: {one.name} is applied to a scratch copy ({'; '.join(one.evidence[:2])})", flush=True)
        return real.on(scratch.tree, applied)

    @property
    def applied(self) -> tuple[Applied, ...]:
        """Every workaround in use so far."""
        return tuple({a.name: a for view in self._views.values() for a in view.applied}.values())

    def facts(self, family: Family, alive: Callable[[], None] = lambda: None) -> Facts | None:
        """The family's script as it is used now; its own --help tells the flags where its files do not."""
        facts = self.image.facts(family)
        if facts is None or facts.broken or any(facts.has(f) for f in ("--untune_file", "--input_file")):
            return facts
        if facts.script not in self._asked:
            print(f"gemmfleet: {facts.script.name} is asked for its flags by --help", flush=True)
            log = self.root / f"help-{family.name}.log"
            self._asked[facts.script] = ask_help(facts.script, self.env(), self.image.cwd, log, alive)
        return replace(facts, flags={**facts.flags, **self._asked[facts.script]})

    @property
    def jit(self) -> Path:
        return self.root / "jit"

    def env(self, files: Files | None = None, *, watched: bool = False) -> dict[str, str]:
        """The environment of AITER's processes."""
        return environment(
            os.environ,
            paths=list(self.image.paths),
            jit=self.jit,
            tmp=self.root / "tmp",
            shim=SHIM if watched else None,
            journal=files.journal if files else None,
            blocked=files.blocked if files else None,
            worker_code=PACKAGE_PARENT,
            chip=self.image.chip,
        )

    def run(
        self,
        family: Family,
        facts: Facts,
        shapes: Sequence[SpecShape],
        folder: Path,
        emit: Emit,
        limits: Limits,
        options: Options,
        *,
        batch: int,
        left_out: LeftOut | None = None,
    ) -> Process:
        """Tune the shapes in one process, in a folder of its own. Raises OSError, ValueError."""
        files = Files(folder)
        folder.mkdir(parents=True)
        rows = [legal_cells(family, s.key) for s in shapes]
        columns = facts.key_columns or family.key_names
        with open(files.untuned, "w", newline="") as f:
            out = csv.DictWriter(f, columns, extrasaction="ignore", lineterminator="\n")
            out.writeheader()
            out.writerows(rows)
        watched = options.watch and self.image.watch.fits
        left_out = left_out if left_out and watched else LeftOut()
        if watched:
            left_out.write(files.blocked)
        words = [
            sys.executable,
            *argv(family, facts, options, files, batch=batch, err_ratio=limits.err_ratio, watched=watched),
        ]
        env = self.env(files, watched=watched)
        job = Job(
            family=family,
            shapes=shapes,
            columns=tuple(columns),
            files=files,
            argv=words,
            env=env,
            cwd=self.image.cwd,
            batch=batch,
            err_ratio=limits.err_ratio,
            quiet_s=options.tuner_timeout or limits.quiet_s,
            shape_s=options.tuner_timeout,
            grace_s=limits.grace_s,
            watched=watched,
            hipblaslt_rule=facts.hipblaslt_rule,
            names=self.names.setdefault(family.name, Names()),
            left_out=left_out,
        )
        run = Run(job, emit, mirror=1)
        ended = run.go()
        self._check(run.devices)
        left, current = tuple(run.flight.left), run.flight.current
        return Process(ended, left, current, files, tuple(words), env, self.image.cwd, tuple(run.partial()))

    def _check(self, devices: set[tuple[str, str]]) -> None:
        """AITER and we must mean the same chip: its rows are looked up by gfx and cu_num. Raises TunerFault."""
        ours = (self.image.gfx, str(self.image.device.get("cu_num")))
        for gfx, cu_num in devices if self.image.seen_by_torch else ():
            if (gfx or ours[0], cu_num or ours[1]) != ours:
                words = f"AITER writes rows for gfx {gfx or 'unnamed'} and cu_num {cu_num}"
                raise TunerFault("error", f"{words}, and this slot is {ours[0]} with {ours[1]}")


HELP_TIMEOUT_S = 300.0
"""A script imports torch and AITER before it reads its arguments."""
_OPTION = re.compile(r"^ {1,8}(-\S.*?)(?: {2,}|$)", re.MULTILINE)
_LONG = re.compile(r"(--[A-Za-z][\w-]*)((?:[ =]\S+)?)")


def flags_of(text: str) -> dict[str, str]:
    """The long options of an argparse help, each `flag` or `value`."""
    out: dict[str, str] = {}
    for m in _OPTION.finditer(text):
        found = _LONG.findall(m[1])
        value = any(v.strip() for _, v in found) or bool(re.search(r"-\w [A-Z{\[]", m[1]))
        for name, _ in found:
            out[name.rstrip(",")] = "value" if value else "flag"
    return out


def ask_help(
    script: Path, env: Mapping[str, str], cwd: Path, log: Path, alive: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """Run the script with --help; its flags, empty where it does not answer."""
    log.unlink(missing_ok=True)
    try:
        process = AiterProcess([sys.executable, str(script), "--help"], env, cwd, log)
    except (OSError, subprocess.SubprocessError):
        return {}
    until = time.monotonic() + HELP_TIMEOUT_S
    try:
        while process.returncode is None and time.monotonic() < until:
            alive()
            time.sleep(0.05)
    finally:
        process.kill()
    return flags_of(log.read_text(errors="replace")) if process.returncode == 0 else {}
