"""A registry that serves one small image, so that a pull can be tested without the internet."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.server
import io
import json
import tarfile
import threading
from collections.abc import Iterator

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _image(size: int) -> tuple[bytes, dict[str, bytes]]:
    """(manifest, blobs by digest) of an image with one file of `size` bytes that do not compress."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        info = tarfile.TarInfo("file")
        info.size = size
        tar.addfile(info, io.BytesIO(hashlib.shake_256(b"image").digest(size)))
    packed = gzip.compress(layer.getvalue(), 1, mtime=0)
    rootfs = {"type": "layers", "diff_ids": [_digest(layer.getvalue())]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs}).encode()

    def blob(kind: str, data: bytes) -> dict[str, object]:
        return {"mediaType": f"application/vnd.docker.{kind}", "size": len(data), "digest": _digest(data)}

    manifest = {
        "schemaVersion": 2, "mediaType": MANIFEST, "config": blob("container.image.v1+json", config),
        "layers": [blob("image.rootfs.diff.tar.gzip", packed)],
    }  # fmt: skip
    return json.dumps(manifest).encode(), {_digest(config): config, _digest(packed): packed}


@contextlib.contextmanager
def registry(address: str, size: int = 4_000_000) -> Iterator[str]:
    """Serves `ADDRESS:PORT/test/small:1`; yields that name."""
    manifest, blobs = _image(size)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            kind, body = "application/octet-stream", blobs.get(self.path.rpartition("/")[2])
            if self.path == "/v2/":
                kind, body = "application/json", b"{}"
            elif self.path in ("/v2/test/small/manifests/1", f"/v2/test/small/manifests/{_digest(manifest)}"):
                kind, body = MANIFEST, manifest
            found = body is not None
            data = body or b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}'
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", kind if found else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Docker-Content-Digest", _digest(data))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((address, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"{address}:{server.server_address[1]}/test/small:1"
        finally:
            server.shutdown()
            thread.join()
