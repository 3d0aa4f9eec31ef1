"""Engine `docker`: starts workers by launch.sh; lists, stops, removes and pulls through the SDK."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import docker.errors

from orchestrator.engine.docker.client import LIMIT_S, PULL_SILENCE_S, Docker, NodeClient, engine_error
from orchestrator.engine.docker.spec import DockerOptions, container_name, labels
from orchestrator.engines import WorkerState
from orchestrator.errors import EngineError
from orchestrator.transport import Transport

ALIVE = ("running", "restarting", "paused")
_LAST_SIGNAL = 64


def worker_state(slot: str, inspected: Mapping[str, Any]) -> WorkerState:
    """The state of a slot's container. `restarting` counts as running: Docker is about to start it again."""
    state = inspected.get("State") or {}
    status = str(state.get("Status", ""))
    alive = status in ALIVE
    code = None if alive or not isinstance(state.get("ExitCode"), int) else int(state["ExitCode"])
    return WorkerState(
        slot,
        "running" if alive else "ended",
        code,
        oom_killed=bool(state.get("OOMKilled")),
        signal=code - 128 if code is not None and 128 < code <= 128 + _LAST_SIGNAL else None,
        started_at=epoch(str(state.get("StartedAt", ""))),
        restarts=int(inspected.get("RestartCount") or 0),
        health=str((state.get("Health") or {}).get("Status") or status),
    )


def epoch(stamp: str) -> float | None:
    """Epoch seconds of Docker's RFC 3339 with up to nine decimals; None for "never" (the year 1) or garbage."""
    m = re.match(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)\Z", stamp)
    if not m or m[1].startswith("0001"):
        return None
    whole = datetime.fromisoformat(m[1] + ("+00:00" if m[3] == "Z" else m[3]))
    return whole.timestamp() + float(m[2] or 0)


EVERY_S = 1.0
_DONE = ("Download complete", "Pull complete", "Already exists")


def follow_pull(image: str, lines: Iterable[Mapping[str, Any]], progress: Callable[[str], None]) -> str:
    """Read a pull to its end, calling `progress` once a second; return Docker's error, or an empty text."""
    layers: dict[str, tuple[int, int]] = {}
    done: set[str] = set()
    reported = 0.0
    for line in lines:
        if "error" in line:
            return str(line["error"])
        layer, status = str(line.get("id", "")), str(line.get("status", ""))
        if status in _DONE:
            done.add(layer)
            if layer in layers:
                layers[layer] = (layers[layer][1], layers[layer][1])
        elif status == "Downloading":
            detail = line.get("progressDetail") or {}
            layers[layer] = (int(detail.get("current") or 0), int(detail.get("total") or 0))
        elif status in ("Pulling fs layer", "Waiting"):
            layers.setdefault(layer, (0, 0))
        if layers and time.monotonic() - reported >= EVERY_S:
            reported = time.monotonic()
            got, size = (sum(pair[i] for pair in layers.values()) / 1e6 for i in (0, 1))
            have = len(done & layers.keys())
            progress(f"pulling {image}: {got:.0f} of {size:.0f} MB, {have} of {len(layers)} layers")
    progress(f"pulled {image}")
    return ""


START_TIMEOUT_S = 300.0
"""Limit of launch.sh start: several docker commands a slot, each with a limit of its own there."""


