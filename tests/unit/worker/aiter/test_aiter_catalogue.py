"""Catalogue of known issues: each found in its own example, causes before consequences, the page as the catalogue."""

from __future__ import annotations

import re
import string

import pytest

from tests.paths import ROOT
from tests.support.known_issues_page import as_markdown
from worker.protocol import SHAPE_VERDICTS
from worker.tuners.aiter.known_issue import VERSIONS, KnownIssue
from worker.tuners.aiter.known_issues import ISSUES, diagnose, ends_process
from worker.tuners.aiter.run import ProcessEnd

RUNBOOK = {
    "ASM kernel path", "Column name case", "K-alignment crash", "SSH escaping", "CK-Tile unsupported shapes",
    "Gluon missing in Docker", "Docker `$!` escaping", "N=576 GPU faults", "K=29568 unsupported",
    "mp=8 GPU memory faults", "Node 1 GPU health",
}  # fmt: skip
"""Rows of the table of known issues in the runbook that teams tuned by before."""
FAULT = "Memory access fault by GPU node-2 (Agent handle: 0x5) on address 0x7f3c2a400000. Reason: Unknown.\n"


def test_every_row_of_the_runbook_has_an_answer() -> None:
    assert {row for issue in ISSUES for row in issue.runbook} == RUNBOOK


@pytest.mark.parametrize("issue", ISSUES, ids=lambda issue: issue.name)
def test_each_is_found_in_its_own_example(issue: KnownIssue) -> None:
    found = diagnose(f"something before\n{issue.example}\nsomething after", 1)
    assert found is not None
    assert found.issue.name == issue.name
    assert "\x1b" not in found.line
    assert found.issue.title in found.detail()
    assert "{" not in found.detail().replace(found.line, "")


@pytest.mark.parametrize("issue", ISSUES, ids=lambda issue: issue.name)
def test_each_says_what_is_asked_of_it(issue: KnownIssue) -> None:
    for text in (issue.why, issue.action, issue.advice):
        assert not text or text.endswith((".", "?"))
    assert issue.why
    assert issue.action or issue.isolates or issue.advice or issue.rank == "remark"
    assert issue.sources or issue.printed_by == "csh"
    assert issue.rank != "cause" or issue.reason
    legal = {"fault", "hang", "oom", "error", "disk_full", "cancelled", "", *SHAPE_VERDICTS}
    assert issue.reason in legal
    groups = set(re.compile(issue.regex).groupindex)
    named = {field for _, field, _, _ in string.Formatter().parse(issue.why + issue.advice + issue.until) if field}
    assert named <= groups
    found = diagnose(issue.example, None)
    assert found is not None
    assert not re.search(r"(?:^|\W)- (?:failed|does|is|reads|was)\b", found.explanation), (
        "a group of the regex took no part"
    )
    order = [name for name, _, _ in VERSIONS]
    for s in issue.sources:
        assert order.index(s.since) <= order.index(s.until)


