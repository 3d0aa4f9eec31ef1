"""Inventories of remote nodes and containers: options, what fits together, references, schema, example."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.errors import InventoryError
from orchestrator.inventory.load import load_inventory, resolved
from orchestrator.inventory.model import Node, dumps
from tests.paths import ROOT

EXAMPLE = ROOT / "inventories" / "mi355x.example.yaml"


def load(tmp_path: Path, text: str) -> dict[str, Node]:
    path = tmp_path / "inv.yaml"
    path.write_text(text)
    return load_inventory(path).nodes


def faults_of(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(InventoryError) as e:
        load(tmp_path, text)
    return [f.removeprefix(f"{tmp_path / 'inv.yaml'}:") for f in e.value.faults]


SSH = "nodes:\n  n:\n    transport: ssh\n    engine: docker\n    image: i\n    "


def test_what_containers_get_where_nothing_is_said(tmp_path: Path) -> None:
    docker = load(tmp_path, SSH.rstrip())["n"].docker
    assert (docker.network, docker.ipc, docker.security_opt, docker.cap_add) == ("none", "private", (), ())
    assert (docker.devices, docker.group_add, docker.volumes, docker.user) == (None, (), (), None)


def test_docker_is_merged_option_by_option(tmp_path: Path) -> None:
    nodes = load(tmp_path, """\
defaults:
  transport: ssh
  engine: docker
  image: a
  docker: {ipc: host, volumes: ["/a:/a", "/b:/b"], env: {A: "1", B: "2"}, cap_add: [SYS_PTRACE]}
  aiter: {root: /a, compilers: {X_HIP_CLANG_PATH: /x}}
nodes:
  one:
  two: {image: b, docker: {volumes: ["/c:/c"], env: {B: "3"}, cap_add: []}, aiter: {compilers: {Y_HIP_CLANG_PATH: /y}}}
