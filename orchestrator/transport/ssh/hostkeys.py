"""Host keys: known_hosts as OpenSSH reads it, and the verdict on the key that a host shows.

A line is `[@marker] names type base64 [comment]` (sshd(8), SSH_KNOWN_HOSTS FILE FORMAT). Names are patterns
separated by commas, with `*`, `?` and `!`, or one hashed name `|1|salt|HMAC-SHA1`. A host on a port
other than 22 is `[host]:port`.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import re
import shlex
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from orchestrator.errors import HostKeyError
from orchestrator.transport.ssh.resolve import Hop

KEY_TYPES = {
    "ssh-ed25519": ("ssh-ed25519",),
    "ecdsa-sha2-nistp256": ("ecdsa-sha2-nistp256",),
    "ecdsa-sha2-nistp384": ("ecdsa-sha2-nistp384",),
    "ecdsa-sha2-nistp521": ("ecdsa-sha2-nistp521",),
    "ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256"),
}
"""Type of a known key -> signature algorithms that prove it, in our order of preference."""

_appending = threading.Lock()


@dataclass(frozen=True, slots=True)
class KnownHost:
    """A line of a known_hosts file."""

    file: Path
    line: int
    marker: str
    names: str
    type: str
    key: bytes

    def matches(self, name: str) -> bool:
        if self.names.startswith("|1|"):
            return _hash_matches(self.names, name)
        return _patterns_match(self.names.lower(), name.lower())

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


def fingerprint(key: bytes) -> str:
    """Fingerprint as `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def known(hop: Hop, names: Sequence[str] | None = None) -> list[KnownHost]:
    """The lines for a host in all files that OpenSSH would read for it."""
    return [e for e in _all(hop) if any(e.matches(n) for n in (hop.key_names if names is None else names))]


def algorithms(hop: Hop) -> list[str]:
    """Signature algorithms to ask for: first those of the key types that are known, as OpenSSH does.

    Otherwise a host whose ed25519 key is known could show its ECDSA key, which is not.
    """
    types = [e.type for e in known(hop) if not e.marker]
    order = [*(t for t in KEY_TYPES if t in types), *(t for t in KEY_TYPES if t not in types)]
    return [a for t in order for a in KEY_TYPES[t]]


def check(node: str, hop: Hop, type_: str, key: bytes, *, accept_new: bool) -> None:
    """Accept a known key; add an unknown one if that is wanted. Raises HostKeyError, with the way out."""
    lines = known(hop)
    for e in lines:
        if e.marker == "@revoked" and e.key == key:
            raise HostKeyError(node, f"the key that {_offer(hop, type_, key)} is revoked in {e.where}")
    plain = [e for e in lines if not e.marker]
    if any(e.key == key for e in plain):
        return
    named = [e for e in plain if e.matches(hop.key_names[0])]
    if named:
        raise HostKeyError(node, _changed(hop, type_, key, named))
    if not accept_new:
        raise HostKeyError(node, _unknown(hop, type_, key, [e for e in lines if e.marker == "@cert-authority"]))
    _append(node, hop, type_, key)


def _offer(hop: Hop, type_: str, key: bytes) -> str:
    return f"{hop.place}" + (f" ({hop.name})" if hop.name != hop.host else "") + f" shows ({type_} {fingerprint(key)})"


def _changed(hop: Hop, type_: str, key: bytes, lines: Sequence[KnownHost]) -> str:
    old = "; ".join(f"{e.where} holds {e.type} {fingerprint(e.key)}" for e in lines[:3])
    remove = f"ssh-keygen -R {shlex.quote(hop.key_names[0])} -f {shlex.quote(str(lines[0].file))}"
    return (
        f"the host key has changed: the key that {_offer(hop, type_, key)} is not the known one ({old}). Somebody may "
        f"be listening in, or the host was set up anew. If it really has a new key, remove the old line ({remove}) "
        f"and add the new key ({_scan(hop)})"
    )


def _unknown(hop: Hop, type_: str, key: bytes, authorities: Sequence[KnownHost]) -> str:
    files = ", ".join(str(f) for f in (*hop.user_files, *hop.global_files)) or "(no file is set)"
    text = f"the key that {_offer(hop, type_, key)} is not known; looked for {hop.key_names[0]} in {files}"
    if authorities:
        text += f". {authorities[0].where} trusts a certificate authority, but host certificates cannot be checked here"
    return text + (
        f". Compare the fingerprint with the host's own (ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub there), then add "
        f"it: {_scan(hop)}; or trust what comes first: --accept-new-host-keys"
    )


def _scan(hop: Hop) -> str:
    """The command that adds the key; a HostKeyAlias or a host behind another is best logged in to."""
    target = hop.user_files[0] if hop.user_files else Path("~/.ssh/known_hosts")
    if hop.key_names[0].strip("[]").split("]")[0] != hop.host.lower() or hop.proxy_command:
        return f"log in once with ssh {shlex.quote(hop.name)}"
    port = f"-p {hop.port} " if hop.port != 22 else ""
    return f"ssh-keyscan {port}{shlex.quote(hop.host)} >>{shlex.quote(str(target))}"


def _append(node: str, hop: Hop, type_: str, key: bytes) -> None:
    if not hop.user_files:
        raise HostKeyError(
            node, f"the key of {hop.place} cannot be kept: the configuration names no UserKnownHostsFile"
        )
    path = hop.user_files[0]
    name = _hashed(hop.key_names[0], os.urandom(20)) if hop.hash_names else hop.key_names[0]
    line = f"{name} {type_} {base64.b64encode(key).decode()}\n".encode()
    try:
        with _appending:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                size = os.fstat(fd).st_size
                torn = size and os.pread(fd, 1, size - 1) != b"\n"
                os.write(fd, b"\n" + line if torn else line)
            finally:
                os.close(fd)
    except OSError as e:
        raise HostKeyError(node, f"the key of {hop.place} cannot be kept in {path}: {e.strerror or e}") from e


# --- the files --------------------------------------------------------------------------------------------------------


def _all(hop: Hop) -> Iterator[KnownHost]:
    for path in (*hop.user_files, *hop.global_files):
        with contextlib.suppress(OSError):
            s = path.stat()
            yield from _parse(path, s.st_mtime_ns, s.st_size, s.st_ino)


@lru_cache(maxsize=64)
def _parse(path: Path, mtime_ns: int, size: int, inode: int) -> tuple[KnownHost, ...]:
    """Lines of the file in the state of the other arguments; invalid ones are passed over, as OpenSSH does."""
    out = []
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
        fields = line.split()
        marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
        if len(fields) < 3 or fields[0].startswith("#"):
            continue
        with contextlib.suppress(binascii.Error, ValueError):
            out.append(
                KnownHost(path, number, marker, fields[0], fields[1], base64.b64decode(fields[2], validate=True))
            )
    return tuple(out)


def _patterns_match(patterns: str, name: str) -> bool:
    found = False
    for pattern in patterns.split(","):
        if _pattern(pattern.removeprefix("!")).fullmatch(name):
            if pattern.startswith("!"):
                return False
            found = True
    return found


@lru_cache(maxsize=4096)
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile("".join(".*" if c == "*" else "." if c == "?" else re.escape(c) for c in text), re.DOTALL)


def _hashed(name: str, salt: bytes) -> str:
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def _hash_matches(field: str, name: str) -> bool:
    try:
        salt = base64.b64decode(field.split("|")[2], validate=True)
    except (IndexError, binascii.Error, ValueError):
        return False
    return hmac.compare_digest(_hashed(name, salt).encode(), field.encode())
