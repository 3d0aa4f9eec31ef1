"""Catalogue of known issues: each found in its own example, causes before consequences, the page as the catalogue."""

from __future__ import annotations

import csv
import re
import string

import pytest

from tests.paths import ROOT
from tests.support.known_issues_page import example, sections, sources
from worker.protocol import SHAPE_VERDICTS
from worker.tuners.aiter.known_issues import ISSUES, KnownIssue, diagnose, ends_process
from worker.tuners.aiter.run import ProcessEnd

RUNBOOK = {
    "ASM kernel path", "Column name case", "K-alignment crash", "SSH escaping", "CK-Tile unsupported shapes",
    "Gluon missing in Docker", "Docker `$!` escaping", "N=576 GPU faults", "K=29568 unsupported",
    "mp=8 GPU memory faults", "Node 1 GPU health",
}  # fmt: skip
"""Rows of the table of known issues in the runbook that teams tuned by before."""
SECTIONS = sections()
SOURCES = sources()
CRASH_LINES = list(csv.DictReader((ROOT / "tests/data/crash_lines.csv").read_text().splitlines()))
"""Lines of public reports (`source`: repository and issue), and a few of our own, with the right issue and reason.
`ends`: whether the attempt ends at the line."""
FAULT = "Memory access fault by GPU node-2 (Agent handle: 0x5) on address 0x7f3c2a400000. Reason: Unknown.\n"


@pytest.mark.parametrize("issue", ISSUES, ids=lambda issue: issue.name)
def test_each_is_found_in_its_own_example_and_says_what_to_do(issue: KnownIssue) -> None:
    section = SECTIONS[issue.name]
    line = example(section)
    found = diagnose(f"something before\n{line}\nsomething after", 1)
    assert found is not None
    assert found.issue.name == issue.name
    assert issue.title in found.detail()
    assert "{" not in found.detail().replace(found.line, "")
    assert (ends_process(f"[aiter] \x1b[31m{line}") is not None) == issue.isolates
    assert "**gemmfleet:**" in section or issue.advice or issue.rank == "remark"
    assert ("Isolates the candidate." in section) == issue.isolates
    assert SOURCES.get(issue.name) or "**Printed by csh:**" in section
    assert issue.reason in {"fault", "hang", "oom", "error", "disk_full", "cancelled", *SHAPE_VERDICTS} or (
        issue.rank != "cause" and not issue.reason
    )
    named = {field for _, field, _, _ in string.Formatter().parse(issue.why + issue.advice + issue.until) if field}
    assert named <= set(re.compile(issue.regex).groupindex)


@pytest.mark.parametrize(
    ("text", "code", "name"),
    [
        (FAULT + "[aiter] [Mapping Error] Task 4 - Process PID not in GPU map", None, "memory_access_fault"),
        ("RuntimeError: This GEMM is not supported!\n" * 5 + FAULT, -9, "memory_access_fault"),
        ("[Done] Task 1/2\n" * 200_000 + FAULT, None, "memory_access_fault"),
        ("", 139, "process_died"),
        ("run gpu func warning: info: This GEMM is not supported!", -9, "killed"),
        ("usage: x [-h]", 2, "bad_argument"),
        ("[aiter] error in batch 1 of 1: 'tile_m'", 0, "column_key_error"),
        (
            "RuntimeError: The size of tensor a (384) must match the size of tensor b (512) at non-singleton\n"
            "[aiter] error: no valid candidate found for (1, 2), please check", 1, "size_mismatch",
        ),
        ("choose 0 kernels\n[aiter] No kernel can be used for (256, 1, 2, 3)", 0, "wrong_results"),
        ("[aiter] interrupted by user, tuning stopped, 0 batches processed", -9, "killed"),
        ("torch.OutOfMemoryError: HIP out of memory.\n[aiter] No kernel can be used for (1,)", 1, "out_of_memory"),
        ("[aiter] waiting for baton release at /j/lock_m\nno sign of progress for 300 s", -9, "jit_lock"),
        ("waiting for baton release at /j/lock_m\nimport [m] under /j\nno sign of progress for 300 s", None, "hang"),
        ("HIP error: invalid device function\nFatal Python error: Aborted", -6, "binary_mismatch"),
        ("run gpu func warning: HIP error: invalid device function\nFatal Python error: Aborted", -6, "process_died"),
        ("", 1, ""), ("all is well\n", None, ""),
    ],
)  # fmt: skip
def test_the_cause_wins_over_what_follows_from_it(text: str, code: int | None, name: str) -> None:
    found = diagnose(text, code)
    assert (found.issue.name if found else "") == name


@pytest.mark.parametrize("report", CRASH_LINES, ids=lambda report: f"{report['issue']}-{report['source']}")
@pytest.mark.parametrize("status", [None, 1, -6])
def test_a_line_of_a_public_report_has_its_right_reason(report: dict[str, str], status: int | None) -> None:
    """A line that explains no crash leaves a signal to the exit status."""
    text = report["line"].replace("\\n", "\n")
    found = diagnose(text, status)
    answer = (found.issue.name, found.issue.reason) if found else ("", "")
    if status == -6 and report["issue"] in ("", "unsupported_gemm", "hang"):
        assert answer == ("process_died", "fault")
    else:
        assert answer == (report["issue"], report["reason"])
    assert any(ends_process(line) for line in text.splitlines()) == (report["ends"] == "yes")


def test_colours_and_control_characters_do_not_hide_a_fault_nor_get_through() -> None:
    found = diagnose("\x1b[31mMemory access fault by GPU node-1\x1b[0m on address 0x1f\x07\x1b]0;title\x07", None)
    assert found is not None
    assert (found.issue.name, found.groups["address"]) == ("memory_access_fault", "0x1f")
    assert not re.search(r"[\x00-\x1f]", found.detail())


def test_a_shape_of_our_own_is_never_to_blame() -> None:
    """A canary of 64x512x512 faults: nothing about N."""
    ended = ProcessEnd("fault", "AITER's tuner was ended by SIGABRT", output=FAULT)
    words = ended.describe("before the first shape, on a tiny one")
    assert "the GPU, its driver or the image is" in words
    assert ("multiple of 128" in words, "multiple of 128" in ended.describe()) == (False, True)


def test_the_page_says_what_the_catalogue_says_and_answers_every_row_of_the_runbook() -> None:
    assert list(SECTIONS) == [issue.name for issue in ISSUES]
    assert list(SOURCES) == [name for name in SECTIONS if name in SOURCES]
    rows = []
    for issue in ISSUES:
        title, *parts = SECTIONS[issue.name].strip().split("\n\n")
        codes = f"exit code{'s' * (len(issue.exit_codes) > 1)} {', '.join(map(str, issue.exit_codes))}"
        reason = f"`{issue.reason}`" if issue.reason else ""
        marks = [m for m in (reason, issue.blames, codes if issue.exit_codes else "") if m]
        title, _, runbook = title.removesuffix(").").partition("; runbook: ")
        assert title == f"{issue.title} ({'; '.join(marks)}"
        rows += runbook.split(", ") if runbook else []
        ours = [re.sub(r"{(\w+)}", r"`<\1>`", f"**Until:** {issue.until}.")] if issue.until else []
        assert [p for p in parts if not p.startswith(("**Printed", "**gemmfleet:"))] == ours
    assert set(rows) == RUNBOOK
