"""A small HTTP server for the length of a block."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator

Answer = tuple[int, bytes, str]
"""Status, body, content type."""


@contextlib.contextmanager
def served(answer: Callable[[str], Answer], address: str = "127.0.0.1") -> Iterator[int]:
    """Answers GET and HEAD of a path; yields the port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, body, kind = answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    with http.server.ThreadingHTTPServer((address, 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
