"""Starts one command that runs code which is not ours, with limits, and where the kernel allows it on its own.

`runner` starts this file as a script: `python -I -S -B enter.py ORDER COMMAND...`; ORDER is a JSON object with the
descriptor of a socket (`control`), the command's folder (`home`) and the limits. Processes, from the outside to the
inside:

    this one -> one that makes the namespaces -> process number 1 in them, which watches -> the command

If the kernel refuses the namespaces, this process watches the command itself. On the socket go JSON lines: `shared` is
the reason why there are no namespaces ("" if there are), `status` is how the command ended (negative for a signal), and
`many` means that it was ended for too many processes. If the other side closes the socket, everything ends. At the end
this process removes `home`, because `runner` may have been killed.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn

# linux/sched.h, linux/mount.h, linux/prctl.h
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x4000, 0x40000
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
# chown, dac_override, dac_read_search and fowner: with them, root still reads a tree in another user's home
FILE_CAPABILITIES = range(4)
LAST_CAPABILITY = 63
LOOK_EVERY_S = 0.05
REFUSED = 99
"""Exit status of a process that could not make its namespaces; no command ran."""

_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    order = json.loads(sys.argv[1])
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")  # if memory runs out, the kernel ends the command and not a process of the user's
    control = socket.socket(fileno=order["control"])
    try:
        _run(control, order)
    finally:
        import shutil  # here, because the command does not wait for it

        shutil.rmtree(order["home"], ignore_errors=True)


def _run(control: socket.socket, order: dict[str, Any]) -> None:
    """Run the command to its end, in namespaces if the kernel makes some."""
    for kinds in _choices():
        maker = os.fork()
        if maker == 0:
            _run_in_namespaces(kinds, control, order)
        if os.waitstatus_to_exitcode(os.waitpid(maker, 0)[1]) != REFUSED:
            return
    _watch(control, order, is_first=False)


def _choices() -> Iterator[int]:
    """Sets of namespaces to try. Root needs no user namespace, and without one it may read every user's files."""
    apart = CLONE_NEWPID | CLONE_NEWNS
    if os.geteuid() == 0:
        yield apart
    yield apart | CLONE_NEWUSER


def _run_in_namespaces(kinds: int, control: socket.socket, order: dict[str, Any]) -> NoReturn:
    try:
        _make_namespaces(kinds)
        first = os.fork()
        if first:
            control.close()
            # the kernel has ended every process of the namespace before it reports the end of the first
            os._exit(max(0, os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])))
        _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        _call("mount", b"proc", b"/proc", b"proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    except (OSError, AttributeError) as e:
        _tell(control, {"shared": str(e)})
        os._exit(REFUSED)
    _tell(control, {"shared": ""})
    with suppress(OSError):  # root only; a real-time process is not held up by a fork bomb that it has to end
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    _watch(control, order, is_first=True)
    os._exit(0)


def _make_namespaces(kinds: int) -> None:
    user, group = os.geteuid(), os.getegid()
    _call("unshare", kinds)
    if kinds & CLONE_NEWUSER:
        # user_namespaces(7): an ordinary user may map a group only after giving up setgroups
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as f:
                f.write(text)


def _watch(control: socket.socket, order: dict[str, Any], *, is_first: bool) -> None:
    """Run the command to its end and tell its status. `is_first`: we are process number 1 of a namespace, and our own
    end ends all others in it."""
    # all: the first process of a namespace gets only signals that it handles, and Python handles SIGINT
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    command = os.fork()
    if command == 0:
        _become_command(control, order)
    control.setblocking(False)
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, LOOK_EVERY_S)
        status = _reap(command)
        if status is not None:
            return _tell(control, {"status": status})
        if _is_closed(control):
            return None
        if is_first and sum(name.isdigit() for name in os.listdir("/proc")) > order["processes"]:
            return _tell(control, {"many": True})


def _reap(command: int) -> int | None:
    """Reap all that have ended, orphans too. The command's exit status if it is among them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == command:
            return os.waitstatus_to_exitcode(status)
        if pid == 0:
            return None


def _is_closed(control: socket.socket) -> bool:
    try:
        return not control.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _become_command(control: socket.socket, order: dict[str, Any]) -> NoReturn:
    try:
        control.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        _LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        for capability in range(LAST_CAPABILITY):
            if capability not in FILE_CAPABILITIES:
                _LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for whom has none, and for unknown ones
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_CPU, order["seconds"] + 1)  # a second more, so that the caller's clock comes first
        _limit(resource.RLIMIT_DATA, order["memory"])
        _limit(resource.RLIMIT_FSIZE, order["output"])
        os.execvp(sys.argv[2], sys.argv[2:])
    except BaseException as e:  # noqa: BLE001 - two processes must never go on from here
        os.write(2, f"{sys.argv[2]}: {e}\n".encode())
        os._exit(127)


def _limit(what: int, most: int) -> None:
    """Lower a limit; one that is lower already stays."""
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def _tell(control: socket.socket, what: dict[str, Any]) -> None:
    control.setblocking(True)
    control.sendall(json.dumps(what).encode() + b"\n")


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises OSError, and AttributeError if there is no such function."""
    if getattr(_LIBC, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
