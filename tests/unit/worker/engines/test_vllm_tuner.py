"""The tuner vllm: keys and ranges; candidates, seeds and compiling; the whole of it in Triton's interpreter, with the
kernel and the look-ups of a real wheel."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backend_names import backend_name
from orchestrator.errors import InputError
from orchestrator.families import check_family, check_tuner_options, get_tuner
from orchestrator.tables.row_kernels import kind_by_names
from tests.kits.worker import answers_of, of_type, run_group
from tests.support.engines import H200, MI355X, tree
from tests.support.marks import WITH_TORCH
from tests.support.search_standin import Kit, StandIn, Timer
from worker.families import tuner_of
from worker.protocol import SpecShape
from worker.protocol.paths import CACHE_ENV
from worker.triton_configs.cutting import cut_ranges, unite_points
from worker.triton_configs.m_ranges import USUAL_KEYS, ConfigRange, entries_of, ranges_served
from worker.triton_configs.point_record import PointRecord, values_of
from worker.tuners.base import Place
from worker.tuners.common.problem import Problem
from worker.tuners.engines.specs import EngineOptions
from worker.tuners.search.compile_pool import CompilePool, CompileResult
from worker.tuners.search.measuring_process import MeasuringProcess, NoDeviceError
from worker.tuners.search.measuring_server import MeasuringServer
from worker.tuners.search.source import CompileFacts
from worker.tuners.search.target import datasheet_target
from worker.tuners.search.tile_config import tile_config

pytestmark = WITH_TORCH

KEYS = st.lists(st.integers(1, 200), min_size=1, max_size=12)


def nearest(keys: dict[int, Any], m: int) -> int:
    """The engine's own rule."""
    return min(keys, key=lambda key: abs(key - m))


@given(KEYS)
def test_a_key_serves_the_m_that_are_nearest_to_it(keys: list[int]) -> None:
    ranges = ranges_served(keys)
    ordered = dict.fromkeys(sorted(keys))
    for m in range(1, 300):
        first, last = ranges[nearest(ordered, m)]
        assert first <= m
        assert last is None or m <= last
    assert list(ranges_served(USUAL_KEYS).items())[3:5] == [(8, (7, 12)), (16, (13, 20))]
    assert ranges_served(USUAL_KEYS)[4096] == (3585, None)


@given(st.lists(st.tuples(st.integers(1, 30), st.sampled_from("abc"), st.integers(0, 99)), min_size=1, max_size=10))
def test_written_keys_give_every_m_what_is_meant_for_it(drawn: list[tuple[int, str, int]]) -> None:
    segments: list[ConfigRange] = []
    first = 1
    for length, values, own in drawn:
        segments.append(ConfigRange(first, first + length - 1, values, first + own % length if own < 80 else own))
        first += length
    start, _, values, own = segments[-1]
    segments[-1] = ConfigRange(start, None, values, own)
    found = entries_of(segments)
    assert list(found) == sorted(found)
    for m in range(1, first + 120):
        wanted = next(v for a, b, v, _ in segments if a <= m and (b is None or m <= b))
        assert found[nearest(found, m)] == wanted


def test_usual_ranges_need_no_further_keys_and_a_part_of_one_needs_a_pair() -> None:
    whole = [ConfigRange(first, last, str(key), key) for key, (first, last) in ranges_served(USUAL_KEYS).items()]
    assert list(entries_of(whole)) == list(USUAL_KEYS)
    parts = [ConfigRange(1, 40, "old", 32), ConfigRange(41, 56, "new", 48), ConfigRange(57, 70, "old", 64)]
    assert list(entries_of([*parts, ConfigRange(71, None, "other", 96)])) == [32, 48, 64, 70, 71, 96]


