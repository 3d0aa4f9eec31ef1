"""Engine `docker`: launch.sh starts the workers; the docker package lists, stops and removes them and pulls the image.

The methods of `DockerEngine` are those of `engines.Engine`. `docker_client.py` has the connection to a node's Docker.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import docker.errors

from orchestrator.engine.docker_client import LIMIT_S, Docker, NodeClient
from orchestrator.engine.docker_errors import engine_error
from orchestrator.engine.docker_options import DockerOptions, container_labels, container_name
from orchestrator.engines import WorkerState
from orchestrator.errors import EngineError
from orchestrator.transport.base import Transport

PULL_SILENCE_S = 300.0
"""Longest silence during a pull."""
START_TIMEOUT_S = 300.0
"""Time limit for `launch.sh start`. It runs several docker commands for each slot, each with its own limit."""
TIMED_OUT = 124
"""The exit code of `timeout` when the command's time is over."""
EVERY_S = 1.0
"""The progress of a pull is told so often."""
ALIVE = ("running", "restarting", "paused")
"""States of a container whose worker counts as running."""
_DONE = ("Download complete", "Pull complete", "Already exists")
"""States of a layer whose bytes are all there."""


def worker_state(slot: str, inspected: Mapping[str, Any]) -> WorkerState:
    """The state of a slot's container. `restarting` counts as running: Docker is about to start it again."""
    state = inspected.get("State") or {}
    oom_killed = bool(state.get("OOMKilled"))
    if str(state.get("Status", "")) in ALIVE:
        return WorkerState(slot, "running", oom_killed=oom_killed)
    code = state.get("ExitCode")
    if not isinstance(code, int):
        return WorkerState(slot, "ended", oom_killed=oom_killed)
    signal = code - 128 if 128 < code <= 192 else None  # as a shell reports it
    return WorkerState(slot, "ended", code, oom_killed=oom_killed, signal=signal)


def follow_pull(image: str, lines: Iterable[Mapping[str, Any]], progress: Callable[[str], None]) -> str:
    """Read a pull to its end, calling `progress` once a second; return Docker's error, or an empty text."""
    layers: dict[str, tuple[int, int]] = {}
    """Bytes that are there, and all, of each layer."""
    reported = 0.0
    for line in lines:
        if "error" in line:
            return str(line["error"])
        layer = str(line.get("id", ""))
        status = line.get("status")
        if status == "Downloading":
            detail = line.get("progressDetail") or {}
            layers[layer] = int(detail.get("current") or 0), int(detail.get("total") or 0)
        elif status in _DONE and layer in layers:
            _, total = layers[layer]
            layers[layer] = total, total
        if layers and time.monotonic() - reported >= EVERY_S:
            reported = time.monotonic()
            got_mb = sum(got for got, _ in layers.values()) / 1e6
            total_mb = sum(total for _, total in layers.values()) / 1e6
            progress(f"pulling {image}: {got_mb:.0f} of {total_mb:.0f} MB")
    progress(f"pulled {image}")
    return ""


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
        """`progress` is called with the progress of a pull."""
        self.node = transport.node
        self._transport = transport
        self._folder = folder
        self._run = run
        self._slots = tuple(slots)
        self._options = options
        self._progress = progress
        self._docker = Docker(transport, options, limit_s)
        self._pulled = False

    def prepare(self) -> None:
        """Pull the image as configured (`always`: once per object). Raise EngineError if it is still missing."""
        if self._pulled:
            return
        has_image = self._docker.ask(self._has_image)
        if not has_image and self._options.pull == "never":
            raise engine_error(self.node, self._options, f"No such image: {self._options.image}")
        if not has_image or self._options.pull == "always":
            self._pull()
        self._pulled = True

    def start(self, slots: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        self.prepare()
        lines = [*self._options.private_lines(), *(f"{name}={value}" for name, value in (env or {}).items())]
        if any("\n" in line for line in lines):
            raise EngineError(self.node, "a value from the environment has more than one line")
        argv = ["sh", f"{self._folder}/launch.sh", "start", *slots]
        stdin = "".join(f"{line}\n" for line in lines).encode()
        done = self._transport.run(argv, stdin=stdin, timeout=START_TIMEOUT_S)
        if done.code == TIMED_OUT:
            raise engine_error(self.node, self._options, "it took too long: Docker hangs or is overloaded")
        if done.code != 0:
            raise engine_error(self.node, self._options, done.text)

    def list(self) -> list[WorkerState]:
        return self._docker.ask(lambda c: [self._state(c, slot) for slot in self._slots])

    def stop(self, *, kill: bool = False) -> None:
        signal = "SIGKILL" if kill else "SIGTERM"
        for name in map(self._name, self._slots):
            # Docker starts a container with `on-failure` and a code other than 0 again with itself, also a dead one
            self._unless_gone("update_container", name, restart_policy={"Name": "no"})
            self._unless_gone("kill", name, signal)

    def hold(self) -> None:
        """Create a container that is never started. tune.sh reads the image and mounts from it; no file has them."""
        if self._options.written is None:
            return
        self.prepare()
        self._docker.ask(
            lambda c: c.create_container(
                self._options.image,
                command=["true"],
                name=f"{self._name(self._slots[0])}-held",
                labels=container_labels(self._run, self.node) | {"gemmfleet.slot": self._slots[0]},
                host_config=c.create_host_config(binds=list(self._options.volumes)),
            ),
            again=False,
        )

    def tidy(self) -> None:
        """Remove this run's containers on this node, running or not. Other runs' containers stay."""
        labels = [f"{name}={value}" for name, value in container_labels(self._run, self.node).items()]
        for container in self._docker.ask(lambda c: c.containers(all=True, filters={"label": labels})):
            self._unless_gone("remove_container", container["Id"], force=True, v=True)

    def _pull(self) -> None:
        """Pull the image. The only limit is PULL_SILENCE_S without progress."""
        image = (self._options.written or self._options).image
        with contextlib.closing(Docker(self._transport, self._options, PULL_SILENCE_S)) as patient:
            fault = patient.ask(
                lambda c: follow_pull(image, c.pull(self._options.image, stream=True, decode=True), self._progress),
                again=False,
            )
        if fault:
            raise engine_error(self.node, self._options, fault)

    def close(self) -> None:
        """Close the channels; the containers go on."""
        self._docker.close()

    def _name(self, slot: str) -> str:
        return container_name(self._run, self.node, slot)

    def _has_image(self, client: NodeClient) -> bool:
        try:
            client.inspect_image(self._options.image)
        except docker.errors.NotFound:
            return False
        return True

    def _state(self, client: NodeClient, slot: str) -> WorkerState:
        try:
            return worker_state(slot, client.inspect_container(self._name(slot)))
        except docker.errors.NotFound:
            return WorkerState(slot, "absent")

    def _unless_gone(self, method: str, *words: object, **options: object) -> None:
        """Call a method of the client; ignore that the container has already ended or is gone (404, 409)."""

        def ask(client: NodeClient) -> None:
            try:
                getattr(client, method)(*words, **options)
            except docker.errors.APIError as e:
                if e.status_code not in (404, 409):
                    raise

        self._docker.ask(ask)
