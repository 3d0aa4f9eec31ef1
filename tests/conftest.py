"""Configuration of all tests: which long or system-bound tests run, and why the others do not."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from pathlib import Path
from shutil import which

import pytest
from hypothesis import settings

from tests.standins import FAULTY
from worker.protocol import LOCKS_ENV

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # a shell's background job ignores Ctrl-C, and so would every program that the tests interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)

# the tuner with faults is installed for the tests, and for the programs that they start
sys.path.insert(0, str(FAULTY))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(FAULTY), os.environ.get("PYTHONPATH", ""))))

# nodes on this machine find the interpreter itself, not a version manager's script (pyenv's takes 0.1 s of CPU a start)
interpreters = Path(sys.base_prefix) / "bin"
if (interpreters / "python3").exists() and which("python3") != str(interpreters / "python3"):
    os.environ["PATH"] = os.pathsep.join((str(interpreters), os.environ["PATH"]))

# runs of fixtures that serve several tests; see own_device_locks
os.environ[LOCKS_ENV] = f"/tmp/gemmfleet-test-locks-{os.getpid()}"

# an example may take as long as the machine needs
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def own_device_locks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the runs of a test wait for no other test's and no user's: it has device locks of its own."""
    monkeypatch.setenv(LOCKS_ENV, f"{tmp_path_factory.getbasetemp()}/locks-{secrets.token_hex(4)}")


def pytest_collection_finish() -> None:
    """From here on no process writes compiled modules beside a source: tests compare folders. What was compiled while
    the tests were collected serves the programs that they start."""
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


SWITCHES = {"full": "FULL", "system": "SYSTEM", "soak": "SOAK"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, switch in SWITCHES.items():
            if item.get_closest_marker(marker) and not os.environ.get(switch):
                item.add_marker(pytest.mark.skip(reason=f"runs with {switch}=1"))
