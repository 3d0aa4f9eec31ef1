"""The tuner's handle on the measuring process, the only one that owns the GPU.

`restart` starts it and waits until it has opened the device; then commands are sent, and messages come
(`messages.py`). If it dies or hangs, the caller decides whether it is restarted. `measuring_server.py` is the other
side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from worker.tuners.common.helper_process import HelperError, HelperProcess, HelperTimedOut
from worker.tuners.search.forked_process import ForkedProcess, Serve
from worker.tuners.search.messages import Alive, CandidateBegan, DeviceOpened, Fatal, SetEnvironment

OPEN_S = 240.0
"""Seconds until the device is open: a driver that was never loaded may take its time."""


class NoDeviceError(Exception):
    """The measuring process does not come up."""


class MeasuringProcess(HelperProcess):
    """One measuring process, and its successors."""

    def __init__(self, serve: Serve, env: dict[str, str], hang_s: float, args: tuple[Any, ...] = ()) -> None:
        """`serve(connection, *args)`: what the process does. `hang_s`: it is ended after such a silence while it has
        work."""
        super().__init__(lambda: ForkedProcess("the measuring process", serve, self._env, *args), hang_s)
        self.device: DeviceOpened | None = None
        """The device as the process described it when it had opened it."""
        self._env = env

    def is_answer(self, message: Any) -> bool:
        return not isinstance(message, (Alive, CandidateBegan))

    def last_words(self, message: Any) -> str:
        return message.detail if isinstance(message, Fatal) else ""

    def restart(self, alive: Callable[[], None] = lambda: None) -> DeviceOpened:
        """Replace the process by a new one, which opens the device. Raises NoDeviceError with the reason."""
        self.start(greets=True)
        try:
            opened = self.wait_for_answer(OPEN_S, alive)
        except HelperTimedOut as e:
            raise NoDeviceError(f"no answer within {OPEN_S:g} s") from e
        except HelperError as e:
            raise NoDeviceError(str(e)) from e
        assert isinstance(opened, DeviceOpened)
        self.device = opened
        return opened

    def set_environment(self, env: dict[str, str]) -> None:
        """Environment for this process and its successors. Waits until the process is warm."""
        self._env = {**self._env, **env}
        self.send(SetEnvironment(env))
        with contextlib.suppress(HelperError):  # the next use starts another one, with this environment
            self.wait_for_answer(OPEN_S)
