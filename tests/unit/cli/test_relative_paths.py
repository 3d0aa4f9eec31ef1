"""Every option that names a path takes a relative one, from whatever folder the command is typed in."""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from orchestrator.cli.app import app, load_command
from tests.kits.fleet import Done, command
from tests.kits.results import simulated_run
from tests.standins.aiter.checkout import checkout
from tests.standins.aiter.config_files import tree as config_tree
from tests.standins.aiter.config_files import values, winners
from tests.standins.aiter.kernel_lists import CK
from tests.standins.aiter.kernel_lists import tree as aiter_tree
from tests.support.marks import WITH_TRANSFORMERS
from tests.support.model_classes import ask_here
from tests.support.tuned_tables import A4W4, line, text
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
        "db check @tables/GOOD --build @tree",
        "db check @tree/aiter/configs/GOOD --build @tree/aiter",
        "db diff @tables/GOOD @more/GOOD",
        "db merge @more/GOOD --into @tables/GOOD --profile @profile.csv",
        "db undo @tables/GOOD",
        "db export @tables/GOOD --build @tree --out @exported --gfx gfx950 --cu-num 256",
        "compare @tables/GOOD @more/GOOD --rule-only --out @compared.csv --again @again.csv --runs @kept",
        "compare --golden @tables/GOOD --tot @more/GOOD --rule-only --markdown @compared.md",
    ],
    "configs": [
        "configs check --build @configs",
        "configs check --build @configs --engine @no-wheel.whl --inventory @fleet.yaml",
        "configs merge @won --into @configs --shapes @llm.csv --allow-default --runs @kept",
        "configs undo @configs",
    ],
    "publish": [
        "publish @tables/GOOD --onto @checkout --model llama --out @pull --python @bin/python --runs @kept"
        " --inventory @no-fleet.yaml",
    ],
    "shapes": [
        "shapes check @llm.csv",
        "shapes from-model @model.json --m 1,16 --out @modelled.csv",
        "shapes from-log @log.txt --family a16w16 --out @logged.csv",
        "shapes from-log @log.txt --model @model.json",
        "shapes capture --family a16w16 --out @captured.csv -- cat @log.txt",
        "shapes capture --out @other.csv --inventory @fleet.yaml --node there -- true",
    ],
    "plans": [
        "inventory check @fleet.yaml",
        "tune @llm.csv --plan --inventory @fleet.yaml --db @tuned.csv --runs @kept --tuner torch",
        "tune @llm.csv --render @rendered --inventory @fleet.yaml --db @tuned.csv --runs @kept --tuner torch",
        "bench @llm.csv --plan --inventory @fleet.yaml --db @tuned.csv --runs @kept --backend torch",
        "bench @llm.csv --plan --gluon-from @gluon --config-set a=@configs --config-set b=@no-configs",
        "recheck @tables/GOOD --plan --inventory @fleet.yaml --profile @profile.csv --runs @kept",
        "image build --render --base a --tag b --gfx gfx950 --inventory @fleet.yaml --table @tables/GOOD --out @image",
        "db check @tables/GOOD --build @tree --inventory @fleet.yaml",
        "db export @tables/GOOD --inventory @fleet.yaml",
    ],
    "nodes": [
        "nodes check --inventory @fleet.yaml --limit there",
        "nodes add --inventory @fleet.yaml --run RUN --runs @kept",
        "nodes drain n1 --run RUN --runs @kept",
        "verify --table @tables/GOOD --inventory @fleet.yaml --limit there",
        "verify RUN --runs @kept --limit there",
        "selftest --inventory @fleet.yaml --out @bundle.tar.gz --runs @kept --node there",
        "selftest --inventory @fleet.yaml --out @llm.csv --runs @kept",
    ],
    "runs": [
        "status RUN --runs @kept",
        "status @kept/RUN",
        "logs RUN --runs @kept",
        "resume RUN --runs @kept --inventory @fleet.yaml",
        "cancel RUN --runs @kept",
        "retry RUN --runs @kept --group g9999",
        "explain RUN --runs @kept",
        "analyze RUN --runs @kept --out @analysis.md",
        "analyze @kept/RUN",
        "report RUN --runs @kept --out @page.html",
        "runs list --runs @kept",
        "runs prune --runs @kept",
        "gain RUN --runs @kept --before @before.csv --workload @counts.csv",
    ],
}
# Parts of errors that come when every file of the command is found and read, or that name the one that is not.
ERRORS = (
    "nothing to undo:", "has a time before the run", "has no node", "no node has the label", "no controller drives run",
    "has no row of", "has no group", "no experts", "llm.csv: exists already", "no-wheel.whl cannot",
    "no such file", "get_gemm_config reads", "no-configs: holds neither",
)  # fmt: skip
# Options with a relative path in a test of their own, which needs an engine.
ELSEWHERE = {"configs merge": "--engine"}
# Options with a text that is no path, or one on a node.
NO_PATHS = """
    --at --backend --base --branch --checked --chip --cu-num --device --e2e --env --family --form --format --gfx --group
    --ignore-column --image --kernel --layers --limit --m --model --network --node --project --reason --ref
    --reference --repo --rule --run --search --set --shape --sort --tag --timer --title --tuner --tuner-arg
    --tuner-option --under-test --until-gain
""".split()  # noqa: SIM905 - a list would be ten times as long


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workspace")
    for folder, us in (("tables", 10.0), ("more", 7.0)):
        (root / folder).mkdir()
        (root / folder / GOOD).write_text(text(A4W4, line(A4W4, M=7, kernelName=CK, us=us)))
    aiter_tree(root / "tree")
    (root / "tree/aiter/configs").mkdir()
    shutil.copy(root / "tables" / GOOD, root / "tree/aiter/configs" / GOOD)
    checkout(root / "checkout", {GOOD: text(A4W4, line(A4W4, M=900, kernelName=CK))})
    config_tree(root / "configs", {"gemm/gfx950-GEMM-A16W16.json": {"any": values()}})
    winners(root / "won", {"gfx950-GEMM-A16W16-N=512-K=1024.json": {"M_LEQ_64": values(16)}}, [{}])
    (root / "gluon").mkdir()
    (root / "gluon/gemm_a8w8.py").touch()
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


