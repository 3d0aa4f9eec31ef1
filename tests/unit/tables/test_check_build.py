"""`db check --build`: one verdict on tables that are about to be served, and a way out for each row against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.families import get_family
from orchestrator.tables.aiter_build import Build
from orchestrator.tables.check import check_tables, verdict_of
from tests.kits.fleet import command
from tests.standins.aiter.kernel_lists import ASM, CK, CK2, CORE, tree
from tests.support.files import write_files
from tests.support.tuned_tables import A4W4, BLOCKSCALE, line, untuned, write_table

BF16 = get_family("a16w16")
CONFIGS, NAME = "aiter/configs", "x_a4w4_blockscale_tuned_gemm.csv"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree of which one table holds two rows, and knows bf16's libtypes."""
    folder = tree(tmp_path / "aiter", core=CORE)
    write_table(folder / CONFIGS / A4W4.tuned_csv, A4W4, line(A4W4, M=900, kernelName=CK))
    write_table(folder / CONFIGS / f"model_configs/{NAME}", A4W4, line(A4W4, M=901, kernelName=ASM))
    solutions = "solMap = {'torch': 1, 'hipblaslt': 2, 'flydsl': 3, 'triton': 4}\n"
    lists = {f"{CONFIGS}/{family.untuned_csv}": untuned(family) for family in (A4W4, BLOCKSCALE)}
    return write_files(folder, {**lists, "aiter/tuned_gemm.py": solutions})


def table(folder: Path, *lines: str, name: str = f"my_{A4W4.tuned_csv}", of: Any = A4W4) -> Path:
    return write_table(folder / name, of, *lines)


def cli(*words: object) -> tuple[int, str]:
    done = command("db", "check", *words)
    assert not done.err, done.err
    return done.code, done.out


def problems(path: Path, root: Path, *words: object) -> list[dict[str, Any]]:
    document = json.loads(cli(path, "--build", root, "--json", *words)[1])
    found: list[dict[str, Any]] = document["problems"]
    assert all(p["file"] == str(path) and p["fix"] for p in found)
    assert (document["verdict"] == "unsafe") == any(p["level"] == "error" for p in found)
    return found


@pytest.mark.parametrize(
    ("kernels", "code", "verdict", "counts"),
    [
        ((ASM, CK), 0, "safe in", "0 errors, 0 warnings"),
        ((ASM, CK2), 0, "safe after a rebuild in (AITER_REBUILD=1, once)", "0 errors, 1 warning"),
        ((ASM, CK2, CK + "x"), 1, "not safe in", "1 error, 1 warning"),
    ],
)
def test_the_verdict_and_a_line_a_row(
    tmp_path: Path, root: Path, kernels: tuple[str, ...], code: int, verdict: str, counts: str
) -> None:
    rows = [line(A4W4, M=m, kernelName=k, kernelId=int(k == CK2)) for m, k in enumerate(kernels, 1)]
    path = table(tmp_path, *rows)
    done, out = cli(path, "--build", root)
    assert (done, out.splitlines()[-1]) == (code, f"{verdict} {root}: 1 table, {len(rows)} rows: {counts}")
    rebuild = f"warning: {path}:3: build: rebuild: {CK2} is not compiled in; fix: start once with"
    assert (rebuild in out) == (CK2 in rows[1])
    assert (f"error: {path}:4: build: cannot: csrc/ck_gemm_a4w4_blockscale/gemm_a4w4" in out) == bool(code)
    assert cli(path, "--build", root, "--strict")[0] == code  # a rebuild is not a fault


@pytest.mark.parametrize(
    ("cells", "rule", "says"),
    [
        ({"gfx": "gfx951"}, "chip", "gfx is gfx951, which this AITER does not know"),
        ({"cu_num": 250}, "chip", "cu_num is 250: no gfx950 has that many compute units"),
        ({"libtype": "hipblaslt", "kernelName": "Cijk_A"}, "hipblaslt", "differ between its versions"),
        ({"libtype": "flydsl", "kernelName": "flydsl_x"}, "build: cannot", "flydsl"),
        ({"libtype": "triton", "kernelName": "auto"}, "build: cannot", "there is no aiter/ops/triton"),
        ({"us": 0}, "us", "anything beats it"),
        ({"err_ratio": 0.06}, "error ratio", "err_ratio is 0.06, the limit of the tuner 0.05"),
    ],
)
def test_each_rule_of_a_build(tmp_path: Path, root: Path, cells: dict[str, Any], rule: str, says: str) -> None:
    good = {"libtype": "torch", "kernelName": "native", "M": 7}
    partition = line(BF16, **{**good, "M": 8, "cu_num": 32})
    rows = line(BF16, **good), partition, line(BF16, **{**good, "M": 9, **cells})
    (found,) = [p for p in problems(table(tmp_path, *rows, name=BF16.tuned_csv, of=BF16), root) if p["rule"] == rule]
    assert (found["line"], found["level"]) == (4, "error")
    assert says in found["text"]