def test_its_rows_are_not_taken_for_aiters() -> None:
    name = tile_config({"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128}, "vllm_").name
    assert (kind_by_names("triton", name), backend_name("a8w8_blockscale", name, libtype="triton")) == ("own", "vllm")


@pytest.fixture
def linear() -> Any:
    pytest.importorskip("triton", reason="Triton is not installed")
    from worker.tuners.engines.linear import LinearSource

    return LinearSource("", H200)


AMD = {"waves_per_eu": 2, "matrix_instr_nonkdim": 16}
KEY: dict[str, int | str] = {"M": 64, "N": 2112, "K": 7168}


def values(m: int = 16, n: int = 64, k: int = 128, **more: int) -> dict[str, int]:
    tile = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 1}
    return {**tile, "num_warps": 4, "num_stages": 2, **more}


@pytest.mark.parametrize(
    ("arch", "m", "key", "legal"),
    [
        (90, 64, "BLOCK_SIZE_M", {16, 32, 64}),
        (90, 2048, "BLOCK_SIZE_M", {16, 32, 64, 128, 256}),
        (90, 64, "BLOCK_SIZE_K", {32, 64, 128}),
        (90, 64, "num_stages", {1, 2, 3, 4, 5, 6}),
        (90, 64, "waves_per_eu", {None}),
        ("gfx950", 64, "num_stages", {1, 2, 3}),
        ("gfx950", 64, "waves_per_eu", {0, 1, 2, 4}),
        ("gfx950", 64, "kpack", {None}),
        ("gfx942", 64, "kpack", {1, 2}),
    ],
)
def test_candidates_are_what_the_kernel_takes_on_the_chip(
    linear: Any, arch: int | str, m: int, key: str, legal: set[Any]
) -> None:
    target = datasheet_target(arch)
    p = linear.problem("a8w8_blockscale", {**KEY, "M": m}, target.gfx)
    assert p.dtype == ("float8_e4m3fnuz" if arch == "gfx942" else "float8_e4m3fn")
    space = linear.space(p, target)
    found = space.candidates()
    assert {c.values.get(key) for c in found} == legal
    assert len({c.name for c in found}) == len(found)
    assert {tuner_of(c.name) for c in found} == {"vllm"}
    with_seed = space.candidates([tile_config(values(16, 64, 128, GROUP_SIZE_M=1))], 300)
    assert 200 < len(with_seed) <= 300


@pytest.mark.parametrize(
    "config",
    [
        values(16, 64, 256),  # two scales in a step: wrong results
        values(128, 64),  # the tile is twice the output
        values(64, 256, num_warps=1),  # too many registers of a lane
        values(64, 256, num_stages=8),  # no pipeline is so small
    ],
)
def test_what_cannot_be_right_or_run_is_not_compiled(linear: Any, config: dict[str, int]) -> None:
    p = linear.problem("a8w8_blockscale", {**KEY, "M": 16}, "sm_90")
    space = linear.space(p, datasheet_target(90))
    assert not space.is_legal(tile_config(config))
    assert space.is_legal(tile_config(values()))
    short = linear.problem("a8w8_blockscale", {**KEY, "K": 128}, "sm_90")
    assert linear.space(short, datasheet_target(90)).is_legal(tile_config(values(16, 64, 256))), "K has one scale"


def test_one_row_of_tiles_has_no_order(linear: Any) -> None:
    p = linear.problem("a8w8_blockscale", KEY, "sm_90")
    space = linear.space(p, datasheet_target(90))
    pairs = [[tile_config(values(m, GROUP_SIZE_M=g)) for g in (1, 16)] for m in (32, 64)]
    assert [len(space.distinct(pair)) for pair in pairs] == [2, 1]


def test_m_of_one_class_share_their_kernels(linear: Any) -> None:
    def alike(m: int, n: int = 2112) -> int:
        found: int = linear.compile_problem(linear.problem("a8w8_blockscale", {**KEY, "M": m, "N": n}, "sm_90")).m
        return found

    assert [alike(m) for m in (1, 2, 5, 17, 16, 48, 4096)] == [1, 17, 17, 17, 16, 16, 16]
    assert alike(1 << 19, 4096) == 1 << 19, "AMD's compiler tells large tensors from others"


def copied(folder: Path, *keep: str) -> Path:
    """A tree of vLLM of one's own, whose only config files of linear layers are these."""
    root = folder / "engine"
    shutil.copytree(tree("vllm"), root, ignore=shutil.ignore_patterns("*.json"))
    for name in keep:
        source = next(tree("vllm").rglob(name))
        target = root / source.relative_to(tree("vllm"))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    configs(root).mkdir(parents=True, exist_ok=True)
    return root


def configs(root: Path) -> Path:
    return root / "vllm" / "model_executor" / "layers" / "quantization" / "utils" / "configs"


def name_of(n: int, k: int, device: str = "NVIDIA_H200") -> str:
    return f"N={n},K={k},device_name={device},dtype=fp8_w8a8,block_shape=[128,128].json"


def test_seeds_are_todays_entry_its_neighbours_the_default_and_those_of_near_files(tmp_path: Path, linear: Any) -> None:
    from worker.tuners.engines.engine_file import EngineSeeds

    root = copied(tmp_path)
    files = {
        (2112, 7168): {"16": values(16), "64": values(32), "128": values(128)},
        (2112, 8192): {"1": values(256)},
        (64, 64): {"8": values(16, 256), "4096": values(16, 32)},
    }
    for (n, k), entries in files.items():
        (configs(root) / name_of(n, k)).write_text(json.dumps(entries))
    (configs(root) / name_of(2112, 4096, "NVIDIA_H20")).write_text(json.dumps({"1": values(16, 16)}))
    seeds = EngineSeeds(replace(linear, root=str(root)))
    p = linear.problem("a8w8_blockscale", KEY, "sm_90")
    default = {**values(64, 128), "GROUP_SIZE_M": 32}
    wanted = [values(32), values(128), values(16), default, values(256), values(16, 256)]
    assert [c.values for c in seeds.seeds_of(p)] == wanted, "of other (N, K) the nearest first, of other devices none"
    won = tile_config(values(64, 64), "vllm_")
    seeds.add_winner(replace(p, m=32), won)
    assert seeds.seeds_of(p)[-1] == won
    other = linear.problem("a8w8_blockscale", {**KEY, "N": 4096}, "sm_90")
    assert seeds.seeds_of(other)[0].values == default


WANTED = {True: 16, False: 64}  # the best rows of a tile below M=75, and from there on


class StandInDevice(StandIn):
    """A device on which a config takes 5 us more for each halving or doubling of its rows away from the best."""

    def prepare(self, problem: Problem, seed: int, rotate_bytes: int, tick: object) -> str:
        self.m = problem.m
        return ""

    def timer(self, loaded: Any) -> Timer:
        c = loaded.candidate
        away = abs(math.log2(c.number("BLOCK_SIZE_M") / WANTED[self.m < 75])) + 0.3 * (c.number("BLOCK_SIZE_N") != 64)
        return Timer(20 + 5 * away)


def serve(conn: Any) -> None:
    MeasuringServer(conn, lambda: StandInDevice({}, "")).serve()


def test_ranges_meet_where_the_best_config_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but device and compiler is real. The default has 64 rows, which 80 likes and 64 does not."""
    from worker.tuners.engines import engine_file
    from worker.tuners.engines.linear import LinearSource

    class Source(LinearSource):
        def compile(self, job: Any, target: Any) -> CompileFacts:
            return CompileFacts(1024, None, 0, repr(job))

    monkeypatch.setattr(engine_file, "LEAST_EXTRA_S", 1e6)
    kit = Kit(tmp_path, {}, search="fast", family="a8w8_blockscale", max_candidates=40)
    kit.measurer.end()
    kit.pool.close()
    source = Source(str(copied(tmp_path)), H200)
    measurer = MeasuringProcess(serve, {}, 20)
    measurer.restart()
    pool = cast("CompilePool", OwnPool(source))
    options = EngineOptions(**asdict(kit.options))
    context = replace(kit.context, source=source, measurer=measurer, pool=pool, options=options)
    shapes = [SpecShape(i, {"M": m, "N": 2112, "K": 7168}) for i, m in enumerate((64, 80, 1), 1)]
    engine_file.EngineFile(context, engine_file.EngineSeeds(source), {"project": "vllm"}).run(shapes)
    measurer.end()
    rows = {m["shape"]: m["row"] for m in kit.messages if m["type"] == "shape_tuned"}
    assert sorted(rows) == [1, 2, 3]
    assert all(row["us"] < 21 for row in rows.values()), "of the right rows of a tile"
    records = [PointRecord.from_document(m["point"]) for m in kit.messages if m["type"] == "point_timed"]
    measured = {record.m for record in records}
    assert {1, 57, 64, 72, 80} <= measured
    assert max(measured) <= 80, "only the ranges of the workload's M are measured"
    ranges = cut_ranges(unite_points(record.point for record in records))
    values = values_of(records)
    default = {"BLOCK_SIZE_M": 64}
    rows_of_tile = {(r.first, r.last): values.get(r.config, default)["BLOCK_SIZE_M"] for r in ranges}
    assert rows_of_tile[1, 1] == 16
    ends = {ends: tile for ends, tile in rows_of_tile.items() if ends != (1, 1)}
    assert {tile for (_, last), tile in ends.items() if last < 75} == {16}
    assert {tile for (first, _), tile in ends.items() if first >= 75} == {64}


def test_the_files_configs_are_winners_and_those_that_come_near_with_other_rows() -> None:
    from worker.tuners.engines.engine_file import KeySearch

    tiles = [values(64, 64), values(64, 32), values(16, 64), values(32, 64), values(16, 32)]
    search_task = SimpleNamespace(candidates=[tile_config(tile) for tile in tiles])
    task: Any = SimpleNamespace(search=search_task, problem=SimpleNamespace(is_sustained=False))
    us = dict(enumerate([10.0, 10.1, 10.9, 11.5, 10.8]))
    search: Any = SimpleNamespace(measured={i: SimpleNamespace(us=us[i]) for i in us})
    assert KeySearch.choose_finalists(cast("KeySearch", None), task, search) == [0, 4]
    task.problem.is_sustained = True
    assert KeySearch.choose_finalists(cast("KeySearch", None), task, search) == [0]


class OwnPool:
    """Compiles at once, in this process."""

    def __init__(self, source: Any) -> None:
        self.source, self.done, self.jobs = source, dict[str, CompileResult](), list[Any]()
        self.connections: list[Any] = []

    def request(self, jobs: Any) -> None:
        self.jobs = [job for job in jobs if job[0] not in self.done]

    def collect(self) -> list[CompileResult]:
        made = [CompileResult(n, "ok", "", self.source.compile(job, datasheet_target(90))) for n, job in self.jobs]
        self.done |= {result.name: result for result in made}
        self.jobs = []
        return made


CODE = """
import json, sys
from worker.triton_configs.engine_package import EngineDevice
from worker.tuners.engines.linear import LinearSource
from worker.tuners.search.compiling import compile_candidate
from worker.tuners.search.target import datasheet_target
from worker.tuners.search.tile_config import tile_config
root, key, jobs = sys.argv[1:]
for name, arch, values in json.loads(jobs):
    target = datasheet_target(arch)
    source = LinearSource(root, EngineDevice(name, arch))
    p = source.problem("a8w8_blockscale", json.loads(key), target.gfx)
    status, detail, f = compile_candidate(source, target, source.job(p, tile_config(values)))
    print(json.dumps([status, detail, f and [f.shared_bytes, f.vgprs, f.spills, repr(f.same_as)]]))
"""


def test_candidates_are_compiled_for_a_chip_that_is_not_here(tmp_path: Path) -> None:
    jobs: list[tuple[str, int | str, dict[str, int]]] = []
    fitting = [values(), values(GROUP_SIZE_M=16), values(64, 128, 128)]
    too_large = values(16, 256, num_stages=8, num_warps=8)
    jobs += [(H200.name, H200.arch, config) for config in (*fitting, too_large)]
    too_large = values(16, 1024, num_warps=8)
    jobs += [(MI355X.name, MI355X.arch, config | AMD) for config in (*fitting, too_large)]
    jobs.append((H200.name, H200.arch, values(waves_per_eu=1)))
    key = {"M": 64, "N": 512, "K": 7168}
    words = (str(tree("vllm")), json.dumps(key), json.dumps(jobs))
    *found, foreign = answers_of(CODE, *words, cache=tmp_path / "cache")
    for good in (found[:4], found[4:]):
        assert [status for status, _, _ in good] == ["ok"] * 3 + ["unsupported"]
        assert "bytes of shared memory" in good[-1][1]
        assert good[0][2][3] != good[1][2][3]
        assert good[2][2][0] > good[0][2][0]
    assert foreign[0] == "error"


def run(folder: Path, ms: list[int], *, interpreted: bool = True, **options: Any) -> tuple[int, str, list[Any]]:
    keys = [{"M": m, "N": 64, "K": 256} for m in ms]
    return run_group(folder, "vllm", "a8w8_blockscale", keys, options, interpreted=interpreted)


def test_a_file_is_measured_at_many_m_each_with_its_record(tmp_path: Path) -> None:
    root = copied(tmp_path)
    wrong = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 256, "GROUP_SIZE_M": 1, "num_warps": 4}
    (configs(root) / name_of(64, 256)).write_text(json.dumps({"1": {**wrong, "num_stages": 2}, "6": values(32, 64)}))
    code, output, records = run(tmp_path, [5, 1], root=str(root), counts={"5x64x256": 9})
    assert code == 0, output
    tuned = {r["shape"]: r["row"] for r in of_type(records, "shape_tuned")}
    verdicts = {shape: json.loads(row["triton_config"]) for shape, row in tuned.items()}
    points = {r["point"]["m"]: PointRecord.from_document(r["point"]) for r in of_type(records, "point_timed")}
    assert {1, 4, 5, 6} <= set(points), "both ends of a range are measured"
    assert {p.count for m, p in points.items() if m in (1, 5)} == {1.0, 9.0}
    assert {p.count for m, p in points.items() if m not in (1, 5)} == {0.0}
    file = points[5].file
    assert all(point.file == file for point in points.values())
    assert (file["project"], file["version"], file["named_by"]) == ("vllm", "0.33.0", "")
    assert file["file"] == name_of(64, 256)
    assert file["device"] == {"name": "NVIDIA H200", "arch": 90}
    layer = {"op": "linear", "n": 64, "k": 256, "e": 0, "topk": 0, "dtype": "fp8_w8a8", "block": [128, 128]}
    assert file["layer"] == layer
    assert points[1].today == ({**wrong, "num_stages": 2}, -1.0, -1.0, 1.0), "today's is wrong: no time can outweigh it"
    assert verdicts[2]["values"] is not None
    assert "today's does not run" in tuned[2]["detail"]
    assert {r["row"]["status"] for r in of_type(records, "row") if r["shape"] == 2} >= {"ok", "wrong"}
    assert points[5].today.values == values(32, 64)
    assert points[5].today.us > 0
    assert tuned[1]["kernelName"] == tile_config(verdicts[1]["values"] or values(32, 64), "vllm_").name


def test_a_wheel_an_engine_of_others_and_no_engine_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zipfile

    import torch

    from worker.tuners.engines.tuner import VllmTuner

    def tuner(root: Path) -> VllmTuner:
        made = VllmTuner()
        made.configure({"family": "a8w8_blockscale", "root": str(root)}, Place(node_dir=tmp_path))
        return made

    monkeypatch.delenv(CACHE_ENV, raising=False)
    wheel = tmp_path / "vllm-9.whl"
    package = tree("vllm")
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in package.rglob("*.py"):
            archive.write(path, path.relative_to(package))
        archive.writestr(str(configs(Path()) / "none.json"), "{}")
    if not torch.cuda.is_available():
        with pytest.raises(NoDeviceError, match="torch sees no GPU here"):
            tuner(package).open()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(NoDeviceError, match=f"{tmp_path}/nothing holds neither vLLM nor SGLang"):
        tuner(tmp_path / "nothing").open()
    with pytest.raises(NoDeviceError, match="is sglang, whose kernels are others"):
        tuner(tree("sglang")).open()
    source, _ = tuner(wheel).source()
    assert source.engine().package.is_relative_to(tmp_path / "cache" / "engines")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"kind": "a16w16"}, "unknown option 'kind'"), ({"counts": {"1x2x3": -1}}, "not numbers of calls")],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    spec = get_tuner("vllm")
    check_tuner_options(spec, {"search": "exhaustive", "root": "/opt/vllm"})
    with pytest.raises(InputError, match=words):
        check_tuner_options(spec, options)
    with pytest.raises(InputError, match="does not tune family a16w16"):
        check_family(spec, "a16w16", {})
