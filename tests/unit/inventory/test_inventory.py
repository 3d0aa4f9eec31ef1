"""Reading inventories: defaults, pools, references, schema and example, and every fault with its line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from orchestrator.errors import InventoryError
from orchestrator.inventory.load import MAX_BYTES, limit, load_inventory, resolved
from orchestrator.inventory.model import Inventory, dumps
from orchestrator.inventory.references import reference_names, unset_references
from tests.kits.fleet import command
from tests.paths import ROOT
from tests.support.inventory_page import PAGE, SCHEMA, with_tables
from worker import registry
from worker.protocol.paths import SGLANG_ROOT_ENV, VLLM_ROOT_ENV

EXAMPLE = ROOT / "inventories" / "mi355x.example.yaml"
SSH = "nodes:\n  n:\n    transport: ssh\n    engine: docker\n    image: i\n    "


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


def test_defaults_are_merged_in_option_by_option(tmp_path: Path) -> None:
    inventory = load(tmp_path, """\
\ufeffdefaults:
  gpus: 2
  env: {A: "1", B: "2"}
  labels: [all, fast]
  family: a8w8
  transport: ssh
  engine: docker
  image: a
  docker: {ipc: host, volumes: ["/a:/a", "/b:/b"], env: {A: "1", B: "2"}, cap_add: [SYS_PTRACE]}
  aiter: {root: /a, compilers: {X_HIP_CLANG_PATH: /x}}
  vllm: {root: /v}
  sglang: {root: /s}
nodes:\r
  one:
  two: {gpus: [3, 1], env: {B: "3", C: "${env:C}"}, labels: [slow, all], image: b,
        docker: {volumes: ["/c:/c"], env: {B: "3"}, cap_add: []}, aiter: {compilers: {Y_HIP_CLANG_PATH: /y}}}
  three: {transport: local, engine: process, vllm: {root: /w.whl}}