@pytest.mark.parametrize("group", [pytest.param(g, marks=WITH_TRANSFORMERS) if g == "shapes" else g for g in GROUPS])
def test_a_relative_path_is_as_good_as_an_absolute_one(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    monkeypatch.setattr("orchestrator.shapes.model_config.ask_class", ask_here)  # no path reaches the child
    said: dict[str, list[tuple[int, list[str]]]] = {}
    for prefix in ("", "./", "../", f"{tmp_path}/absolute/"):
        root = tmp_path / ("absolute" if prefix.startswith("/") else f"as{len(prefix)}")
        shutil.copytree(workspace, root, symlinks=True)
        (root / "below").mkdir()
        monkeypatch.chdir(root / "below" if prefix == "../" else tmp_path if prefix.startswith("/") else root)
        for words in GROUPS[group]:
            done = typed(words, prefix)
            assert "Traceback" not in done.err
            text = f"{done.out}{done.err}".replace(f"{root}/", "").replace("below/../", "")
            lines = text.replace("../", "").replace("./", "").split()
            said.setdefault(words, []).append((done.code, [w for w in lines if _is_plain(w)]))
    for words, outcomes in said.items():
        assert outcomes[0] == outcomes[1] == outcomes[2] == outcomes[3], words
        code, output = outcomes[0]
        assert code in (0, 1) or any(text in " ".join(output) for text in ERRORS), (words, output)


def _is_plain(word: str) -> bool:
    """No time, and not the program's name, which is spelled as it can be typed."""
    return not any(letter.isdigit() for letter in word) and not word.endswith("gemmfleet")


def test_every_option_that_names_a_path_is_in_the_table() -> None:
    """Options are those of the program, so that a new one cannot be forgotten."""
    typed_words = [words for group in GROUPS.values() for words in group]
    for name, options in options_with_paths():
        used = " ".join(words for words in typed_words if words.startswith(f"{name} ")).split()
        missing = set(options) - set(used) - {ELSEWHERE.get(name)}
        assert used, f"{name} has no line in the table"
        assert not missing, f"{name}: add {missing} to a line of the table, or to NO_PATHS"


def options_with_paths() -> Iterator[tuple[str, list[str]]]:
    """All options but those whose values can be no paths; a text may be one."""
    root: Any = typer.main.get_command(app)
    for name, entry in root.commands.items():
        for full, leaf in [(f"{name} {n}", c) for n, c in getattr(entry, "commands", {}).items()] or [(name, entry)]:
            callback = load_command(leaf).callback
            hints = {p: str(hint.annotation) for p, hint in inspect.signature(callback).parameters.items()}
            may_be = [p.opts[-1] for p in leaf.params if re.search(r"Path|\bstr\b", hints.get(p.name, ""))]
            yield full, [option for option in may_be if option.startswith("--") and option not in NO_PATHS]
