"""Reading inventories: defaults, and every fault with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.errors import InventoryError
from orchestrator.inventory.load import MAX_BYTES, limit, load_inventory
from orchestrator.inventory.model import Inventory
from tests.support.inventory_page import PAGE, with_tables
from worker import registry


@pytest.fixture(autouse=True)
def _nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own tuner is not among the legal ones."""
    monkeypatch.setattr(registry, "entry_points", lambda group: ())


def load(tmp_path: Path, data: bytes | str) -> Inventory:
    path = tmp_path / "inv.yaml"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return load_inventory(path)


def faults_of(tmp_path: Path, data: bytes | str) -> list[str]:
    """The faults, each without the file's name."""
    with pytest.raises(InventoryError) as e:
        load(tmp_path, data)
    name = f"{tmp_path / 'inv.yaml'}:"
    assert e.value.exit_code == 2
    assert all(f.startswith(name) and f.isprintable() for f in e.value.faults)
    return [f.removeprefix(name).strip() for f in e.value.faults]


def test_defaults_are_merged_in(tmp_path: Path) -> None:
    inventory = load(tmp_path, """\
defaults:
  gpus: 2
  python: /opt/py
  env: {A: "1", B: "2"}
  labels: [all, fast]
  family: a8w8
nodes:
  one:
  two: {gpus: [3, 1], env: {B: "3", C: "${env:C}"}, labels: [slow, all], python: py}
""")  # fmt: skip
    assert list(inventory.nodes) == ["one", "two"]
    one, two = inventory.nodes.values()
    assert (one.name, one.gpus, one.python, one.labels) == ("one", 2, "/opt/py", ("all", "fast"))
    assert (two.gpus, two.python, two.labels) == ((3, 1), "py", ("all", "fast", "slow"))
    assert two.env == {"A": "1", "B": "3", "C": "${env:C}"}
    assert (inventory.family, inventory.tuner) == ("a8w8", "torch")


def test_bom_and_crlf(tmp_path: Path) -> None:
    assert list(load(tmp_path, b"\xef\xbb\xbfnodes:\r\n  a: {}\r\n").nodes) == ["a"]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ("", "is empty: an inventory has defaults: and nodes:"),
        ("# nothing\n", "is empty: an inventory has defaults: and nodes:"),
        ("- a\n", "1: must be a mapping with the keys defaults and nodes"),
        ("defaults:\n", "1: nodes: there is no node: name at least one under nodes:"),
        ("defaults: {}\nnodes:\n", "2: nodes: there is no node: name at least one under nodes:"),
        ("nodes: {}\n", "1: nodes: there is no node: name at least one under nodes:"),
        ("nodes: 3\n", "1: nodes: must be a mapping of name to options"),
        ("nodes: {a: {}}\nnode: {}\n", "2: node: unknown key; did you mean nodes? (legal: defaults, hosts, nodes)"),
        ("nodes: {a: {}}\ngpus: 1\n", "2: gpus: unknown key: put it under defaults"),
        ("nodes:\n  b: {family: a8w8}\n", "2: nodes.b.family: is an option of the whole fleet: put it under defaults"),
        ("nodes:\n  a: {}\n  a: {}\n", "3: node 'a' is here twice, first in line 2: drop one"),
        ("nodes:\n  a:\n    gpus: 1\n\n    gpus: 1\n", "5: key 'gpus' is here twice, first in line 3: drop one"),
        ("nodes: {a: {}}\nnodes: {b: {}}\n", "2: key 'nodes' is here twice, first in line 1: drop one"),
        ("nodes:\n  1: {}\n  a: {}\n", "2: the key '1' is not text: put it in quotes"),
        ("nodes:\n  yes: {}\n  a: {}\n", "2: the key 'yes' is not text: put it in quotes"),
        ("nodes:\n  ? [a]\n  : {}\n  b: {}\n", "2: a key that is no plain word"),
        ("nodes:\n  a: here\n", "2: nodes.a: must be a mapping of options to values (it is 'here')"),
        ("nodes:\n\ta: {}\n", "2: a tab: YAML is indented with spaces"),
        ("nodes:\n  a: {}\n---\nnodes: {}\n", "3: a second document: an inventory is one document, drop the '---'"),
        ("x: &x {}\nnodes: {a: *x}\n", "2: an alias (*name): write what nodes share under defaults instead"),
        ("nodes:\n  a: {<<: {gpus: 1}}\n", "2: merging by <<: write what nodes share under defaults instead"),
        ("nodes:\n  a: !!python/object:x.y {}\n", "2: the tag '!!python/object:x.y' has no place here: drop it"),
        (b"nodes:\n  a: {}\n  \xff: {}\n", "3: holds bytes that are not UTF-8: save the file as UTF-8"),
        (b"nodes:\n  a: {}\x00\n", "2: holds a control character: drop it"),
        ("nodes:\n  a: {\n", "3: is no valid YAML: expected the node content, but found '<stream end>'"),
        ("nodes: " + "[" * 3000, "is nested too deeply to be an inventory"),
    ],
)  # fmt: skip
def test_wrong_document(tmp_path: Path, data: bytes | str, fault: str) -> None:
    assert faults_of(tmp_path, data) == [fault]


