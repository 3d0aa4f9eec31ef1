"""Login to a host: private keys of files and the agent, the order of offers, and the way out when none is accepted.

The order is OpenSSH's: keys of the agent that belong to a configured identity, other keys of the agent (unless
IdentitiesOnly), then files. An identity from the inventory is offered alone, and the agent is asked only where the file
is encrypted. Passwords are never asked for.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import socket
import struct
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from orchestrator.errors import LoginError, UnreachableError
from orchestrator.transport.ssh.hostkeys import fingerprint
from orchestrator.transport.ssh.resolve import Hop

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
    """The public key, where it is known; an encrypted file has it, too."""
    encrypted: bool = False
    why: str = ""


def load(path: Path) -> KeyFile | None:
    """Load a private key; None where there is no such file."""
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
    """Parse a key once for a fleet that shares it: an RSA key takes long. The other arguments are the file's state."""
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


class SshAgent:
    """An ssh-agent's keys; close it after the login."""

    def __init__(self, path: str) -> None:
        """Raises OSError or paramiko's SSHException."""
        import paramiko.agent

        conn = socket.socket(socket.AF_UNIX)
        try:
            conn.settimeout(AGENT_TIMEOUT_S)
            conn.connect(path)
            # paramiko's own SshAgent takes the environment's socket only, and would wait for ever
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


MAX_OFFERS = 6
"""sshd's default MaxAuthTries: it hangs up after so many."""


class Login:
    """Authentication strategy as fabric calls it: `authenticate(transport)`."""

    def __init__(self, node: str, hop: Hop) -> None:
        self._node, self._hop = node, hop
        self._notes: list[str] = []
        """Reasons why keys were not offered, or not accepted."""

    def authenticate(self, transport: Any) -> None:
        """Returns when logged in. Raises LoginError, or UnreachableError where the link broke."""
        import paramiko

        offered = 0
        with contextlib.closing(self._candidates()) as candidates:
            for where, key in candidates:
                if offered == MAX_OFFERS:
                    self._notes.append(f"no more than {MAX_OFFERS} keys are offered (IdentitiesOnly yes limits them)")
                    break
                offered += 1
                try:
                    more = transport.auth_publickey(self._hop.user, key)
                except paramiko.BadAuthenticationType as e:
                    self._notes.append(f"the host takes no keys, only {', '.join(e.allowed_types)}")
                    break
                except paramiko.AuthenticationException as e:
                    if not transport.is_active():
                        self._notes.append(f"the host hung up ({e})")
                        break
                    self._notes.append(f"not taken: {where}")
                    continue
                except (paramiko.SSHException, EOFError, OSError) as e:
                    if not transport.is_active():
                        raise UnreachableError(
                            self._node, f"the connection broke while logging in to {self._hop.title}: {e}"
                        ) from e
                    self._notes.append(f"cannot be used: {where} ({e})")
                    continue
                if not more:
                    return
                self._notes.append(f"{where} is taken, but the host asks for more ({', '.join(more)})")
                break
        raise LoginError(self._node, self._complaint(offered))

    def _candidates(self) -> Generator[tuple[str, Any], None, None]:
        """(description, key) in the order to offer; the agent is used only where it is needed."""
        files = [f for f in map(load, self._hop.identities) if f is not None]
        if self._hop.chosen and files and files[0].key is not None:
            yield str(files[0].path), files[0].key
            return
        seen: set[bytes] = set()
        agent = self._agent()
        try:
            if agent is not None:
                for words, key in self._of_agent(agent, files):
                    seen.add(key.asbytes())
                    yield words, key
        finally:
            if agent is not None:
                agent.close()
        for f in files:
            if f.key is None:
                if f.public not in seen:
                    self._notes.append(f.why)
            elif f.public not in seen:
                yield str(f.path), f.key

    def _agent(self) -> SshAgent | None:
        import paramiko

        if self._hop.agent is None:
            return None
        try:
            return SshAgent(self._hop.agent)
        except (OSError, paramiko.SSHException) as e:
            self._notes.append(f"ssh-agent at {self._hop.agent} does not answer: {e}")
            return None

    def _of_agent(self, agent: SshAgent, files: list[KeyFile]) -> Iterator[tuple[str, Any]]:
        order = {f.public: i for i, f in enumerate(files) if f.public}
        wanted = [k for k in agent.keys if k.asbytes() in order]
        wanted.sort(key=lambda k: order[k.asbytes()])
        others = [] if self._hop.identities_only else [k for k in agent.keys if k.asbytes() not in order]
        for key in [*wanted, *others]:
            if key.inner_key is None:  # certificates, security keys
                self._notes.append(
                    f"ssh-agent's {key.get_name()} key {key.comment} is of a kind that cannot be used here"
                )
                continue
            yield f"ssh-agent's {describe(key)} {key.comment}".rstrip(), key

    def _complaint(self, offered: int) -> str:
        hop = self._hop
        missing = [str(p) for p in hop.identities if load(p) is None]
        encrypted = [f for f in map(load, hop.identities) if f is not None and f.encrypted]
        text = f"{hop.title} did not let us in" if offered else f"there is no key to log in to {hop.title} with"
        if self._notes:
            text += ": " + "; ".join(self._notes)
        if hop.chosen and missing:
            return f"the identity {missing[0]} for {hop.title} does not exist"
        if encrypted and any(str(encrypted[0].path) in n for n in self._notes):
            text += f". Run: ssh-add {encrypted[0].path}"
        elif offered:
            text += f". Put the public key into ~/.ssh/authorized_keys of {hop.user} there, "
            text += "or set user or identity of the node"
        else:
            text += ". Set the node's identity, or load a key with ssh-add"
        if hop.cannot:
            text += f". Of your ssh configuration this is not followed: {'; '.join(hop.cannot)}"
        return text + ". Passwords are never asked for"
