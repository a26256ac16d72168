"""`torchcaps experiment report`: the page with all experiments, incomplete results, and options without effect."""

import json
import re
from pathlib import Path

import pytest

from torchcaps.errors import BadInput
from torchcaps.experiments import EXPERIMENTS, Row
from torchcaps.experiments.report import write_pages, write_report

RESULTS = Path(__file__).parents[1] / "results"


def test_the_report_shows_the_largest_budget_of_each_dataset(tmp_path):
    here = {"processor": "p", "gpu": None, "threads": 1, "versions": {"torch": "2"}, "precision": "float32"}
    plain = {"experiment": "pitfalls", "notes": [], "command": "c", "training_minutes": 2.5}
    plain["environment"] = {**here, "commits": ["a", "b"]}
    said = [
        ("quick", None, 1, 1.0),
        ("standard", None, 1, 2.0),
        ("standard", None, 3, 3.0),
        ("quick", "smallnorb", 1, 4.0),
    ]
    for number, (budget, data, seeds, value) in enumerate(said):
        row = Row(f"value {value}", [value])._asdict()
        content = {**plain, "budget": budget, "data": data, "seeds": seeds, "rows": [row]}
        (tmp_path / f"my {number}.json").write_text(json.dumps(content))
    assert write_report(tmp_path, tmp_path / "docs/report.md", EXPERIMENTS) == 2
    report = (tmp_path / "docs/report.md").read_text()
    assert [f"value {value}" in report for *_, value in said] == [False, False, True, True]
    assert (
        "seeds 0 to 2, the figure shows seed 0; 2.5 minutes of training; p, threads: 1, torch 2, float32; commits a, b."
        in report
    )
    assert "](../my%202.png)" in report  # a picture's path with a space is not shown
    (tmp_path / "4.json").write_text('{"experiment": "pitf')
    with pytest.raises(BadInput, match=r"4\.json is damaged .*: run the experiment, the training .* again"):
        write_report(tmp_path, tmp_path / "docs/report.md", EXPERIMENTS)
    assert (tmp_path / "docs/report.md").read_text() == report


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda said: said["environment"].pop("commits"), "no entry 'commits'"),
        (lambda said: said["environment"].pop("precision"), "no entry 'precision'"),
        (lambda said: said.pop("notes"), "no entry 'notes'"),
        (lambda said: said.pop("seeds"), "no entry 'seeds'"),
        (lambda said: said.update(budget="long"), "unknown budget 'long'"),
        (lambda said: said["rows"][1].update(ours=[]), "row 'T = 1, no variance floor: accuracy' are []"),
        (lambda said: said["rows"][1].update(ours=["high"]), "row 'T = 1, no variance floor: accuracy' are ['high']"),
        (lambda said: said["rows"][0].pop("ours"), "ours"),
        (lambda said: said.update(rows=None), "NoneType"),
        (lambda said: said["rows"][1].update(ours=[True]), "row 'T = 1, no variance floor: accuracy' are [True]"),
    ],
)
def test_an_incomplete_result_is_refused_with_the_name_of_its_file(change, problem, refused, tmp_path):
    said = json.loads((RESULTS / "pitfalls-standard.json").read_text())
    change(said)
    (tmp_path / "one.json").write_text(json.dumps(said))
    for folder in (".", "/", ""):
        assert "which is a folder" in refused("experiment", "report", "--results", tmp_path, "--report", folder)
    line = refused("experiment", "report", "--results", tmp_path, "--report", tmp_path / "page.md")
    assert f"{tmp_path / 'one.json'} is damaged (" in line
    assert problem in line
    assert "run the experiment, the training or the benchmark that writes it again" in line
    assert not (tmp_path / "page.md").exists()


