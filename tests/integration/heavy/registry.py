"""A registry that serves one small image, so that a pull can be tested without the internet."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator

from tests.support.httpd import Answer, served

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
    there = {"1": manifest, _digest(manifest): manifest, **blobs}
    none = b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}'

    def answer(path: str) -> Answer:
        found = there.get(path.rpartition("/")[2])
        if found is None:
            return (200, b"{}", "application/json") if path == "/v2/" else (404, none, "application/json")
        return 200, found, MANIFEST if found is manifest else "application/octet-stream"

    with served(answer, address) as port:
        yield f"{address}:{port}/test/small:1"
