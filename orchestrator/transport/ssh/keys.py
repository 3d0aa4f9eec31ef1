"""Private keys: what lies in a file, what the agent holds. Nothing ever asks for a password."""

from __future__ import annotations

import base64
import binascii
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from orchestrator.transport.ssh.hostkeys import fingerprint

_OPENSSH = (b"-----BEGIN OPENSSH PRIVATE KEY-----", b"-----END OPENSSH PRIVATE KEY-----")
_MAGIC = b"openssh-key-v1\0"
AGENT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class KeyFile:
    """A private key's file: its key, or why it cannot be used."""

    path: Path
    key: Any = None
    """paramiko's PKey; None where `why` says why not."""
    public: bytes | None = None
    """The public key, where it is known; an encrypted file tells it, too."""
    encrypted: bool = False
    why: str = ""


def load(path: Path) -> KeyFile | None:
    """None where there is no such file."""
    try:
        s = path.stat()
    except OSError:
        return None
    try:
        return _load(path, s.st_mtime_ns, s.st_size)
    except OSError as e:
        return KeyFile(path, why=f"{path} cannot be read: {e.strerror or e}")


@lru_cache(maxsize=64)
def _load(path: Path, mtime_ns: int, size: int) -> KeyFile:
    """Parsing an RSA key takes long; a fleet shares one key. The other arguments say which state of the file."""
    import paramiko

    data = path.read_bytes()
    cipher, public = _openssh_header(data)
    public = public or _public_beside(path)
    kind = _type_of(public)
    if cipher not in ("", "none") or b"ENCRYPTED" in data:
        return KeyFile(path, public=public, encrypted=True, why=f"{path} is encrypted and ssh-agent does not hold it")
    if kind.startswith("sk-"):
        return KeyFile(path, public=public, why=f"{path} is a security key ({kind}), which cannot be used here")
    try:
        key = paramiko.PKey.from_path(path)
    except OSError:
        raise
    except Exception as e:  # noqa: BLE001  paramiko and cryptography raise many kinds for a file that is no key
        return KeyFile(path, public=public, why=f"{path} is no private key that can be used here: {e}")
    return KeyFile(path, key, key.asbytes())


def _openssh_header(data: bytes) -> tuple[str, bytes | None]:
    """(cipher, public key) of a file in OpenSSH's format (PROTOCOL.key); ("", None) for any other."""
    begin, end = data.find(_OPENSSH[0]), data.find(_OPENSSH[1])
    if begin < 0 or end < 0:
        return "", None
    try:
        blob = base64.b64decode(data[begin + len(_OPENSSH[0]) : end])
    except binascii.Error:
        return "", None
    if not blob.startswith(_MAGIC):
        return "", None
    fields, at = [], len(_MAGIC)
    try:
        for i in range(4):
            if i == 3:
                at += 4  # the number of keys: one
            (length,) = struct.unpack_from(">I", blob, at)
            fields.append(blob[at + 4 : at + 4 + length])
            at += 4 + length
    except struct.error:
        return "", None
    return fields[0].decode("ascii", "replace"), fields[3]


def _public_beside(path: Path) -> bytes | None:
    try:
        words = path.with_name(path.name + ".pub").read_text("utf-8", "replace").split()
        return base64.b64decode(words[1], validate=True)
    except (OSError, IndexError, binascii.Error, ValueError):
        return None


def _type_of(public: bytes | None) -> str:
    if not public or len(public) < 4:
        return ""
    (length,) = struct.unpack_from(">I", public)
    return public[4 : 4 + length].decode("ascii", "replace")


class Agent:
    """An ssh-agent's keys; close it after the login."""

    def __init__(self, path: str) -> None:
        """Raises OSError or paramiko's SSHException."""
        import paramiko.agent

        conn = socket.socket(socket.AF_UNIX)
        try:
            conn.settimeout(AGENT_TIMEOUT_S)
            conn.connect(path)
            # paramiko's own Agent takes the environment's socket only, and would wait for ever
            self._agent: Any = paramiko.agent.AgentSSH()
            self._agent._connect(conn)
        except BaseException:
            conn.close()
            raise
        self.keys: Sequence[Any] = self._agent.get_keys()

    def close(self) -> None:
        self._agent._close()


def describe(key: Any) -> str:
    """Type and fingerprint."""
    return f"{key.get_name()} {fingerprint(key.asbytes())}"
