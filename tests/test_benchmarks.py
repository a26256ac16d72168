"""The benchmarks: rows of results, peak memory, and the check that implementations agree before they are timed."""

import csv
import hashlib
import importlib.util
import py_compile
import subprocess
import sys
import time

import pytest
import torch

from torchcaps.benchmarks import compare, draw_times, peak_bytes, published, write_csv
from torchcaps.benchmarks.devices import bench_devices
from torchcaps.benchmarks.memory import GROWTH, WAYS, draw_growth
from torchcaps.benchmarks.published import PUBLISHED, bench_published
from torchcaps.benchmarks.routing import Problem, bench_routing, check_agreement, dynamic_layer, em_stack
from torchcaps.benchmarks.rules import MATERIALISED, rule_stack
from torchcaps.data.files import write_picture
from torchcaps.environment import environment
from torchcaps.errors import BadInput


def test_rows_contain_median_times_and_ratios_to_the_first_implementation():
    ways = {"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.02)}
    short, long = compare("sleep", ways, images=10, repeats=5)
    assert (short["implementation"], short["ratio"], short["repeats"]) == ("short", 1.0, 5)
    assert long["ratio"] > 2
    assert long["10 % ms"] <= long["median ms"] <= long["90 % ms"]
    assert long["images/s"] == pytest.approx(10_000 / long["median ms"], rel=0.01)


def test_percentiles_of_few_times_are_the_smallest_and_the_largest_time():
    seconds = iter([0, 0.05])
    start = time.perf_counter()
    (row,) = compare("sleep", {"one": lambda: time.sleep(next(seconds))}, images=1, repeats=2, warm_ups=0)
    assert 0 <= row["10 % ms"] < row["median ms"] < row["90 % ms"] <= 1e3 * (time.perf_counter() - start)
    assert row["10 % ms"] + row["90 % ms"] == pytest.approx(2 * row["median ms"], abs=0.03)


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_peak_bytes_measures_the_memory_of_one_call():
    assert 60 << 20 < peak_bytes(lambda: torch.ones(16 << 20).sum()) < 90 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux")
def test_a_process_keeps_more_than_two_gibibytes_of_freed_memory():
    code = """
import ctypes, resource
from torchcaps.process_memory import keep_freed_memory
libc = ctypes.CDLL(None)
if hasattr(libc, "mallopt"):
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    keep_freed_memory()
    mapped = lambda: int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    before, blocks = mapped(), [libc.malloc(100 << 20) for _ in range(30)]  # the blocks are never written to
    for block in blocks:
        libc.free(block)
    assert mapped() - before > 29 * (100 << 20), mapped() - before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("create", [lambda: em_stack(1, grid=8, types=(2, 3, 4)), lambda: dynamic_layer(1)])
def test_the_benchmarked_implementations_agree(create):
    problem = create()
    check_agreement("alike", problem._replace(agreeing=problem.agreeing[:-1]))


@pytest.mark.parametrize("name", MATERIALISED)
def test_rules_with_materialised_votes_agree_with_the_other_implementations(name):
    problem = rule_stack(name, 2, grid=8, types=(2, 3, 4))
    check_agreement(name, problem._replace(agreeing=problem.agreeing[:-1]))


def test_implementations_that_disagree_are_not_timed():
    weight = torch.ones(3, requires_grad=True)
    different = Problem([weight], {}, [(lambda: [weight], lambda: [1.1 * weight])], 0.0)
    with pytest.raises(BadInput, match="nothing was timed"):
        check_agreement("different", different)


def test_rows_of_a_case_are_available_before_the_next_case():
    weight = torch.ones(3, requires_grad=True)
    right = Problem([weight], {"one": lambda: [weight], "other": lambda: [2 * weight]}, [], 8.0)
    wrong = right._replace(agreeing=[(lambda: [weight], lambda: [1.1 * weight])])
    found = bench_routing(2, problems={"right": (lambda batch: right, 1), "wrong": (lambda batch: wrong, 1)})
    rows = [next(found) for _ in range(4)]
    assert [row["case"] for row in rows] == 2 * ["right, forward"] + 2 * ["right, forward and backward"]
    with pytest.raises(BadInput, match="nothing was timed"):
        next(found)


def test_em_with_materialised_votes_equals_the_reference_with_competition_over_types():
    problem = em_stack(2, grid=8, types=(2, 3, 4))
    for found, right in zip(*(way() for way in problem.agreeing[1]), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-4)


def test_results_are_written_with_hardware_and_versions(tmp_path):
    write_csv(tmp_path / "results" / "some.csv", [{"case": "a", "median ms": 1.5}], "torchcaps bench a")
    (row,) = csv.DictReader((tmp_path / "results" / "some.csv").read_text().splitlines())
    assert (row["case"], row["median ms"], row["torch"]) == ("a", "1.5", torch.__version__)
    assert (row["command"], row["seed"]) == ("torchcaps bench a", "0")
    assert row["processor"]
    assert int(row["threads"]) == torch.get_num_threads()


@pytest.mark.parametrize("on_cpu", [False, True])
def test_results_name_the_gpu_only_if_it_was_measured(on_cpu, tmp_path, monkeypatch):
    monkeypatch.setattr("torchcaps.benchmarks.environment", lambda: {**environment(), "gpu": "H200"})
    write_csv(tmp_path / "some.csv", [{"case": "a"}], "torchcaps bench a", on_cpu=on_cpu)
    assert next(csv.DictReader((tmp_path / "some.csv").read_text().splitlines()))["gpu"] == ("" if on_cpu else "H200")


def test_the_table_and_the_plot_need_two_files(refused, tmp_path):
    file = tmp_path / "memory.csv"
    same = refused("bench", "memory", "--out", file, "--plot", tmp_path / "." / "memory.csv")
    assert f"--out and --plot are both {file}: give two files" in same


def test_the_plot_of_memory_has_a_panel_for_each_size_and_a_line_for_each_implementation(tmp_path):
    rows = [
        {"case": what, "value": value, "implementation": way, "peak MiB": 1.0 + value}
        for what, points in GROWTH.items()
        for value, _ in points
        for way in WAYS
    ]
    figure = draw_growth(rows)
    write_picture(tmp_path / "growth.png", figure)
    assert (tmp_path / "growth.png").stat().st_size > 1000
    panels = figure.axes
    assert [panel.get_xlabel() for panel in panels] == list(GROWTH)
    assert all([line.get_label() for line in panel.lines] == list(WAYS) for panel in panels)


def test_the_plot_of_times_has_a_bar_and_a_ratio_for_each_row(tmp_path):
    rows = [row for case in "ab" for row in compare(case, {"one": int, "two": int}, images=1, repeats=2)]
    rows = [row for row in rows if (row["case"], row["implementation"]) != ("b", "two")]
    figure = draw_times(rows)
    write_picture(tmp_path / "times.png", figure)
    assert (tmp_path / "times.png").stat().st_size > 1000
    (axes,) = figure.axes
    bars = {(bars.get_label(), round(bar.get_y(), 1)): bar.get_width() for bars in axes.containers for bar in bars}
    assert bars == {("one", 0): 1, ("two", 0.4): rows[1]["ratio"], ("one", 1): 1}
    assert sorted(text.get_text() for text in axes.texts) == sorted(f" {ratio:.2g}" for ratio in bars.values())
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]


def test_unknown_benchmarks_and_heaps_are_refused(refused):
    assert "unknown benchmark 'route'" in refused("bench", "route")
    assert "--heap must be one of warm, plain; got 'hot'" in refused("bench", "train", "--heap", "hot")


STAND_INS = {
    "EM, ConvCaps stack": """
import torch
from torch import nn
from torchcaps import Capsules, RoutingMap, em_routing

class ConvCaps(nn.Module):
    def __init__(self, B, C, K, stride, iters):
        super().__init__()
        self.sizes, self.stride, self.iterations = (K * K, B, C, 4, 4), stride, iters
        self.weights = nn.Parameter(torch.empty(1, K * K * B, C, 4, 4))
        self.beta_u, self.beta_a = nn.Parameter(torch.empty(C)), nn.Parameter(torch.empty(C))
        torch.cuda.FloatTensor(1)

    def forward(self, x):
        pose = x[..., : 16 * self.sizes[1]].flatten(1, 2).unflatten(2, (self.sizes[1], 4, 4))
        maps = RoutingMap.conv(x.shape[1:3], 3, self.stride)
        found = em_routing(
            Capsules(pose, torch.ones(pose.shape[:3])), self.weights.reshape(self.sizes), maps, self.beta_u,
            self.beta_a, iterations=self.iterations, competition="types", variance_floor=1e-8, normalise_data=False,
            inverse_temperature=1e-3, temperature_schedule="constant", backend="reference",
        )
        return torch.cat([found.pose.flatten(2), found.activation], dim=2).unflatten(1, maps.parent_grid)
""",
    "dynamic, 1152 → 10 capsules": """
import torch
from torch import nn
from torchcaps import RoutingMap, dynamic_routing

class DenseCapsule(nn.Module):
    def __init__(self, children, elements, parents, parent_elements, routings):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(parents, children, parent_elements, elements))
        self.iterations = routings

    def forward(self, x):
        found = dynamic_routing(
            x.cuda()[:, :, None, None], self.weight.permute(1, 0, 3, 2)[:, None], RoutingMap.dense(x.shape[1]),
            iterations=self.iterations, gradient_passes="last", backend="reference",
        )
        return found.pose[:, 0, :, 0]