""")  # fmt: skip
    one, two, three = inventory.nodes.values()
    assert (inventory.defaults.family, inventory.defaults.tuner) == ("a8w8", "torch")
    assert (one.name, one.gpus, one.labels, three.image) == ("one", 2, ("all", "fast"), "a")
    assert (two.gpus, two.image, two.labels) == ((3, 1), "b", ("all", "fast", "slow"))
    assert two.env == {"A": "1", "B": "3", "C": "${env:C}"}
    assert (one.docker.volumes, one.docker.env) == (("/a:/a", "/b:/b"), {"A": "1", "B": "2"})
    assert (two.docker.ipc, two.docker.volumes, two.docker.env) == ("host", ("/c:/c",), {"A": "1", "B": "3"})
    assert (two.docker.cap_add, two.docker.network, two.docker.devices) == ((), "none", None)
    assert two.aiter.compilers == {"X_HIP_CLANG_PATH": "/x", "Y_HIP_CLANG_PATH": "/y"}
    assert [n.vllm.variables() for n in (two, three)] == [{VLLM_ROOT_ENV: root} for root in ("/v", "/w.whl")]
    assert three.sglang.variables() == {SGLANG_ROOT_ENV: "/s"}


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ("# nothing\n", "is empty: an inventory has defaults: and nodes:"),
        ("- a\n", "1: must be a mapping with the keys defaults and nodes"),
        ("nodes:\n  - local\n", "1: nodes: must be a mapping of name to options, not a list: write 'NAME:' for each"),
        ("nodes: {a: {}}\nnode: {}\n", "2: node: unknown key; did you mean nodes? (legal: defaults, hosts, nodes)"),
        ("nodes: {a: {}}\ngpus: 1\n", "2: gpus: unknown key: put it under defaults"),
        ("nodes:\n  b: {family: a8w8}\n", "2: nodes.b.family: is an option of the whole fleet: put it under defaults"),
        ("nodes:\n  a: {}\n  a: {}\n", "3: node 'a' is here twice, first in line 2: drop one"),
        ("nodes:\n  yes: {}\n  a: {}\n", "2: the key 'yes' is not text: put it in quotes"),
        ("nodes:\n  a: here\n", "2: nodes.a: must be a mapping of options to values (it is 'here')"),
        ("nodes:\n\ta: {}\n", "2: is not valid YAML: a tab where YAML wants spaces: indent with spaces"),
        ("nodes:\n  a: {}\n---\nnodes: {}\n", "3: is not valid YAML: expected a single document in the stream"),
        ("x: &x {}\nnodes: {a: *x}\n", "2: an alias (*name): write what nodes share under defaults instead"),
        ("nodes:\n  a: !!python/object:x.y {}\n", "2: the tag '!!python/object:x.y' is not allowed here: drop it"),
        (b"nodes:\n  a: {}\n  \xff: {}\n", "3: holds bytes that are not UTF-8: save the file as UTF-8"),
        (b"nodes:\n  a: {}\x00\n", "is not valid YAML: special characters are not allowed"),
        ("nodes: " + "[" * 3000, "is not valid YAML: maximum recursion depth exceeded"),
        (b"#" * (MAX_BYTES + 1), "is larger than 1 MiB, too large for a file of this kind"),
        ("defaults:\n  host: x\nnodes: {n: {}}", "2: defaults.host: a host is one node's"),
        ("nodes: {a: {}}\ndefaults: {family: a16w61}", "2: defaults.family: 'a16w61' is not legal; did you mean a16"),
        *((f'nodes:\n  "{name}": {{}}\n', "2: node ") for name in ("a b", "../a", "a" * 64, "\u00e4", "a\\u001b")),
    ],
    ids=lambda _: "",
)  # fmt: skip
def test_wrong_document(tmp_path: Path, data: bytes | str, fault: str) -> None:
    (found,) = faults_of(tmp_path, data)
    assert found.startswith(fault)


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
extra: 1
""")  # fmt: skip
    assert [f.split(":")[0] for f in found] == ["2", "3", "5", "7", "7", "8", "9"]
    for path, fault in ((tmp_path / "none.yaml", "no such file"), (tmp_path, "is a directory")):
        with pytest.raises(InventoryError, match=fault):
            load_inventory(path)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("gpu: 1", "gpu: unknown key; did you mean gpus? (legal: host, port,"),
        *((f"gpus: {value}", "gpus: must be auto") for value in ("two", "-1", "true", "[]", "[0, x]", "[10000]")),
        ("gpus: [1, 1]", "gpus: names a GPU twice"),
        ("results: ~/r", "results: must be a path on the node that begins with '/'"),
        ("python: 3", "python: must be text: put it in quotes (it is '3')"),
        ("python: ${env:P}", "python: no reference can stand here"),
        ("env: {A-B: x}", "env.A-B: a variable's name must be"),
        ('env: {A: "x\\ny"}', "env.A: must be one line of text"),
        *((f"env: {{HF_TOKEN: {value}}}", "env: HF_TOKEN looks like a secret") for value in ("hf_0123", "x", "'12'")),
        ("env: {A: '${env:B'}", "env.A: a reference is written ${env:NAME}"),
        ("labels: x", "labels: must be a list, such as [a, b] (it is 'x')"),
        *((f"host: {host}", "host: must be a host name") for host in ("-oProxyCommand=x", "me@h", "h:22", "a b", "''")),
        ("port: '22'", "port: must be a whole number, without quotes (it is '22')"),
        ("port: 0", "port: Input should be greater than or equal to 1 (it is '0')"),
        ("user: a;b", "user: must be a login name"),
        ("user: ${USER}", "user: must be a login name; a variable is written ${env:USER}"),
        ("proxy_jump: -oX", "proxy_jump: must be [USER@]HOST[:PORT]"),
        ("gfx: gfx950", ": gfx and cu_num go together: add cu_num"),
        ("numa: [0]", "numa: a list needs gpus: as a number or a list"),
        *((f"{key}: x", f"{key}: a secret has no place in an inventory") for key in ("sudo_password", "token")),
        ("shm_size: 16G", "shm_size: is an option of containers: put it under docker"),
        ("docker: {privileged: true}", "docker.privileged: unknown key: containers are never privileged"),
        ("docker: {image: x}", "docker.image: is an option of the node: put it beside docker, not under it"),
        ("docker: {devices: [/dev/../etc]}", "docker.devices.0: must be a device such as /dev/kfd"),
        ("docker: {cap_add: [ALL]}", "docker.cap_add.0: ALL is as good as --privileged"),
        ("docker: {shm_size: 16 G}", "docker.shm_size: must be a size"),
        *((f"docker: {{volumes: ['{v}']}}", "docker.volumes.0: must be ") for v in ("/a", "~/a:/b", "/a/../b:/b")),
        ("docker: {volumes: ['/a:/b:r o']}", "docker.volumes.0: what follows the second ':'"),
        ("docker: {ipc: none, shm_size: 1g}", "docker: ipc: none has no /dev/shm"),
    ],
    ids=lambda _: "",
)  # fmt: skip
def test_wrong_option(tmp_path: Path, option: str, says: str) -> None:
    (fault,) = faults_of(tmp_path, f"{SSH}{option}\n")
    assert fault.startswith(f"2: nodes.n{says}" if says.startswith(":") else f"6: nodes.n.{says}")


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ("transport: ssg", "transport: 'ssg' is not legal; did you mean ssh? (legal: local, ssh)"),
        ("engine: dockr", "engine: 'dockr' is not legal; did you mean docker? (legal: apptainer, docker, process, p"),
        ("engine: docker", "engine: docker needs an image"),
        ("host: x", "host: is for transport: ssh, and this node's is local"),
        ("image: x", "image: is for engine: apptainer, docker, pyxis, and this node's is process"),
        ("gpus: [4], numa: [0, 1]", "numa: has 2 entries for 1 slots"),
        ("engine: docker, image: i, gpus: 0, docker: {devices: [/dev/dri]}", "gpus: 0 means no GPU"),
        *((f"lease: slurm, count: {n}", "count: must be a number of leases such as 4, or a range such as 1-8")
          for n in ("0", "8-1", "1.5", "many", "1-", "5000", "true")),
        *((f"lease: slurm, time: {t}", "time: must be a time such as 4h, 90m or 1d12h") for t in ("4", "0h", "h")),
        ("count: 3", "count: is for a pool of leases: add lease: slurm or lease: kubernetes"),
        ("lease: slurm, namespace: x", "namespace: is for lease: kubernetes, and this node's is slurm"),
        ("lease: slurm, transport: ssh", "transport: a lease is reached by its scheduler and not by SSH: name the log"),
        ("lease: slurm, host: x", "host: is for transport: ssh: the options of a login node stand under hosts:"),
        ("lease: slurm, gpus: [0, 1]", "gpus: which GPUs a lease has is the scheduler's choice"),
        ("lease: kubernetes, image: i", "gpus: a pod needs a number of GPUs"),
        ("lease: kubernetes, gpus: 1", "image: a pod needs an image"),
        ("lease: kubernetes, gpus: 1, image: i, engine: docker", "engine: a pod is a container already"),
    ],
    ids=lambda _: "",
)  # fmt: skip
def test_what_does_not_fit_together(tmp_path: Path, options: str, fault: str) -> None:
    (found,) = faults_of(tmp_path, f"nodes:\n  a: {{{options}}}\n")
    assert found.removeprefix("2: nodes.a").lstrip(".: ").startswith(fault)