@pytest.mark.parametrize("name", ["a b", "-a", ".", "a/b", "../a", "a" * 64, "\u00e4", "a\\u001b"])
def test_wrong_node_name(tmp_path: Path, name: str) -> None:
    (fault,) = faults_of(tmp_path, f'nodes:\n  "{name}": {{}}\n')
    assert fault.startswith("2: node ")
    assert fault.endswith("the first a letter or digit")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("gpu: 1", "gpu: unknown key; did you mean gpus? (legal: host, port,"),
        ("gpus: two", "gpus: must be auto, a number of GPUs"),
        ("gpus: -1", "gpus: must be auto"),
        ("gpus: true", "gpus: must be auto"),
        ("gpus: []", "gpus: must be auto"),
        ("gpus: [0, x]", "gpus: must be auto"),
        ("gpus: [1, 1]", "gpus: names a GPU twice"),
        ("gpus: [10000]", "gpus: must be auto"),
        ("transport: ssg", "transport: 'ssg' is not legal; did you mean ssh? (legal: local, ssh)"),
        ("transport: Local", "transport: 'Local' is not legal; did you mean local? (legal: local, ssh)"),
        (
            "engine: dockr",
            "engine: 'dockr' is not legal; did you mean docker? (legal: apptainer, docker, process, pyxis)",
        ),
        ("workdir: ''", "workdir: must be text without control characters, and not empty"),
        ('workdir: "a\\nb"', "workdir: must be text without control characters, and not empty"),
        ("python: 3", "python: must be text: put it in quotes (it is '3')"),
        ("python: [a]", "python: must be text: put it in quotes (it is a list)"),
        ("env: [A]", "env: must be a mapping of names to values (it is a list)"),
        ("env: {A: 1}", "env.A: must be text: put it in quotes (it is '1')"),
        ("env: {A: }", "env.A: must be text: put it in quotes (it is empty)"),
        ("env: {A-B: x}", "env.A-B: a variable's name must be"),
        ('env: {A: "x\\ny"}', "env.A: must be one line of text"),
        ("labels: x", "labels: must be a list, such as [a, b] (it is 'x')"),
        ("labels: [a, 1]", "labels.1: must be text: put it in quotes (it is '1')"),
        ("labels: [a b]", "labels.0: must be letters"),
        ("python: 2024-99-99", "'2024-99-99' is no valid value: put it in quotes if it is text"),
    ],
)
def test_wrong_option(tmp_path: Path, option: str, says: str) -> None:
    fault = faults_of(tmp_path, f"nodes:\n  n:\n    {option}\n")[0]
    place = "" if says.startswith("'2024") else "nodes.n."
    assert fault.startswith(f"3: {place}{says}")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("family: a16w61", "family: 'a16w61' is not legal; did you mean a16w16? (legal: a16w16,"),
        ("family: 3", "family: must be text"),
        ("tuner: trch", "tuner: 'trch' is not legal; did you mean torch? (legal: aiter, aiter-triton, replay, torch)"),
        ("tunar: torch", "tunar: unknown key; did you mean tuner?"),
    ],
)
def test_wrong_default(tmp_path: Path, option: str, says: str) -> None:
    (fault,) = faults_of(tmp_path, f"nodes: {{a: {{}}}}\ndefaults:\n  {option}\n")
    assert fault.startswith(f"3: defaults.{says}")


def test_all_at_once_from_top_to_bottom(tmp_path: Path) -> None:
    found = faults_of(tmp_path, """\
defaults:
  gpu: 1
  engine: dockr
nodes:
  a b: {}
  c:
    env: {X: 1, Y: 2}
  c:
    transport: local
    transport: local
extra: 1
""")  # fmt: skip
    assert [f.split(":")[0] for f in found] == ["2", "3", "5", "7", "7", "8", "10", "11"]


def test_no_file_directory_and_size(tmp_path: Path) -> None:
    for path, fault in ((tmp_path / "none.yaml", "no such file"), (tmp_path, "is a directory")):
        with pytest.raises(InventoryError, match=fault):
            load_inventory(path)
    assert faults_of(tmp_path, b"#" * (MAX_BYTES + 1)) == ["is larger than 1 MiB, which is no list of this kind"]
    (fault,) = faults_of(tmp_path, "nodes:\n  - local\n")
    assert fault.endswith("must be a mapping of name to options, not a list: write 'NAME:' for each node, not '- NAME'")


def test_limit(tmp_path: Path) -> None:
    inventory = load(tmp_path, "nodes: {a: {labels: [x]}, b: {labels: [x, y]}, c: {}}")
    assert list(limit(inventory, "x").nodes) == ["a", "b"]
    assert list(limit(inventory, "y").nodes) == ["b"]
    assert list(limit(inventory, "c").nodes) == ["c"]
    assert list(inventory.nodes) == ["a", "b", "c"]
    with pytest.raises(InventoryError, match=re.escape("no node has the label 'z' (nodes and labels: a, b, c, x, y)")):
        limit(inventory, "z")


def test_docs_name_every_option_and_the_example_is_real(tmp_path: Path) -> None:
    text = PAGE.read_text()
    assert text == with_tables(text), "run: python -m tests.support.inventory_page"
    good, bad = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert list(load(tmp_path, good).nodes) == ["here", "there"]
    (said,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert [f"error: inv.yaml:{f}" for f in faults_of(tmp_path, bad)] == said.splitlines()
