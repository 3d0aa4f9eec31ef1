"""The process of one backend: holds it and its operands, and measures on command (runner.py is the other end).

`python -m worker.bench.child FD SPEC.json`: commands come on stdin, a JSON object a line; each is answered by one
object on descriptor FD, with `alive` before it as often as there is progress. Whatever the backend does to this
process, its parent sees the end of it. Without FD the commands of the spec are carried out once, under a profiler.

    ready      {facts}                                  or unavailable {detail}
    prepare    {family, key, err_ratio} -> prepared {op, kernel, err, detail, timed, config, flops, bytes}
                                        or refused {status}
    sample     -> sampled {us, spread, samples}         or refused
    calls      {warmup, calls} -> called                the same calls for a profiler, untimed
    drop       -> dropped
    canary     -> canary {ok, us, detail}
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.bench.case import parse
from worker.protocol.bench import Options
from worker.text import clean
from worker.tuners.base import ALIVE_EVERY_S
from worker.tuners.common.problem import UnavailableError, UnsupportedError

if TYPE_CHECKING:
    from worker.bench.backends.measuring import Backend, Prepared
    from worker.tuners.common.device import Device

Say = Callable[[dict[str, Any]], None]


class BackendServer:
    """Executes commands; `held` is the prepared shape."""

    def __init__(self, backend: str, options: Options, say: Say) -> None:
        self._name = backend
        self._options = options
        self._say = say
        self._quiet_since = 0.0
        self._backend: Backend | None = None
        self._held: Prepared | None = None

    def start(self) -> dict[str, Any]:
        """Import torch and the backend. `ready` with what this stack is, or `unavailable`."""
        from worker.bench.software import has_aiter, stack

        facts = stack()
        try:
            from worker.tuners.common.device import Device
        except ImportError as e:
            return {"is": "unavailable", "detail": f"torch cannot be imported: {e}", "facts": facts}
        self._device = Device()
        facts |= {k: v for k, v in self._device.info().items() if k not in facts}
        if not self._name:
            return {"is": "ready", "facts": {**facts, "has_aiter": has_aiter()}}
        try:
            self._backend = make_backend(self._name, self._options, self._device)
            facts |= self._backend.load()
        except UnavailableError as e:
            return {"is": "unavailable", "detail": str(e), "facts": facts}
        except ImportError as e:
            return {"is": "unavailable", "detail": f"{type(e).__name__}: {e}", "facts": facts}
        return {"is": "ready", "facts": facts}

    def execute(self, command: dict[str, Any]) -> dict[str, Any]:
        """Execute one command; its answer. An exception of the backend is an answer too."""
        from worker.tuners.common.rows import is_fatal

        try:
            return self._dispatch(command)
        except UnavailableError as e:
            return {"is": "refused", "status": "unavailable", "detail": str(e)}
        except UnsupportedError as e:
            return {"is": "refused", "status": "unsupported", "detail": str(e)}
        except Exception as e:  # noqa: BLE001 - a backend may raise anything
            self._held = None
            if is_fatal(e):  # the device is not to be trusted in this process any more
                traceback.print_exc()
                self._say({"is": "fault", "detail": clean(f"{type(e).__name__}: {e}")})
                os._exit(70)
            return self._refusal(e)

    def _refusal(self, e: Exception) -> dict[str, Any]:
        from worker.tuners.common.rows import status_of

        text = f"{type(e).__name__}: {e}" if str(e) else f"{type(e).__name__} at {_place(e)}"
        if "0 active drivers" in text:
            return {"is": "refused", "status": "unavailable", "detail": "Triton finds no GPU that it has a driver for"}
        status = status_of(e)
        # AITER asserts what it takes; torch names the scales that it would take
        if status == "error" and (isinstance(e, AssertionError) or "Invalid scaling configuration" in text):
            status = "unsupported"
        if status == "error":
            traceback.print_exc()
        return {"is": "refused", "status": status, "detail": clean(text.strip().split("\n", 1)[0], 500)}

    def _dispatch(self, command: dict[str, Any]) -> dict[str, Any]:
        do = command["do"]
        if do == "canary":
            from worker.tuners.common.device import canary

            ok, us, detail = canary(self._device)
            return {"is": "canary", "ok": ok, "us": us, "detail": detail}
        if do == "drop":
            self._release()
            return {"is": "dropped"}
        if do == "prepare":
            from worker.bench.backends.measuring import prepare

            self._release()
            assert self._backend is not None
            gfx = str(self._device.info().get("gfx", ""))
            case = parse(command["family"], command["key"], self._name, gfx)
            made = prepare(case, self._backend, self._device, self._options, command["err_ratio"], self._alive)
            self._held = made if made.status == "ok" and made.timed else None
            return {"is": "prepared", **made.as_answer()}
        if self._held is None:
            raise UnsupportedError("no shape is prepared")
        if do == "calls":
            self._held.run(command["warmup"], command["calls"])
            return {"is": "called"}
        return {"is": "sampled", **self._held.sample(self._options.sample_s, self._alive)}

    def _release(self) -> None:
        """Free the shape's memory: other backends share the device, each in a process of its own."""
        self._held = None
        if self._device.gpu:
            import torch

            torch.cuda.empty_cache()

    def _alive(self) -> None:
        now = time.monotonic()
        if now - self._quiet_since >= ALIVE_EVERY_S:
            self._quiet_since = now
            self._say({"is": "alive"})