def test_limit(tmp_path: Path) -> None:
    inventory = load(tmp_path, "nodes: {a: {labels: [x]}, b: {labels: [x, y]}, c: {}}")
    assert [list(limit(inventory, name).nodes) for name in "xyc"] == [["a", "b"], ["b"], ["c"]]
    with pytest.raises(InventoryError, match=re.escape("no node has the label 'z' (nodes and labels: a, b, c, x, y)")):
        limit(inventory, "z")


def test_pools(tmp_path: Path) -> None:
    nodes = load(tmp_path, """\
hosts: {login1: {host: 198.18.0.9, port: 2222, user: me}}
nodes:
  mi355: {lease: slurm, via: login1, count: 1-8, time: 1d4h30m, gpus: 8, extra: ["--constraint=mi355x"]}
  one: {lease: slurm, via: cluster}
  pool: {lease: kubernetes, count: 4, gpus: 8, image: i, pod: {spec: {tolerations: [{operator: Exists}]}}}
""").nodes  # fmt: skip
    slurm, one, pods = nodes.values()
    assert (slurm.count, slurm.time_s, slurm.is_here, slurm.extra) == ((1, 8), 102_600, False, ("--constraint=mi355x",))
    assert slurm.login is not None
    assert (slurm.login.host, slurm.login.port, slurm.login.user) == ("198.18.0.9", 2222, "me")
    assert (one.via, one.login, one.count) == ("cluster", None, (1, 1))  # of the SSH configuration
    assert (pods.count, pods.resource, pods.engine) == ((4, 4), "amd.com/gpu", "process")
    assert pods.pod["spec"] == {"tolerations": [{"operator": "Exists"}]}