class DockerEngine:
    """Containers of one run on one node, one a slot."""

    def __init__(
        self,
        transport: Transport,
        folder: str,
        run: str,
        slots: Sequence[str],
        options: DockerOptions,
        *,
        progress: Callable[[str], None] = lambda text: None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._transport, self._folder, self._run = transport, folder, run
        self._slots, self._options = tuple(slots), options
        self._progress = progress
        """Called with the progress of a pull."""
        self._docker = Docker(transport, options, limit_s)
        self._pulled = False

    @property
    def node(self) -> str:
        return self._transport.node

    # --- Engine -----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Pull the image as configured (`always`: once by this object). Raise EngineError where it stays missing."""
        if self._pulled:
            return
        if self._options.pull == "always":
            self.pull(self._progress)
        elif self.image_digest() is None:
            if self._options.pull == "never":
                raise engine_error(self.node, self._options, f"No such image: {self._options.image}")
            self.pull(self._progress)
        self._pulled = True

    def start(self, slots: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        self.prepare()
        given = [*self._options.private_lines(), *(f"{k}={v}" for k, v in (env or {}).items())]
        if any("\n" in line for line in given):
            raise EngineError(self.node, "a value from the environment has more than one line")
        lines = "".join(f"{line}\n" for line in given)
        argv = ["sh", f"{self._folder}/launch.sh", "start", *slots]
        done = self._transport.run(argv, stdin=lines.encode(), timeout=START_TIMEOUT_S)
        if done.code != 0:
            message = "it took too long: Docker hangs or is overloaded" if done.code == 124 else done.text
            raise engine_error(self.node, self._options, message, self._docker.socket_group)

    def list(self) -> list[WorkerState]:
        return self._docker.ask(lambda c: [self._state(c, slot) for slot in self._slots])

    def stop(self, *, kill: bool = False) -> None:
        signal = "SIGKILL" if kill else "SIGTERM"
        for name in (self._name(slot) for slot in self._slots):
            self._docker.ask(lambda c, name=name: _unless_gone(lambda: c.kill(name, signal)))  # type: ignore[misc]

    # --- beyond it --------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Create a container that is never started, from which tune.sh reads image and mounts that are in no file."""
        if self._options.written is None:
            return
        self.prepare()
        binds = list(self._options.volumes)
        slot = self._slots[0]
        self._docker.ask(
            lambda c: c.create_container(
                self._options.image,
                command=["true"],
                name=f"{self._name(slot)}-held",
                labels=labels(self._run, self.node) | {"gemmfleet.slot": slot},
                host_config=c.create_host_config(binds=binds),
            ),
            again=False,
        )

    def remove(self) -> tuple[str, ...]:
        """Remove every container of this run on this node, running or not; return their names."""
        wanted = [f"{k}={v}" for k, v in labels(self._run, self.node).items()]
        found = self._docker.ask(lambda c: c.containers(all=True, filters={"label": wanted}))
        for one in found:
            self._docker.ask(
                lambda c, one=one: _unless_gone(lambda: c.remove_container(one["Id"], force=True, v=True))  # type: ignore[misc]
            )
        return tuple(sorted(_name_of(one) for one in found))

    def tidy(self) -> None:
        """Remove every container of this run, and of no other."""
        self.remove()

    def image_digest(self) -> str | None:
        """The hash of the image's content on the node, `sha256:...`; None where it is missing."""
        found = self._docker.ask(lambda c: _none_if_missing(lambda: c.inspect_image(self._options.image)))
        return None if found is None else str(found["Id"])

    def pull(self, progress: Callable[[str], None]) -> None:
        """Pull the image; `progress` is called with sentences. No other limit than PULL_SILENCE_S of silence."""

        def fetch(client: NodeClient) -> str:
            old, client.timeout = client.timeout, PULL_SILENCE_S
            try:
                lines = client.pull(self._options.image, stream=True, decode=True)
            finally:
                client.timeout = old
            return follow_pull((self._options.written or self._options).image, lines, progress)

        fault = self._docker.ask(fetch, again=False)
        if fault:
            raise engine_error(self.node, self._options, fault)

    def close(self) -> None:
        """Close the channels; the containers go on."""
        self._docker.close()

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _name(self, slot: str) -> str:
        return container_name(self._run, self.node, slot)

    def _state(self, client: NodeClient, slot: str) -> WorkerState:
        found = _none_if_missing(lambda: client.inspect_container(self._name(slot)))
        return worker_state(slot, found) if found is not None else WorkerState(slot, "absent")


def _none_if_missing(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except docker.errors.NotFound:
        return None


def _unless_gone(call: Callable[[], Any]) -> None:
    """A container that has ended or is gone (404, 409) needs no stopping and no removing."""
    try:
        call()
    except docker.errors.APIError as e:
        if e.status_code not in (404, 409):
            raise


def _name_of(listed: Mapping[str, Any]) -> str:
    return str((listed.get("Names") or ["/?"])[0]).lstrip("/")
