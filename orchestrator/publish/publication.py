"""Publish winners: files as commits on a branch of a local checkout, with the text of a pull request.

`publish_winners` is the flow, the same for every project. It works in a worktree of its own (`checkout.py`), and calls
the `Publication` of the project: `make_commits`, then `check_branch`, `evidence` and `text_values`. It writes the text,
and makes the branch at the very end, so a publication that fails or is killed leaves no branch. Nothing is pushed.

`aiter_publication.py` is the publication for AITER, `engine_publication.py` the one for vLLM and SGLang.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from orchestrator.errors import InputError
from orchestrator.files.write import write_atomic
from orchestrator.publish.checkout import Checkout
from orchestrator.publish.evidence import Evidence, public_words
from orchestrator.templating import render

MAX_ROWS = 20
"""Most reasons that are named if there is nothing to publish."""


class CheckResult(NamedTuple):
    """A check as the text shows it: `("`test_csv_validation`", "passes", ["Ran 9 tests in 0.5s", "OK"])`."""

    name: str
    result: str
    last_lines: Sequence[str]


@dataclass(slots=True)
class Published:
    """A branch, filled in while it is made."""

    branch: str
    base: str
    """The commit that it is based on."""
    text: Path
    """The file with the text of the pull request."""
    title: str = ""
    commit: str = ""
    """Its last commit."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The rows of the command's document, each with `outcome` (added, edited, kept or refused) and `why`."""
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    """The number of rows of each changed file by outcome: `{"aiter/configs/...csv": {"added": 3, "edited": 1}}`."""
    checks: list[CheckResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ok: bool = True
    """No check found a fault that the base has not."""
    missing: list[str] = field(default_factory=list)
    """Names of facts that a review needs and that no record has."""

    def add_check(self, name: str, passed: bool, text: str, tail: Sequence[str] = ()) -> None:
        """Add a check's result, and its last lines."""
        self.checks.append(CheckResult(name, text, tail))
        self.ok = self.ok and passed


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """A request to publish: the options of the command `publish`."""

    sources: Sequence[Path]
    """Run folders and tables."""
    onto: Path
    """The checkout."""
    model: str
    folder: Path
    """The folder for the text and the logs."""
    branch: str
    base: str = "HEAD"
    refresh: bool = False
    title: str = ""
    e2e: str = ""
    """The command of the end-to-end figures, for the text."""
    e2e_results: str = ""
    """Their results in Markdown, for the text; empty for a table to be filled in."""
    python: str = ""
    """The Python that runs AITER's checks; empty if they are not run."""
    runs: Path = Path("runs")
    """The folder of the runs that records of tables name."""
    verify: Sequence[str] | None = None
    """The words that name nodes for `verify`; None: it is not run."""
    argv: Sequence[str] = ()
    """The command line, for the text."""

    @property
    def logs(self) -> Path:
        """The folder of the checks' logs."""
        return self.folder / "checks"


class PlannedCommit(NamedTuple):
    """A commit to be made: its title, and the texts of its files by path below the checkout."""

    title: str
    texts: dict[str, str]


class Publication(Protocol):
    """The part of the flow that differs between projects. `publish_winners` calls the methods in this order."""

    template: str
    """The template of the text."""

    def make_commits(self, request: PublishRequest, tree: Path, published: Published) -> list[PlannedCommit]:
        """The commits for a worktree of the base, at least one. Fills in title, rows, files and notes. Raises
        InputError; `nothing_to_publish` makes the error for a branch without a commit."""

    def check_branch(self, request: PublishRequest, tree: Path, published: Published) -> None:
        """Check the worktree with the commits, and add each result."""

    def evidence(self, request: PublishRequest) -> Evidence:
        """The facts and commands of the measurements."""

    def text_values(self, request: PublishRequest, published: Published) -> dict[str, Any]:
        """The values of the template beside the branch, the request and the evidence."""


def publish_winners(request: PublishRequest, publication: Publication) -> Published:
    """Make the branch of a checkout, its checks and its text. Raises InputError; then no branch was made or moved."""
    checkout = Checkout(request.onto)
    base = checkout.commit_of(request.base)
    checkout.refuse_branch(request.branch, base, refresh=request.refresh)
    request.folder.mkdir(parents=True, exist_ok=True)
    published = Published(request.branch, base, request.folder / "pull-request.md")
    with checkout.worktree(base) as tree:
        for commit in publication.make_commits(request, tree, published):
            published.commit = checkout.commit(tree, commit.texts, commit.title)
        publication.check_branch(request, tree, published)
    _write_text(request, publication, published)
    checkout.point_branch(request.branch, published.commit)
    return published


def default_branch(model: str, words: Sequence[str]) -> str:
    """`gemmfleet/MODEL-WORDS`: the branch if the user names none. `words`: names of what is published."""
    return f"gemmfleet/{model}-{'-'.join(words)}"


def nothing_to_publish(published: Published, reasons: Sequence[str]) -> InputError:
    """The error for a branch without a commit."""
    return InputError(
        [f"nothing to publish onto {published.base[:12]}", *(f"  {reason}" for reason in reasons[:MAX_ROWS])]
    )


def _public_words(request: PublishRequest) -> list[str]:
    """The words of the command as a public text shows them, with the checkout by its name also where its path is
    relative."""
    words = public_words(request.argv)
    name = request.onto.resolve().name
    for place, word in enumerate(words):
        if word.startswith("--onto="):
            words[place] = f"--onto={name}"
        elif place and words[place - 1] == "--onto":
            words[place] = name
    return words


def _write_text(request: PublishRequest, publication: Publication, published: Published) -> None:
    """Write the pull request's text."""
    evidence = publication.evidence(request)
    published.missing = evidence.missing
    commands = list(evidence.commands)
    if request.argv:
        commands.append(f"gemmfleet {shlex.join(_public_words(request))}")
    values = {
        "out": published,
        "model": request.model,
        "e2e": request.e2e,
        "e2e_results": request.e2e_results,
        "facts": evidence.facts,
        "commands": commands,
        **publication.text_values(request, published),
    }
    write_atomic(published.text, render(publication.template, values))