def test_references_of_a_login_node_are_replaced_like_those_of_a_node(tmp_path: Path) -> None:
    hosts = "hosts:\n  login1: {host: login1.example,\n    user: '${env:U}', identity: '~/${env:K}'}\n"
    node = load(tmp_path, hosts + "nodes: {pool: {lease: slurm, via: login1}}\n").nodes["pool"]
    login = resolved(node, {"U": "me", "K": "key"}).login
    assert login is not None
    assert (login.host, login.user, login.identity) == ("login1.example", "me", "~/key")
    assert (reference_names(str(node.options())), unset_references(node.options(), {"K": "key"})) == (
        ("U", "K"),
        [("login.user", "U")],
    )
    with pytest.raises(InventoryError, match=re.escape(f"{tmp_path}/inv.yaml:3: node pool: login.user refers to")):
        resolved(node, {"K": "key"})
    with pytest.raises(InventoryError, match=re.escape(":3: node pool: login.user, its references replaced, must be")):
        resolved(node, {"U": "-o", "K": "key"})


def test_a_missing_variable_names_file_line_node_and_name(tmp_path: Path) -> None:
    node = load(tmp_path, "defaults:\n  user: ${env:U}\n" + SSH + "host: ${env:H}.x\n").nodes["n"]
    with pytest.raises(InventoryError) as e:
        resolved(node, {})
    assert e.value.faults == [
        f"{tmp_path}/inv.yaml:8: node n: host refers to ${{env:H}}, and H is not set here: export H=... and try again",
        f"{tmp_path}/inv.yaml:2: node n: user refers to ${{env:U}}, and U is not set here: export U=... and try again",
    ]


@pytest.mark.parametrize("value", ["-oProxyCommand=touch x", "", "two words", "a\nb"])
def test_a_value_is_checked_like_text_of_the_file_and_not_repeated(tmp_path: Path, value: str) -> None:
    node = load(tmp_path, SSH + "host: ${env:H}\n").nodes["n"]
    with pytest.raises(InventoryError, match=r"inv.yaml:6: node n: host, its references replaced, must be") as e:
        resolved(node, {"H": value})
    assert not value or value not in str(e.value)


def test_the_schema_in_the_repository_is_up_to_date() -> None:
    assert SCHEMA.read_text() == dumps(), "run: python -m tests.support.inventory_page"


