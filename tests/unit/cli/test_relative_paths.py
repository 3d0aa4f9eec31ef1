"""Every option that names a path takes a relative one, from whatever folder the command is typed in."""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from orchestrator.cli.app import app, load_command
from tests.support.aiterbuild import A4W4, CK, checkout, line, text
from tests.support.aiterbuild import tree as aiter_tree
from tests.support.command import Done, command
from tests.support.config_tree import tree as config_tree
from tests.support.config_tree import values
from tests.support.report_kit import simulated_run
from worker.families import FAMILIES

RUN = "20260921-140640-5a5a"
GOOD = "a4w4_blockscale_tuned_gemm.csv"
MODEL = (
    '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,'
)
MODEL += ' "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 2, "vocab_size": 128256}'
FLEET = "defaults: {family: a16w16}\nnodes:\n  here: {transport: local, engine: process}\n"
LOG = (
    "[aiter] shape is M:128, N:1280, K:8192 dtype=torch.bfloat16 otype=torch.bfloat16 bias=False, scaleAB=False,"
    " bpreshuffle=False, not found tuned config in /tmp/aiter_configs/bf16_tuned_gemm.csv, will use default config!\n"
)


# An @ stands before each path. The commands of a group run one after the other in the same folder.
GROUPS = {
    "db": [
        "db check @tables/GOOD --build @aiter",
        "db check @aiter/aiter/configs/GOOD --build @aiter/aiter",
        "db diff @tables/GOOD @more/GOOD",
        "db merge @more/GOOD --into @tables/GOOD --profile @profile.csv",
        "db undo @tables/GOOD",
        "db export @tables/GOOD --build @aiter --out @exported --gfx gfx950 --cu-num 256",
        "compare @tables/GOOD @more/GOOD --rule-only --out @compared.csv --again @again.csv --runs @kept",
    ],
    "configs": ["configs check --build @configs", "configs undo @configs"],
    "publish": ["publish @tables/GOOD --onto @checkout --model llama --out @pull --python @bin/python --runs @kept"],
    "shapes": [
        "shapes check @llm.csv",
        "shapes from-model @model.json --m 1,16 --out @modelled.csv",
        "shapes from-log @log.txt --family a16w16 --out @logged.csv",
    ],
    "plans": [
        "inventory check @fleet.yaml",
        "tune @llm.csv --plan --inventory @fleet.yaml --db @tuned.csv --runs @kept --tuner torch",
        "tune @llm.csv --render @rendered --inventory @fleet.yaml --db @tuned.csv --runs @kept --tuner torch",
        "bench @llm.csv --plan --inventory @fleet.yaml --db @tuned.csv --runs @kept --backend torch",
    ],
    "runs": [
        "status RUN --runs @kept",
        "explain RUN --runs @kept",
        "analyze RUN --runs @kept --out @analysis.md",
        "analyze @kept/RUN",
        "report RUN --runs @kept --out @page.html",
        "runs list --runs @kept",
        "runs prune --runs @kept",
        "gain RUN --runs @kept --before @before.csv --workload @counts.csv",
    ],
}
# Errors of commands that have read every file.
READ_ALL = ("nothing to undo:", "has a time before the run")
# They need nodes. A run's folder is found as for `status`, an inventory as for `tune`; `configs merge` is tried in
# tests/unit/configs.
ELSEWHERE = (
    "recheck", "resume", "retry", "cancel", "logs", "verify", "selftest", "nodes check", "nodes add", "nodes drain",
    "image build", "shapes capture", "configs merge",
)  # fmt: skip


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workspace")
    for folder, us in (("tables", 10.0), ("more", 7.0)):
        (root / folder).mkdir()
        (root / folder / GOOD).write_text(text(A4W4, line(A4W4, M=7, kernelName=CK, us=us)))
    aiter_tree(root / "aiter")
    (root / "aiter/aiter/configs").mkdir()
    shutil.copy(root / "tables" / GOOD, root / "aiter/aiter/configs" / GOOD)
    checkout(root / "checkout", {GOOD: text(A4W4, line(A4W4, M=900, kernelName=CK))})
    config_tree(root / "configs", {"gemm/gfx950-GEMM-A16W16.json": {"any": values()}})
    simulated_run(root / "kept", 24)
    (root / "bin").mkdir()
    (root / "bin/python").symlink_to(sys.executable)
    (root / "profile.csv").write_text(text(A4W4, line(A4W4, M=7, kernelName=CK, us=7.0)))
    (root / "llm.csv").write_text("M,N,K\n1,1280,8192\n")
    (root / "tuned.csv").write_text(f"{','.join(FAMILIES['a16w16'].tuned_header)}\n")
    (root / "before.csv").write_text(f"{','.join(FAMILIES['a8w8_bpreshuffle'].tuned_header)}\n")
    (root / "counts.csv").write_text("M,N,K,q_dtype_w,count\n8,1280,8192,torch.float8_e4m3fn,3\n")
    (root / "model.json").write_text(MODEL)
    (root / "log.txt").write_text(LOG)
    (root / "fleet.yaml").write_text(
        "defaults: {family: a16w16}\nnodes:\n  here: {transport: local, engine: process}\n"
    )
    return root