@pytest.mark.parametrize(
    ("text", "code", "name"),
    [
        (FAULT + "[aiter] [Mapping Error] Task 4 - Process PID not in GPU map", None, "memory_access_fault"),
        (FAULT, -6, "memory_access_fault"),
        ("RuntimeError: This GEMM is not supported!\n" * 5 + FAULT, -9, "memory_access_fault"),
        ("", -11, "process_died"),
        ("", 139, "process_died"),
        ("run gpu func warning: info: This GEMM is not supported!", -9, "killed"),
        ("usage: x [-h]\nx: error: unrecognized arguments: True", 2, "bad_argument"),
        ("usage: x [-h]", 2, "bad_argument"),
        ("[aiter] error in batch 1 of 1: 'tile_m'", 0, "column_key_error"),
        (
            "[aiter] error in batch 1 of 2: The size of tensor a (384) must match the size of tensor b (512) at "
            "non-singleton dimension 1", 0, "size_mismatch",
        ),
        (
            "[aiter] [Failed] Task 0 failed with RuntimeError: The size of tensor a (384) must match the size "
            "of tensor "
            "b (512) at non-singleton dimension 1\n[aiter] error: no valid candidate found for (1, 2), please check",
            1, "size_mismatch",
        ),
        ("choose 0 kernels\n[aiter] No kernel can be used for (256, 1, 2, 3)", 0, "wrong_results"),
        ("[aiter] interrupted by user, tuning stopped, 0 batches processed", -9, "killed"),
        ("torch.OutOfMemoryError: HIP out of memory.\n[aiter] No kernel can be used for (1,)", 1, "out_of_memory"),
        ("This GEMM is not supported!", 0, "unsupported_gemm"),
        ("[aiter] waiting for baton release at /j/lock_m\nno sign of progress for 300 s", -9, "jit_lock"),
        ("waiting for baton release at /j/lock_m\nimport [m] under /j\nno sign of progress for 300 s", None, "hang"),
    ],
)  # fmt: skip
def test_the_cause_wins_over_what_follows_from_it(text: str, code: int | None, name: str) -> None:
    found = diagnose(text, code)
    assert found is not None
    assert found.issue.name == name


@pytest.mark.parametrize("issue", ISSUES, ids=lambda issue: issue.name)
def test_a_process_ends_at_the_line_of_an_issue_that_isolates_and_at_no_other(issue: KnownIssue) -> None:
    assert (ends_process(f"[aiter] \x1b[31m{issue.example}") is not None) == issue.isolates


def test_a_wrapper_that_starts_a_tuner_again_is_ended() -> None:
    """It would do so 30 times, and exit with 0."""
    for line in ("!Process killed by signal 6, retrying (1/30)", "!Error when run GemmTuner process exitcode is  134"):
        issue = ends_process(line)
        assert issue is not None
        assert issue.name == "process_died"


@pytest.mark.parametrize(
    "line", ["", "Totall tuning result:", "[aiter] processed 2 batches of 4, Processing Status ====> 50.0% tuned",
             "run gpu func warning: info:((256, 1, 2, 3), 2, 0, '')\t boom", "[aiter] start build [module_x] under /j"],
)  # fmt: skip
def test_a_process_goes_on_after_other_lines(line: str) -> None:
    assert ends_process(line) is None


@pytest.mark.parametrize(("text", "code"), [("", 0), ("", 1), ("all is well\n", None)])
def test_what_is_not_known_is_not_guessed(text: str, code: int | None) -> None:
    assert diagnose(text, code) is None


def test_colours_and_control_characters_do_not_hide_a_fault_nor_get_through() -> None:
    found = diagnose("\x1b[31mMemory access fault by GPU node-1\x1b[0m on address 0x1f\x07\x1b]0;title\x07", None)
    assert found is not None
    assert found.issue.name == "memory_access_fault"
    assert found.groups["address"] == "0x1f"
    assert not re.search(r"[\x00-\x1f]", found.detail())


def test_a_shape_of_our_own_is_never_to_blame() -> None:
    """A canary of 64x512x512 faults: nothing about N."""
    ended = ProcessEnd("fault", "AITER's tuner was ended by SIGABRT", output=FAULT)
    words = ended.told("before the first shape, on a tiny one")
    assert "the GPU, its driver or the image is" in words
    assert "multiple of 128" not in words
    assert "multiple of 128" in ended.told()


def test_a_very_long_output_is_searched_in_its_end() -> None:
    found = diagnose("[Done] Task 1/2\n" * 200_000 + FAULT, None)
    assert found is not None
    assert found.issue.name == "memory_access_fault"


def test_the_page_is_the_catalogue_and_is_short() -> None:
    page = ROOT / "docs" / "reference" / "known-issues.md"
    text = page.read_text()
    assert text == as_markdown(), "python -m tests.support.known_issues_page > docs/reference/known-issues.md"
    assert len(text.split()) <= 2700
    for issue in ISSUES:
        assert f"\n## {issue.name}\n" in text