def test_docs_name_every_option_and_the_example_is_real(tmp_path: Path) -> None:
    text = PAGE.read_text()
    assert text == with_tables(text), "run: python -m tests.support.inventory_page"
    good, bad = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert list(load(tmp_path, good).nodes) == ["here", "there"]
    (said,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert [f"error: inv.yaml:{f}" for f in faults_of(tmp_path, bad)] == said.splitlines()
    for name, model in json.loads(dumps())["$defs"].items():
        assert all(of.get("description") for of in model["properties"].values()), name
    node = load_inventory(EXAMPLE).nodes["gpu-node-1"]
    assert (node.docker.devices, node.docker.group_add) == (None, ())  # the GPU of the slot
    for option in ("shm_size", "ipc", "network", "cap_add", "seccomp=unconfined"):
        assert re.search(rf"^ +(- )?{re.escape(option)}[^#\n]*# \w+", EXAMPLE.read_text(), re.M), option


def test_inventory_check_says_what_it_means_and_hides_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def check(*words: object) -> str:
        done = command("inventory", "check", *words).ok()
        return done.out + done.err

    monkeypatch.delenv("FLEET_USER", raising=False)
    assert check("--schema") == dumps()
    said = check(EXAMPLE)
    assert "gpu-node-1: ssh to gpu-node-1.example.com, docker with rocm/atom" in said
    assert "not set in your environment now: FLEET_USER" in said
    command("inventory", "check", "--env", EXAMPLE).failed_with(2)
    monkeypatch.setenv("FLEET_USER", "someone-private")
    said = check("--env", "--json", EXAMPLE)
    assert "someone-private" not in said
    first = json.loads(said)["nodes"][0]
    assert (first["name"], first["references"]) == ("gpu-node-1", {"FLEET_USER": True})
    for example, words in (
        ("slurm", "mi355: 1 to 8 leases by Slurm, partition compute, asked for on login1, processes, gpus 8"),
        ("kubernetes", "pool: 1 to 8 leases by Kubernetes, pods with rocm/pytorch:latest, gpus 8"),
    ):
        said = check(EXAMPLE.with_name(f"{example}.example.yaml"))
        assert words in said
        assert "this machine" not in said
    # variables that are not set are named beside the other faults: of the file, or of what it names
    (tmp_path / "unset.yaml").write_text("nodes:\n  a:\n    gpu: 1\n    host: ${env:NOT_SET}  # ${env:NO_WORD}\n")
    (tmp_path / "key.yaml").write_text("nodes: {a: {transport: ssh, host: '${env:NOT_SET}', identity: /no/such/key}}\n")
    for name, other in (("unset", r"unset\.yaml:3: .*gpu"), ("key", "no file '/no/such/key'")):
        done = command("inventory", "check", "--env", tmp_path / f"{name}.yaml")
        done.failed_with(2, "${env:NOT_SET}, and NOT_SET is not set here: export NOT_SET=...")
        assert len(done.err.splitlines()) == 2
        assert re.search(other, done.err)
    (tmp_path / "bad.yaml").write_text("nodes: {a: {gpu: 1, token: x}}")
    found = command("inventory", "check", "--json", tmp_path / "bad.yaml").json()
    assert (found["ok"], len(found["faults"])) == (False, 2)


def test_an_identity_that_is_not_there_is_found_by_inventory_check(tmp_path: Path) -> None:
    (tmp_path / "key").touch()
    for name, fault in (
        ("key", ""),
        ("keyy", f"inv.yaml:2: node n: identity: no file '{tmp_path}/keyy' is here"),
    ):
        (tmp_path / "inv.yaml").write_text(f"nodes:\n  n: {{transport: ssh, identity: {tmp_path / name}}}\n")
        done = command("inventory", "check", tmp_path / "inv.yaml")
        assert fault in done.err
        assert bool(done.code) is bool(fault)


def test_a_secret_may_come_by_reference(tmp_path: Path) -> None:
    (tmp_path / "inv.yaml").write_text(
        "nodes: {n: {env: {HF_TOKEN: '${env:GF_T}', HF_HUB_DISABLE_IMPLICIT_TOKEN: '1'}}}"
    )
    node = load_inventory(tmp_path / "inv.yaml").nodes["n"]
    assert resolved(node, {"GF_T": "hf_0123456789abc"}).env["HF_TOKEN"] == "hf_0123456789abc"
