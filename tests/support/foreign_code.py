"""Code that is not ours, for the tests of `worker.foreign`: each function is called in a process of its own.

As a program, it calls one of its functions so and prints the answer as JSON (for another user of this machine).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn


def see(secret: str) -> dict[str, list[str]]:
    """Walk all of /proc: the numbers of processes, and each file of one that can be read and holds the secret."""
    ctypes.CDLL(None).umount2(b"/proc", 2)  # what lies below ours must not come to light
    found: dict[str, list[str]] = {"numbers": [], "holding": [], "variables": sorted(os.environ)}
    for folder, _, files in os.walk("/proc"):
        number = folder.split("/")[2:3]
        if folder.count("/") == 2 and number[0].isdigit():
            found["numbers"] += number
        for name in files if number and number[0].isdigit() else []:
            if name in ("environ", "cmdline", "maps", "comm", "status") and folder.count("/") == 2:
                try:
                    text = Path(folder, name).read_bytes()
                except OSError:
                    continue
                found["holding"] += [f"{folder}/{name}"] * (secret.encode() in text)
    return found


def leave_one_behind(seconds: str) -> str:
    """Fork twice, with a session of its own, and without our environment."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/bin/sleep", ["sleep", seconds], {})
        os._exit(0)
    time.sleep(0.1)
    return "done"


def give_wrong_type() -> dict[str, int]:
    return {"count": "many"}  # type: ignore[dict-item]


def give_half_a_character() -> str:
    return "\ud800"


def give_deep_json() -> int:
    _write(b'{"value":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def give_long_number() -> int:
    _write(b'{"value":' + b"9" * 100_000 + b"}")


def give_two_answers() -> int:
    _write(b'{"value": 1}{"value": 2}')


def give_other_document() -> int:
    _write(b'{"value": 1, "error": "x"}')


def write_without_end() -> int:
    _write(b"x", times=1 << 30)


def write_to_standard_output() -> str:
    print('{"value": "forged"}', flush=True)
    subprocess.run(["echo", "forged"], check=True)
    return "real"


def ask_for_memory() -> int:
    return len(bytearray(3 << 30))


def fork_without_end() -> int:
    while True:
        os.fork()


def run_without_end() -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def stop_itself() -> int:
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1


def exit_or_run(seconds: int) -> int:
    """Sleep, or for 0 exit with a status."""
    if not seconds:
        os._exit(3)
    time.sleep(seconds)
    return seconds


def exit_with_status() -> int:
    os._exit(3)


def crash() -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 1


def end_the_watcher() -> str:
    """Send every signal to the one that watches us; it is not ours to end."""
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT):
        try:
            os.kill(os.getppid(), number)
        except OSError:
            continue
    time.sleep(0.2)
    return "alive"


def raise_system_exit() -> int:
    raise SystemExit("\x1b[31mstop\x1b[0m")


def write_here() -> list[str]:
    Path("left-behind").write_text("x")
    return [os.getcwd(), str(Path.home())]


def become_root() -> bool:
    return subprocess.run(["sudo", "-n", "true"], check=False).returncode == 0


def _write(data: bytes, times: int = 1) -> NoReturn:
    """Write the answer ourselves, in place of what called us."""
    for _ in range(times):
        os.write(int(sys.argv[1]), data)
    os._exit(0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.support import foreign_code
    from worker.foreign.runner import call, unprotected

    answer = call(getattr(foreign_code, sys.argv[1]), *sys.argv[2:])
    print(json.dumps([answer, unprotected()]))
