"""The process of one backend: holds it and its operands, and measures on command (runner.py is the other end).

`python -m worker.bench.child SPEC.json FD`: commands come over the socket FD, a JSON object each; each is answered by
one object, with `alive` before it as often as there is progress. Whatever the backend does to this process, its parent
sees the end of it. Without FD the commands of the spec are carried out once, under a profiler; the answers are printed.

    at first   ready {facts}, or refused {status, detail, facts}
    prepare    {family, key, err_ratio} -> done {op, kernel, err, status, config, flops, bytes}
    sample     -> done {us, spread, samples}
    calls      {calls} -> done: the same calls for a profiler, untimed
    drop       -> done
    canary     -> done {ok, us, detail}
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.aiter_tree.locate import NotATreeError, choose
from worker.bench.software import stack
from worker.protocol.bench import BenchOptions
from worker.protocol.paths import AITER_ROOT_ENV
from worker.text import clean
from worker.tuners.base import ALIVE_EVERY_S
from worker.tuners.common.case import case_of
from worker.tuners.common.problem import UnavailableError, UnsupportedError, is_fatal, status_of

if TYPE_CHECKING:
    from worker.bench.measuring import Backend, ReadyCase

Message = dict[str, Any]
"""A command, as `{"do": "calls", "calls": 26}`, or an answer, as `{"is": "done", "us": 9.9, ...}`."""


class BackendServer:
    """Executes commands; `held` is the prepared shape."""

    def __init__(self, backend: str, options: BenchOptions, say: Callable[[Message], None]) -> None:
        self._name = backend
        self._options = options
        self._say = say
        self._quiet_since = 0.0
        self._backend: Backend | None = None
        self._held: ReadyCase | None = None

    def start(self) -> Message:
        """Import torch and the backend. `ready` with what this stack is, or `refused`."""
        facts = stack()
        try:
            from worker.tuners.common.device import Device

            self._device = Device()
            facts = {**self._device.info(), **facts}
            if self._name:
                from worker.bench.backends import make_backend

                self._backend = make_backend(self._name, self._options, self._device)
                facts |= self._backend.load()
            else:
                with contextlib.suppress(NotATreeError):
                    facts["has_aiter"] = bool(choose(os.environ.get(AITER_ROOT_ENV, "")))
        except Exception as e:  # noqa: BLE001 - a backend may raise anything; the reason is its answer
            if not isinstance(e, (UnavailableError, ImportError)):
                traceback.print_exc()
            return {**self._refusal(e), "status": "unavailable", "facts": facts}
        return {"is": "ready", "facts": facts}

    def execute(self, command: Message) -> Message:
        """Execute one command; its answer. An exception of the backend is an answer too."""
        methods: dict[str, Callable[..., Message]] = {
            "prepare": self._prepare,
            "sample": self._sample,
            "calls": self._calls,
            "drop": self._drop,
            "canary": self._canary,
        }
        arguments = {name: value for name, value in command.items() if name != "do"}
        try:
            return {"is": "done", **methods[command["do"]](**arguments)}
        except Exception as e:  # noqa: BLE001 - as above
            self._held = None
            if is_fatal(e):  # the device is not to be trusted in this process any more
                traceback.print_exc()
                self._say({"is": "fault", "detail": clean(f"{type(e).__name__}: {e}")})
                os._exit(70)
            return self._refusal(e)

    def _refusal(self, e: Exception) -> Message:
        if isinstance(e, (UnavailableError, UnsupportedError)):
            status = "unavailable" if isinstance(e, UnavailableError) else "unsupported"
            return {"is": "refused", "status": status, "detail": str(e)}
        status = status_of(e)
        text = _describe(e)
        if "0 active drivers" in text:
            status = "unavailable"
            text = "Triton finds no GPU that it has a driver for"
        # AITER asserts what it takes; torch names the scales that it would take
        if status == "error" and (isinstance(e, AssertionError) or "Invalid scaling configuration" in text):
            status = "unsupported"
        if status == "error":
            traceback.print_exc()
        return {"is": "refused", "status": status, "detail": clean(text.strip().split("\n", 1)[0], 500)}

    def _prepare(self, family: str, key: dict[str, int | str], err_ratio: float) -> Message:
        from worker.bench.measuring import prepare

        self._drop()
        assert self._backend is not None
        case = case_of(family, key, self._name, str(self._device.info().get("gfx", "")))
        answer, self._held = prepare(case, self._backend, self._device, self._options, err_ratio, self._alive)
        return answer

    def _sample(self) -> Message:
        assert self._held is not None, "no shape is prepared"
        return self._held.sample(self._options, self._alive)

    def _calls(self, calls: int) -> Message:
        assert self._held is not None, "no shape is prepared"
        self._held.call(calls)
        return {}

    def _drop(self) -> Message:
        """Free the shape's memory: other backends share the device, each in a process of its own."""
        import torch

        self._held = None
        torch.cuda.empty_cache()  # without a GPU it does nothing
        return {}

    def _canary(self) -> Message:
        from worker.tuners.common.device import canary

        return dict(zip(("ok", "us", "detail"), canary(self._device), strict=True))

    def _alive(self) -> None:
        now = time.monotonic()
        if now - self._quiet_since >= ALIVE_EVERY_S:
            self._quiet_since = now
            self._say({"is": "alive"})


def _describe(e: Exception) -> str:
    """Type and text of an exception; of one without a text the line that raised it."""
    if str(e):
        return f"{type(e).__name__}: {e}"
    frames = traceback.extract_tb(e.__traceback__)
    if not frames:
        return type(e).__name__
    return f"{type(e).__name__} at {Path(frames[-1].filename).name}: {frames[-1].line}"


def main(spec: Path, fd: int | None = None) -> int:
    """Serve the socket until it closes, or carry out the commands of the spec; 0 if none of these was refused."""
    request = json.loads(spec.read_text())
    if fd is None:
        return _carry_out(request)
    os.set_inheritable(fd, False)
    _serve(request, Connection(fd))
    return 0


def _serve(request: Message, connection: Connection) -> None:
    """Answer commands until the socket closes; then `recv_bytes` raises EOFError."""

    def say(message: Message) -> None:
        connection.send_bytes(_encode(message).encode())

    server = _make_server(request, say)
    answer = server.start()
    say(answer)
    if answer["is"] != "ready":
        return
    import torch

    with torch.inference_mode(), contextlib.suppress(EOFError):
        while True:
            command = json.loads(connection.recv_bytes())
            say(server.execute(command))


def _carry_out(request: Message) -> int:
    """Carry out the commands of the spec, and print the answers. Return 1 if one was refused, which ends it, else 0."""

    def say(message: Message) -> None:
        print(_encode(message))

    server = _make_server(request, say)
    answer = server.start()
    say(answer)
    if answer["is"] != "ready":
        return 1
    import torch

    with torch.inference_mode():
        for command in request["commands"]:
            answer = server.execute(command)
            say(answer)
            if answer["is"] == "refused":
                return 1
    return 0


def _make_server(request: Message, say: Callable[[Message], None]) -> BackendServer:
    return BackendServer(request["backend"], BenchOptions.parse(request["options"]), say)


def _encode(message: Message) -> str:
    return json.dumps(message, default=str)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