def typed(words: str, prefix: str) -> Done:
    """The command with its paths below `prefix`."""
    return command(*words.replace("@", prefix).replace("RUN", RUN).replace("GOOD", GOOD).split())


@pytest.mark.parametrize("group", GROUPS)
def test_a_relative_path_is_as_good_as_an_absolute_one(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    said: dict[str, list[tuple[int, list[str]]]] = {}
    for prefix in ("", "./", "../", f"{tmp_path}/absolute/"):
        root = tmp_path / ("absolute" if prefix.startswith("/") else f"as{len(prefix)}")
        shutil.copytree(workspace, root, symlinks=True)
        (root / "below").mkdir()
        monkeypatch.chdir(root / "below" if prefix == "../" else tmp_path if prefix.startswith("/") else root)
        for words in GROUPS[group]:
            done = typed(words, prefix)
            assert "Traceback" not in done.err
            lines = f"{done.out}{done.err}".replace(str(root) + "/", "").replace("../", "").replace("./", "").split()
            said.setdefault(words, []).append((done.code, [w for w in lines if _is_plain(w)]))
    for words, outcomes in said.items():
        assert outcomes[0] == outcomes[1] == outcomes[2] == outcomes[3], words
        code, output = outcomes[0]
        assert code in (0, 1) or any(text in " ".join(output) for text in READ_ALL), (words, output)


def _is_plain(word: str) -> bool:
    """No time, and not the program's name, which is spelled as it can be typed."""
    return not any(letter.isdigit() for letter in word) and not word.endswith("gemmfleet")


def test_every_option_that_names_a_path_is_in_the_table() -> None:
    typed_words = [words for group in GROUPS.values() for words in group]
    for name, options in options_with_paths():
        used = " ".join(words for words in typed_words if words.startswith(f"{name} "))
        missing = [o for o in options if o.startswith("-") and o not in used]
        assert name in ELSEWHERE or (used and set(missing) <= {"--inventory", "--model", "--gluon-from"}), (
            name,
            missing,
        )


def options_with_paths() -> Iterator[tuple[str, list[str]]]:
    root: Any = typer.main.get_command(app)
    for name, entry in root.commands.items():
        for full, leaf in [(f"{name} {n}", c) for n, c in getattr(entry, "commands", {}).items()] or [(name, entry)]:
            command = load_command(leaf)
            hints = inspect.signature(command.callback).parameters
            named = [p.opts[-1] for p in command.params if p.name in hints and "Path" in str(hints[p.name].annotation)]
            if named:
                yield full, named