def test_a_table_with_an_incomplete_result_is_refused_with_the_name_of_its_file(tmp_path):
    (tmp_path / "tables.toml").write_text('[[highlights]]\nwhat = "a"\nresult = "one"\nrow = "b"\n')
    (tmp_path / "one.json").write_text('{"experiment": "pitfalls"}')
    (tmp_path / "page.md").write_text("<!-- table: highlights -->\n<!-- end of table -->\n")
    with pytest.raises(BadInput, match=r"one\.json is damaged \(no entry 'rows'\): run the experiment"):
        write_pages(tmp_path, [tmp_path / "page.md"])
    (tmp_path / "tables.toml").write_text('[[highlights]]\nwhat = "a"\nruns = ["run"]\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.json").write_text("{}")
    with pytest.raises(BadInput, match=r"metrics\.json is damaged \(no entry 'test_accuracy_percent'\): run"):
        write_pages(tmp_path, [tmp_path / "page.md"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[[networks]]\nwhat = "a"\ncommand = "b"', "an entry of [[networks]] in PATH lacks 'runs': add it"),
        ('[[renderings]]\nruns = [["a"]]\ncommand = "b"', "an entry of [[renderings]] in PATH lacks 'what': add it"),
        (
            '[[experiments]]\nwhat = "a"\ncommand = "b"\ncnn = "c"',
            "an entry of [[experiments]] in PATH lacks 'result': add it",
        ),
        ('[[highlights]]\nwhat = "a"\nresult = "b"', "an entry of [[highlights]] in PATH lacks 'row': add it"),
        ('[[speed]]\nwhat = "a"\nfile = "b.csv"', "an entry of [[speed]] in PATH lacks 'case': add it"),
        (
            '[networks]\nwhat = "a"\ncommand = "b"\nruns = ["c"]',
            "networks in PATH is not a list of entries: begin each entry",
        ),
        ("networks = 3", "networks in PATH is not a list of entries"),
        ('[[networks]]\nwhat = "a"\ncommand = "b"\nruns = []', "runs of 'a' in PATH must be a list of runs; got []"),
        ('[[networks]]\nwhat = "a"\ncommand = "b"\nruns = 3', "runs of 'a' in PATH must be a list of runs; got 3"),
        ('[[networks]]\nwhat = "a"\ncommand = "b"\nruns = [1]', "runs of 'a' in PATH must be a list of runs; got [1]"),
        ('[[networks]]\nwhat = 1\ncommand = "b"\nruns = ["c"]', "what in [[networks]] of PATH must be text; got 1"),
    ],
)
def test_an_incomplete_or_malformed_table_is_refused(text, problem, tmp_path):
    (tmp_path / "tables.toml").write_text(f"{text}\n")
    (tmp_path / "page.md").write_text("<!-- table: networks -->\n<!-- end of table -->\n")
    with pytest.raises(BadInput, match=re.escape(problem.replace("PATH", str(tmp_path / "tables.toml")))):
        write_pages(tmp_path, [tmp_path / "page.md"])


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("b.csv", b"case,implementation\na,fused\n", r"b\.csv is damaged \(no entry 'gpu'\): run the experiment"),
        ("b.csv", b"case,implementation\n\xff,fused\n", r"b\.csv is damaged \(.*utf-8"),
        ("page.md", b"caf\xe9", r"page\.md is damaged \(.*utf-8.*: save it as UTF-8"),
    ],
)
def test_a_damaged_benchmark_or_page_is_refused_by_name(file, content, problem, tmp_path):
    (tmp_path / "tables.toml").write_text("")
    (tmp_path / "page.md").write_text("<!-- table: b.csv -->\n<!-- end of table -->\n")
    (tmp_path / file).write_bytes(content)
    with pytest.raises(BadInput, match=problem):
        write_pages(tmp_path, [tmp_path / "page.md"])


@pytest.mark.parametrize("row", ["a,fused,0", "a,fused,fast", "a,fused"])
def test_times_that_are_no_positive_numbers_are_refused(row, tmp_path):
    (tmp_path / "tables.toml").write_text('[[speed]]\nwhat = "a"\nfile = "b.csv"\ncase = "a"\n')
    (tmp_path / "page.md").write_text("<!-- table: speed -->\n<!-- end of table -->\n")
    (tmp_path / "b.csv").write_text(f"case,implementation,median ms\na,reference,3\n{row}\n")
    with pytest.raises(BadInput, match=r"b\.csv is damaged"):
        write_pages(tmp_path, [tmp_path / "page.md"])


def test_values_of_any_size_are_written_as_text():
    assert Row("", [1e30], unit="%").measured() == "1e+30 %"
    assert Row("", [float("nan")], unit="").measured() == "nan"
    assert Row("", [2.675], unit="").measured() == "2.68"


def test_options_without_effect_are_refused(refused, tmp_path):
    report = ("experiment", "report", "--results", RESULTS, "--report", tmp_path / "page.md")
    for option, value in (("--budget", "quick"), ("--data", "nowhere"), ("--seeds", 4), ("--data-dir", tmp_path)):
        line = refused(*report, option, value)
        assert f"{option} is {value}, but `experiment report` does not use it: leave out {option}" in line
    assert "--out is runs, but `experiment list` does not use it" in refused("experiment", "list", "--out", "runs")
    for option in ("--page", "--report"):
        line = refused("experiment", "two-digits", "--out", tmp_path / "runs", option, "a.md")
        assert f"{option} is a.md, but `experiment two-digits` does not use it: leave out {option}" in line
    assert not [*tmp_path.iterdir()]