def make_backend(name: str, options: Options, device: Device) -> Backend:
    """The backend of that name (worker.families.backends.BENCHED)."""
    if name == "torch":
        from worker.bench.backends.with_torch import TorchBackend

        return TorchBackend()
    if name == "aiter":
        from worker.bench.backends.with_aiter import Dispatch

        return Dispatch()
    if name == "aiter-gluon":
        from worker.bench.backends.gluon import GluonBackend

        return GluonBackend(options, device)
    from worker.bench.backends.with_aiter import AiterTriton

    return AiterTriton(name, next(iter(options.configs.values()), None))


def _place(e: BaseException) -> str:
    """Source line of an exception without a text, `?` if unknown."""
    frames = traceback.extract_tb(e.__traceback__)
    return f"{Path(frames[-1].filename).name}: {frames[-1].line}" if frames else "?"


def inference() -> AbstractContextManager[Any]:
    """torch without gradients; nothing where there is no torch."""
    try:
        import torch
    except ImportError:
        return nullcontext()
    return torch.inference_mode()


def main(fd: int, spec: Path) -> int:
    """Serve until stdin ends."""
    request = json.loads(spec.read_text())
    os.set_inheritable(fd, False)

    def say(message: dict[str, Any]) -> None:
        line = json.dumps(message, default=str).encode() + b"\n"
        while line:
            line = line[os.write(fd, line) :]

    server = BackendServer(request["backend"], Options.parse(request["options"]), say)
    try:
        say(server.start())
    except Exception as e:  # noqa: BLE001 - a backend may raise anything; the reason is its answer
        traceback.print_exc()
        say({"is": "unavailable", "detail": clean(f"{type(e).__name__}: {e}", 500)})
    with inference():
        while line := sys.stdin.buffer.readline():
            say(server.execute(json.loads(line)))
    return 0


def profile(spec: Path) -> int:
    """Carry out the commands of a spec for a profiler that watches; 0 where the calls were made.

    The last answer goes into `answer.json` beside the spec.
    """
    request = json.loads(spec.read_text())
    server = BackendServer(request["backend"], Options.parse(request["options"]), lambda message: None)
    answer = server.start()
    if answer["is"] == "ready":
        with inference():
            for command in request["commands"]:
                answer = server.execute(command)
                if answer["is"] == "refused":
                    break
    spec.with_name("answer.json").write_text(json.dumps(answer, default=str))
    return 0 if answer["is"] == "called" else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])) if len(sys.argv) > 2 else profile(Path(sys.argv[1])))