""",
}


@pytest.fixture
def clones(tmp_path, monkeypatch):
    """Return a folder in which code of our own stands in for two published implementations."""
    cases = {}
    for case, code in STAND_INS.items():
        source, inputs, _ = PUBLISHED[case]
        (name,) = source.files
        path = tmp_path / source.repository.split("/")[1] / name
        path.parent.mkdir(parents=True)
        path.write_text(code)
        checksum = hashlib.sha256(path.read_bytes()).hexdigest()
        cases[case] = source._replace(files={name: checksum}), inputs, 2
    monkeypatch.setattr("torchcaps.benchmarks.published.PUBLISHED", cases)
    return tmp_path


def test_published_implementations_get_the_same_inputs_as_fused_routing(clones):
    rows = [*bench_published(2, clones)]
    assert [row["case"].split(",")[0] for row in rows] == 4 * ["EM"] + 4 * ["dynamic"]
    fused, others = rows[::2], rows[1::2]
    assert {(row["implementation"], row["difference"]) for row in fused} == {("fused", "")}
    assert {row["implementation"] for row in others} == {PUBLISHED[case][0].repository for case in STAND_INS}
    assert all(0 < float(row["difference"]) < 1e-3 for row in others)


def test_published_implementations_that_are_missing_or_changed_are_not_run(refused, tmp_path, clones):
    line = refused("bench", "published")
    assert all(f"https://github.com/{source.repository}" in line for source, *_ in map(PUBLISHED.get, STAND_INS))
    line = refused("bench", "published", "--clones", tmp_path / "empty")
    assert "error: --clones: " in line
    assert "git clone https://github.com/yl-1993/Matrix-Capsules-EM-PyTorch into" in line
    path = clones / "CapsNet-Pytorch" / "capsulelayers.py"
    assert not [*clones.rglob("__pycache__")]
    bad = tmp_path / "bad.py"
    bad.write_text("raise SystemExit('this code must not run')")
    compiled = importlib.util.cache_from_source(path)
    py_compile.compile(bad, compiled, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    source = published.PUBLISHED["dynamic, 1152 → 10 capsules"][0]
    assert source.load(clones)[0].DenseCapsule.__name__ == "DenseCapsule"
    path.write_text(bad.read_text())
    line = refused("bench", "published", "--clones", clones)
    assert f"{path} is not the file of commit 8a5a357: git checkout 8a5a357 in {path.parent}" in line
    assert "but `bench routing` does not use it" in refused("bench", "routing", "--clones", clones)


@pytest.mark.slow
def test_bench_devices_measures_one_and_two_processes():
    rows = bench_devices(repeats=2, batch=4)
    assert [row["implementation"] for row in rows] == ["1 process", "2 processes"]
    assert all(row["images/s"] == pytest.approx(4000 / row["median ms"], rel=0.1, abs=0.1) for row in rows)