def test_order_and_line_ends_are_warnings_that_strict_refuses(tmp_path: Path, root: Path) -> None:
    path = table(tmp_path, *(line(A4W4, M=m, N=n, kernelName=ASM) for n, m in ((64, 1), (64, 9), (128, 2), (64, 3))))
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert [(p["line"], p["rule"], p["level"]) for p in problems(path, root)] == [
        (1, "line ends", "warning"), (5, "order", "warning"),
    ]  # fmt: skip
    assert cli(path, "--build", root)[0] == 0
    assert cli(path, "--build", root, "--strict")[0] == 1


def test_keys_are_held_to_all_tables_that_the_build_merges(tmp_path: Path, root: Path) -> None:
    rows = [line(A4W4, M=m, kernelName=ASM) for m in (900, 901, 902)]
    mine = table(tmp_path, *rows)
    assert [(p["line"], p["level"], p["text"]) for p in problems(mine, root)] == [
        (2, "error", f"has the key of aiter/configs/{A4W4.tuned_csv}:2: AITER stops at its start"),
        (3, "error", f"has the key of aiter/configs/model_configs/{NAME}:2: AITER stops at its start"),
    ]
    assert not problems(mine, root, "--env")  # then AITER reads this table alone
    other = table(tmp_path, *rows, name="tuned.csv")
    assert {p["level"] for p in problems(other, root, "--family", A4W4.name)} == {"warning"}
    same = table(tmp_path, *rows, name=NAME)  # takes the place of the build's
    assert [p["line"] for p in problems(same, root)] == [2]
    write_table(root / CONFIGS / A4W4.tuned_csv, A4W4, *rows[::2])
    copy = table(tmp_path, *rows[::2], name="copy.csv")
    (found,) = problems(copy, root, "--family", A4W4.name)  # one line, and not one for each row
    assert (found["line"], found["text"].partition(":")[0]) == (
        1, f"each of its 2 rows has the key of aiter/configs/{A4W4.tuned_csv}",
    )  # fmt: skip
    code, out = cli(root, "--build", root)
    assert (code, "duplicate" in out) == (0, False)
    assert [p["line"] for p in problems(table(tmp_path, rows[2], rows[2]), root, "--env")] == [3]


def test_a_package_that_dispatch_imports_has_to_be_in_the_image(tmp_path: Path, root: Path) -> None:
    write_files(root, {"aiter/ops/flydsl/names.py": 'import re\nNAME = re.compile(r"flydsl_x(\\d+)$")\n'})
    path = table(tmp_path, line(BF16, M=1, libtype="flydsl", kernelName="flydsl_x1"), name=BF16.tuned_csv, of=BF16)

    def verdict(*, whole: bool) -> str:
        return verdict_of(check_tables([path], None, 0.05, Build(root, whole=whole))[0])

    assert verdict(whole=False) == "safe"  # a checkout: its packages are not known
    assert verdict(whole=True) == "unsafe"
    (root / "flydsl").mkdir()
    assert verdict(whole=True) == "safe"


def test_what_cannot_be_read_is_unsafe(tmp_path: Path, root: Path) -> None:
    kernels = root / "csrc" / "ck_gemm_a4w4_blockscale" / "gemm_a4w4_blockscale_common.py"
    kernels.write_text("kernels_list = load()\n")
    (found,) = problems(table(tmp_path, line(A4W4, kernelName=CK)), root)
    assert (found["rule"], found["level"]) == ("build: unread", "error")
    (bad := tmp_path / f"bad_{A4W4.tuned_csv}").write_text("")
    assert command("db", "check", bad, "--build", root, "--json").json()["verdict"] == "unsafe"
