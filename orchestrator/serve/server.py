"""HTTP server of the live page, on the loopback interface until Ctrl-C."""

from __future__ import annotations

import socket
from typing import Any, cast

from orchestrator.command_hints import command
from orchestrator.errors import InputError, OrchestratorError
from orchestrator.paths import RunPaths
from orchestrator.serve.guard import App, Guard

HOST = "127.0.0.1"
GRACE_S = 3


class PageServer:
    """The live page of a run. `url` holds the token; `run` blocks until `stop`, Ctrl-C or SIGTERM."""

    def __init__(self, paths: RunPaths, port: int = 0) -> None:
        """Listen on `port`, 0 for any free one.

        Raises InputError where it is in use, or the extra `serve` is not installed.
        """
        try:
            import uvicorn

            from orchestrator.serve.app import make_app
        except ModuleNotFoundError as e:
            raise InputError(
                f"serve needs {e.name}, which is not installed: make serve, or pip install 'gemmfleet[serve]';"
                f" {command('report')} needs neither"
            ) from e
        self._socket = _listen(port)
        number = int(self._socket.getsockname()[1])
        self._failed: list[OrchestratorError] = []
        app = make_app(paths, ending=lambda: self._server.should_exit, failed=self._failed.append)
        guard = Guard(cast(App, app), number)
        self.url = f"http://{HOST}:{number}/?token={guard.token}"
        config = uvicorn.Config(
            cast(Any, guard), log_level="critical", access_log=False, server_header=False, ws="none", lifespan="on",
            timeout_graceful_shutdown=GRACE_S, limit_concurrency=64,
        )  # fmt: skip
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Serve until stopped. Raises LedgerError or InputError where the first page fails."""
        try:
            self._server.run(sockets=[self._socket])
        except SystemExit:  # uvicorn exits so when the application does not start
            if not self._failed:
                raise
        finally:
            self._socket.close()
        for e in self._failed:
            raise e

    def stop(self) -> None:
        """End `run`, from another thread."""
        self._server.should_exit = True


def _listen(port: int) -> socket.socket:
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        s.bind((HOST, port))
        s.listen(64)  # a browser that connects before the first page waits for it
    except OSError as e:
        s.close()
        raise InputError(
            f"port {port} of this machine cannot be used: {e.strerror}; without --port a free one is"
        ) from e
    return s
