"""No room for runs here, none on a node: real file systems, full or read-only, in a mount namespace of their own."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest

from tests.kits.fleet import Bench
from tests.waiting import PATIENCE_S, wait_until

MAY = subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
pytestmark = [pytest.mark.system, pytest.mark.skipif(not MAY, reason="may not make a mount namespace")]


def with_mount(bench: Bench, folder: Path, options: str, argv: list[str]) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    script = 'mount -t tmpfs -o "$1" none "$2" && shift 2 && exec "$@"'
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", options, str(folder), *argv],
        capture_output=True, text=True, timeout=PATIENCE_S, env=bench.env(),
    )  # fmt: skip


def test_runs_on_a_full_disk_is_one_clear_error(bench: Bench) -> None:
    """At each point where it can be noticed: at the ledger, at its first rows or the files beside it."""
    bench.shapes(groups=2)
    bench.runs = bench.root / "small/runs"
    for size in ("16k", "140k"):
        done = with_mount(bench, bench.root / "small", f"size={size}", bench.argv("tune", *bench.tune_args()))
        (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stdout + done.stderr
        assert str(bench.runs) in error
        assert "free some space" in error


def test_a_read_only_work_folder_is_called_that(bench: Bench) -> None:
    bench.inventory.write_text(f"nodes:\n  here: {{gpus: 0, workdir: {bench.root}/fixed/work}}\n")
    argv = bench.argv("nodes check", "-i", str(bench.inventory))[:-2]
    done = with_mount(bench, bench.root / "fixed", "ro", argv)
    assert done.returncode == 3, done.stdout + done.stderr
    assert (
        f"{bench.root}/fixed/work is read-only: the file system at {bench.root}/fixed is mounted read-only"
        in done.stdout
    )
    assert "MiB free" not in done.stdout


def test_a_full_disk_of_the_controller_loses_nothing(bench: Bench) -> None:
    n = bench.shapes(groups=6, per_group=4)
    bench.runs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", bench.runs], check=True)
    try:
        run = bench.start("tune", *bench.tune_args([bench.held(2)]))
        wait_until(lambda: bench.tuned() == 8 and len(bench.tuners()) == 2, "the other groups are held")
        filler = bench.runs / "filler"
        with filler.open("wb", buffering=0) as f, contextlib.suppress(OSError):
            while True:
                f.write(b"x" * 1024)
        bench.release()
        out, _ = run.communicate(timeout=PATIENCE_S)
        assert (run.returncode, "full" in out or "space" in out, "Traceback" in out) == (2, True, False), out
        filler.unlink()
        bench.run("resume").ok()
        bench.check_books(tuned=n, failed={})
    finally:
        bench.close()
        subprocess.run(["umount", "-l", bench.runs], check=True)