""")  # fmt: skip
    one, two = nodes["one"].docker, nodes["two"].docker
    assert (one.ipc, one.volumes, one.env) == ("host", ("/a:/a", "/b:/b"), {"A": "1", "B": "2"})
    assert (two.ipc, two.volumes, two.env, two.cap_add) == ("host", ("/c:/c",), {"A": "1", "B": "3"}, ())
    assert nodes["two"].image == "b"
    both = {"X_HIP_CLANG_PATH": "/x", "Y_HIP_CLANG_PATH": "/y"}
    assert (nodes["two"].aiter.root, nodes["two"].aiter.compilers) == ("/a", both)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("host: -oProxyCommand=x", "host: must be a host name, an address or a name of your SSH configuration, alone"),
        ("host: me@h", "host: must be a host name"),
        ("host: h:22", "host: must be a host name"),
        ("host: a b", "host: must be a host name"),
        ("host: ''", "host: must be a host name"),
        ("host: ${env:1}", "host: a reference is written ${env:NAME}"),
        ("port: 0", "port: Input should be greater than or equal to 1 (it is '0')"),
        ("port: '22'", "port: "),
        ("user: -x", "user: must be a login name"),
        ("user: a;b", "user: must be a login name"),
        ("proxy_jump: -oX", "proxy_jump: must be [USER@]HOST[:PORT]"),
        ("proxy_jump: a,,b", "proxy_jump: must be [USER@]HOST[:PORT]"),
        ("image: --privileged", "image: must be an image such as"),
        ("image: a b", "image: must be an image such as"),
        ("python: ${env:P}", "python: no reference can stand here"),
        ("gfx: gfx950", "gfx and cu_num go together: add cu_num"),
        ("cu_num: 0", "cu_num: "),
        ("numa: [0]", "numa: a list needs gpus: as a number or a list"),
        ("numa: yes", "numa: must be auto, none, or a list"),
        ("password: x", "password: a secret has no place in an inventory"),
        ("sudo_password: x", "sudo_password: a secret has no place"),
        ("passphrase: x", "passphrase: a secret has no place"),
        ("token: x", "token: a secret has no place"),
        ("shm_size: 16G", "shm_size: is an option of containers: put it under docker"),
        ("env: {HF_TOKEN: hf_0123456789}", "env: HF_TOKEN looks like a secret"),
        ("env: {A: '${env:B'}", "env.A: a reference is written ${env:NAME}"),
        ("docker: {privileged: true}", "docker.privileged: unknown key: containers are never privileged"),
        ("docker: {passwd: x}", "docker.passwd: a secret has no place"),
        ("docker: {imag: x}", "docker.imag: unknown key"),
        ("docker: {device: x}", "docker.device: unknown key; did you mean devices? (legal: devices, group_add,"),
        ("docker: {image: x}", "docker.image: is an option of the node: put it beside docker, not under it"),
        ("docker: {devices: [kfd]}", "docker.devices.0: must be a device such as /dev/kfd"),
        ("docker: {devices: [/dev/../etc]}", "docker.devices.0: must be a device such as /dev/kfd"),
        ("docker: {devices: /dev/kfd}", "docker.devices: must be a list"),
        ("docker: {group_add: [-1]}", "docker.group_add.0: must be auto, a group's number"),
        ("docker: {cap_add: [ALL]}", "docker.cap_add.0: ALL is as good as --privileged"),
        ("docker: {cap_add: [--x]}", "docker.cap_add.0: must be a capability"),
        ("docker: {security_opt: [--x]}", "docker.security_opt.0: must be an option such as"),
        ("docker: {shm_size: 16 G}", "docker.shm_size: must be a size"),
        ("docker: {shm_size: 16}", "docker.shm_size: must be text: put it in quotes"),
        ("docker: {ipc: hots}", "docker.ipc: 'hots' is not legal; did you mean host?"),
        ("docker: {network: --x}", "docker.network: must be none, host, bridge"),
        ("docker: {volumes: [/a]}", "docker.volumes.0: must be SOURCE:TARGET"),
        ("docker: {volumes: ['~/a:/b']}", "docker.volumes.0: must be SOURCE:TARGET"),
        ("docker: {volumes: ['/a:b']}", "docker.volumes.0: must be SOURCE:TARGET"),
        ("docker: {volumes: ['/a/../b:/b']}", "docker.volumes.0: must be paths without"),
        ("docker: {volumes: ['/a:/b:r o']}", "docker.volumes.0: what follows the second ':'"),
        ("docker: {docker_command: []}", "docker.docker_command: "),
        ("docker: {docker_command: docker}", "docker.docker_command: must be a list"),
        ("docker: {user: 'a b'}", "docker.user: must be USER or UID:GID"),
        ("docker: {ipc: none, shm_size: 1g}", "docker: ipc: none has no /dev/shm"),
        ("docker: 3", "docker: must be a mapping of options to values"),
    ],
)
def test_wrong_options(tmp_path: Path, option: str, says: str) -> None:
    an_image = option.startswith("image:")
    (fault,) = faults_of(tmp_path, SSH.replace("image: i", option) if an_image else f"{SSH}{option}\n")
    line, _, rest = fault.partition(": ")
    assert line == ("5" if an_image else "2" if says.startswith("gfx and") else "6"), fault
    assert rest.startswith((f"nodes.n.{says}", f"nodes.n: {says}")), fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("nodes: {n: {transport: ssh, engine: docker}}", "1: nodes.n: engine: docker needs an image"),
        ("nodes: {n: {engine: docker}}", "1: nodes.n: engine: docker needs an image"),
        ("nodes:\n  n:\n    host: x\n", "3: nodes.n.host: is for transport: ssh, and this node's is local"),
        (
            "nodes:\n  n:\n    image: x\n",
            "3: nodes.n.image: is for engine: apptainer, docker, pyxis, and this node's is process",
        ),
        ("nodes:\n  n:\n    docker: {ipc: host}\n", "3: nodes.n.docker: is for engine: docker"),
        ("defaults:\n  host: x\nnodes: {n: {}}", "2: defaults.host: a host is one node's"),
        (
            "nodes: {n: {engine: docker, image: i, results: ~/r}}",
            "1: nodes.n.results: must be a path on the node that begins with '/'",
        ),
        ("nodes: {n: {gpus: 2, numa: [0]}}", "1: nodes.n.numa: has 1 entries for 2 slots"),
        ("nodes: {n: {gpus: [4], numa: [0, 1]}}", "1: nodes.n.numa: has 2 entries for 1 slots"),
        (
            "nodes: {n: {engine: docker, image: i, gpus: 0, docker: {devices: [/dev/dri]}}}",
            "1: nodes.n.gpus: 0 means no GPU",
        ),
    ],
)
def test_what_does_not_fit_together(tmp_path: Path, text: str, fault: str) -> None:
    (found,) = faults_of(tmp_path, text)
    assert found.startswith(fault)


def test_inherited_options_that_a_node_does_not_need_are_no_fault(tmp_path: Path) -> None:
    text = (
        "defaults: {transport: ssh, user: u, engine: docker, image: i}\nnodes: {a: {transport: local, engine: process}}"
    )
    assert load(tmp_path, text)["a"].image == "i"


@pytest.mark.parametrize("host", ["gpu-1", "10.0.0.1", "fe80::1%eth0", "::1", "a.b.example.com", "x_y", "${env:H}.lan"])
def test_hosts(tmp_path: Path, host: str) -> None:
    assert load(tmp_path, f'nodes: {{n: {{transport: ssh, host: "{host}"}}}}')["n"].host == host


def test_a_missing_variable_names_file_line_node_and_name(tmp_path: Path) -> None:
    node = load(tmp_path, "defaults:\n  user: ${env:U}\n" + SSH + "host: ${env:H}.x\n")["n"]
    with pytest.raises(InventoryError) as e:
        resolved(node, {})
    assert e.value.faults == [
        f"{tmp_path}/inv.yaml:8: node n: host refers to ${{env:H}}, and H is not set here: export H=... and try again",
        f"{tmp_path}/inv.yaml:2: node n: user refers to ${{env:U}}, and U is not set here: export U=... and try again",
    ]


@pytest.mark.parametrize("value", ["-oProxyCommand=touch x", "", "two words", "a\nb"])
def test_a_value_is_checked_like_text_of_the_file_and_not_repeated(tmp_path: Path, value: str) -> None:
    node = load(tmp_path, SSH + "host: ${env:H}\n")["n"]
    with pytest.raises(InventoryError, match=r"inv.yaml:6: node n: host, its references replaced, must be") as e:
        resolved(node, {"H": value})
    assert not value or value not in str(e.value)


# --- schema and example -------------------------------------------------------------------------------------------


def test_the_schema_in_the_repository_is_up_to_date() -> None:
    path = ROOT / "inventories" / "inventory.schema.json"
    assert path.read_text() == dumps(), "run: gemmfleet inventory check --schema > inventories/inventory.schema.json"


def test_every_option_of_the_schema_is_described() -> None:
    for name, model in json.loads(dumps())["$defs"].items():
        for option, of in model["properties"].items():
            assert of.get("description"), f"{name}.{option}"


def accepts(schema: dict[str, Any], value: Any, defs: dict[str, Any]) -> bool:
    """A small reader of the parts of JSON schema that ours uses."""
    if "$ref" in schema:
        schema = {**defs[schema["$ref"].rsplit("/", 1)[-1]], **{k: v for k, v in schema.items() if k != "$ref"}}
    if "anyOf" in schema and not any(accepts(s, value, defs) for s in schema["anyOf"]):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    kinds = {"string": str, "integer": int, "array": list, "object": dict, "null": type(None)}
    if "type" in schema and (not isinstance(value, kinds[schema["type"]]) or isinstance(value, bool)):
        return False
    if isinstance(value, list):
        return all(accepts(schema.get("items", {}), v, defs) for v in value)
    if isinstance(value, dict):
        known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        if any(k not in value for k in schema.get("required", ())):
            return False
        names = schema.get("propertyNames", {}).get("pattern")
        if names and not all(re.search(names, k) for k in value):
            return False
        return all(
            accepts(known[k], v, defs) if k in known else other if isinstance(other, bool) else accepts(other, v, defs)
            for k, v in value.items()
        )
    return True


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (EXAMPLE.read_text(), True),
        ((ROOT / "inventories" / "local.yaml").read_text(), True),
        ("nodes: {a: {gpus: [0, 1]}, b:}", True),
        ("defaults:\nnodes: {a: {docker: {group_add: [44, auto]}}}", True),
        ("nodes: {a: {gpu: 1}}", False),
        ("nodes: {a: {docker: {privileged: true}}}", False),
        ("nodes: {a: {transport: scp}}", False),
        ("nodes: {a b: {}}", False),
        ("defaults: {}", False),
        ("nodes: [a]", False),
    ],
)
def test_the_schema_takes_what_we_take(text: str, good: bool) -> None:
    schema = json.loads(dumps())
    assert accepts(schema, yaml.safe_load(text), schema["$defs"]) is good


def test_the_example_is_good_names_its_schema_and_explains_what_it_opts_in_to() -> None:
    text = EXAMPLE.read_text()
    assert text.startswith("# yaml-language-server: $schema=inventory.schema.json\n")
    node = load_inventory(EXAMPLE).nodes["gpu-node-1"]
    docker = node.docker
    assert (docker.devices, docker.group_add) == (None, ())  # the GPU of the slot
    assert (docker.shm_size, docker.ipc, docker.network) == ("16G", "host", "host")
    assert (docker.cap_add, docker.security_opt) == (("SYS_PTRACE",), ("seccomp=unconfined",))
    for option in ("shm_size", "ipc", "network", "cap_add", "seccomp=unconfined"):
        assert re.search(rf"^ +(- )?{re.escape(option)}[^#\n]*# \w+", text, re.M), option


# --- commands -----------------------------------------------------------------------------------------------------


def test_inventory_schema_prints_the_schema() -> None:
    done = CliRunner().invoke(app, ["inventory", "check", "--schema"])
    assert (done.exit_code, done.stdout) == (0, dumps())


def test_inventory_check_says_what_it_means_and_hides_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEET_USER", raising=False)
    done = CliRunner().invoke(app, ["inventory", "check", str(EXAMPLE)])
    assert done.exit_code == 0
    assert "gpu-node-1: ssh to gpu-node-1.example.com, docker with rocm/atom" in done.stdout
    assert "not set in your environment now: FLEET_USER" in done.stdout
    done = CliRunner().invoke(app, ["inventory", "check", "--env", str(EXAMPLE)])
    assert isinstance(done.exception, InventoryError)
    monkeypatch.setenv("FLEET_USER", "someone-private")
    done = CliRunner().invoke(app, ["inventory", "check", "--env", "--json", str(EXAMPLE)])
    assert done.exit_code == 0
    assert "someone-private" not in done.output
    first = json.loads(done.stdout)["nodes"][0]
    assert (first["name"], first["references"]) == ("gpu-node-1", {"FLEET_USER": True})


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ("slurm", "mi355: 1 to 8 leases by Slurm, partition compute, asked for on login1, processes, gpus 8"),
        ("kubernetes", "pool: 1 to 8 leases by Kubernetes, pods with rocm/pytorch:latest, gpus 8"),
    ],
)
def test_inventory_check_says_what_a_pool_is(example: str, words: str) -> None:
    done = CliRunner().invoke(app, ["inventory", "check", str(EXAMPLE.with_name(f"{example}.example.yaml"))])
    assert done.exit_code == 0
    assert words in done.stdout
    assert "this machine" not in done.stdout


def test_inventory_check_gives_all_faults_as_json(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("nodes: {a: {gpu: 1, token: x}}")
    done = CliRunner().invoke(app, ["inventory", "check", "--json", str(path)])
    found = json.loads(done.stdout)
    assert (found["ok"], len(found["faults"])) == (False, 2)
