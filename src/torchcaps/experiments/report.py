"""Write the tables of the README and of the documentation from the files in results/."""

import csv
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from torchcaps.data.files import atomically, read_json
from torchcaps.errors import BadInput, nearest, unreadable
from torchcaps.experiments import Experiment
from torchcaps.experiments.study import BUDGETS, Row
from torchcaps.options import fits

Entry = Mapping[str, Any]
EAGER, COMPILED = "materialised votes", "materialised votes, compiled"
NETWORKS = ("capsules", "uniform", "cnn")
AGAIN = "run the experiment, the training or the benchmark that writes it again"
PREFACE = (
    "`torchcaps experiment report` writes this page from the files in results/.",
    "",
    "Percentages are test accuracies unless the row says otherwise. The column *paper* gives the value that the "
    "cited paper reports, if any. *Capsules* means the network with routing. *Uniform couplings* means the same "
    "network with one routing iteration, in which every child couples equally to all its parents. T is the number of "
    "routing iterations.",
)
MARKED = re.compile(r"(<!-- table: ([^\n]+?) -->\n)(?:(?!<!-- table: ).)*?(<!-- end of table -->)", re.DOTALL)


def write_pages(results: Path, pages: Sequence[Path]) -> None:
    """Write the tables of Markdown pages, each between ``<!-- table: NAME -->`` and ``<!-- end of table -->``.

    NAME is a key of ``tables.toml``, or the name of a benchmark's .csv file in `results`.

    Arguments:
        results: folder that contains the results and ``tables.toml``.
        pages: Markdown files to update.

    Raises:
        BadInput: a page, ``tables.toml`` or a result is missing; a page contains no table; or the name of a table or of
            a result row is unknown.
    """
    path = results / "tables.toml"
    if not path.is_file():
        raise BadInput(f"{path} is missing: give the folder that contains tables.toml with --results")
    entries = _toml(path)
    written = {}
    for page in pages:
        if not page.is_file():
            raise BadInput(f"{page} is missing: give an existing page with --page")
        try:
            text = page.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise unreadable(page, error, "save it as UTF-8") from error
        begun = text.count("<!-- table: ")
        text, count = MARKED.subn(
            lambda found: "\n".join([found[1], *_table(found[2], entries, results), "", found[3]]), text
        )
        if not count:
            raise BadInput(f"{page} contains no table: add <!-- table: NAME --> and <!-- end of table --> to it")
        if count != begun:
            lack = f"{begun - count} of {begun} tables in {page} lack <!-- end of table -->"
            raise BadInput(f"{lack}: add it after each table")
        written[page] = text
    for page, text in written.items():
        with atomically(page) as stream:
            stream.write(text.encode())


def _table(name: str, entries: Mapping[str, list[Entry]], results: Path) -> list[str]:
    if name.endswith(".csv"):
        with _complete(results / name):
            return _benchmark(_rows(results / name))
    if name not in entries:
        raise BadInput(f"unknown table {name!r}{nearest(name, [*entries, *(p.name for p in results.glob('*.csv'))])}")
    return TABLES[name](entries[name], results)


def _toml(path: Path) -> dict[str, list[Entry]]:
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not valid TOML ({error}): correct the file") from error
    if unknown := entries.keys() - TABLES:
        raise BadInput(f"unknown table {min(unknown)!r} in {path}{nearest(min(unknown), TABLES)}")
    for name, table in entries.items():
        if not isinstance(table, list) or not all(isinstance(entry, dict) for entry in table):
            raise BadInput(f"{name} in {path} is not a list of entries: begin each entry with [[{name}]]")
        for entry in table:
            required = (*REQUIRED[name], *(("result", "row") if name == "highlights" and "runs" not in entry else ()))
            if missing := [key for key in required if key not in entry]:
                raise BadInput(f"an entry of [[{name}]] in {path} lacks {missing[0]!r}: add it")
            if "what" in entry and not isinstance(entry["what"], str):
                raise BadInput(
                    f"what in [[{name}]] of {path} must be text; got {entry['what']!r}: put it in quotation marks"
                )
            if "runs" in entry and not (entry["runs"] and fits(entry["runs"], str | list[str | list[str]])):
                raise BadInput(f"runs of {entry['what']!r} in {path} must be a list of runs; got {entry['runs']!r}")
    rendered = {entry["what"]: entry["runs"] for entry in entries.get("renderings", [])}
    for entry in entries.get("highlights", []):
        for key in entry.keys() & {"runs", "cnn_runs"}:
            if isinstance(name := entry[key], str) and name not in rendered:
                raise BadInput(f"no entry of [[renderings]] in {path} has what={name!r}{nearest(name, rendered)}")
            entry[key] = rendered[name] if isinstance(name, str) else name
    return entries


def _lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def _json(path: Path) -> Any:
    if not path.is_file():
        raise BadInput(f"{path} is missing: first run the experiment or the training that writes it")
    return read_json(path, AGAIN)


@contextmanager
def _complete(path: Path) -> Iterator[None]:
    """Raise `BadInput` with the name of the result file if an entry is missing or invalid."""
    try:
        yield
    except BadInput:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise unreadable(path, error, AGAIN) from error


def _accuracies(runs: Sequence[str | Sequence[str]], results: Path) -> list[float]:
    """Return the test accuracy of each run. An element that is a list of runs gives the mean over these runs."""
    return [_tested(results / run) if isinstance(run, str) else fmean(_accuracies(run, results)) for run in runs]


def _tested(run: Path) -> float:
    """Return the test accuracy of the run in a folder."""
    path = run / "metrics.json"
    metrics = _json(path)
    with _complete(path):
        return float(metrics["test_accuracy_percent"])


def _accuracy(runs: Sequence[str | Sequence[str]], results: Path) -> str:
    """Return the mean and standard deviation of the test accuracy over the elements of `runs`."""
    return Row("", _accuracies(runs, results), unit="").measured()


def _rows_of(said: Mapping[str, Any]) -> list[Row]:
    rows = [Row(**values) for values in said["rows"]]
    for row in rows:
        if not row.ours or not all(type(value) in (int, float) for value in row.ours):
            raise ValueError(f"the values of row {row.what!r} are {row.ours}")
    return rows


def _row(entry: Entry, what: str, results: Path) -> Row:
    """Return the row named `what` from the result file, ``RESULT.json``, of an entry."""
    path = results / f"{entry['result']}.json"
    said = _json(path)
    with _complete(path):
        found = {row.what: row for row in _rows_of(said)}
    if what not in found:
        raise BadInput(f"{entry['result']}.json contains no row {what!r}{nearest(what, found)}")
    return found[what]._replace(unit="")


def _networks(entries: Sequence[Entry], results: Path) -> list[str]:
    return _lines(
        ("network and data", "paper", "ours", "command", "run"),
        [
            (
                entry["what"],
                entry.get("paper", "–"),
                _accuracy(entry["runs"], results),
                f"`{entry['command']}`",
                f"`{entry['runs'][0]}`" + (f" to {len(entry['runs']) - 1}" if len(entry["runs"]) > 1 else ""),
            )
            for entry in entries
        ],
    )


def _renderings(entries: Sequence[Entry], results: Path) -> list[str]:
    """Return a table with one column per rendering of the toys. Each element of `runs` has the runs on a rendering."""
    columns = [[_render_seed(results / runs[0] / "recipe.json") for runs in entry["runs"]] for entry in entries]
    if any(column != columns[0] for column in columns):
        raise BadInput(
            "every entry of a table of renderings in tables.toml must list runs with the same values of "
            f"data.render_seed, in the same order; got {columns}"
        )
    return _lines(
        ("network", *(f"rendering {number}" for number in columns[0]), "mean", "command"),
        [
            (
                entry["what"],
                *(_accuracy(runs, results) for runs in entry["runs"]),
                _accuracy(entry["runs"], results),
                f"`{entry['command']}`",
            )
            for entry in entries
        ],
    )


def _render_seed(path: Path) -> int:
    recipe = _json(path)
    with _complete(path):
        return recipe["recipe"]["data_options"]["render_seed"]


def _experiments(entries: Sequence[Entry], results: Path) -> list[str]:
    rows = []
    for entry in entries:
        cells = []
        for network in NETWORKS:
            row = _row(entry, entry[network], results) if network in entry else None
            cells.append("–" if row is None else f"{row.measured()} ({row.paper})" if row.paper else row.measured())
        rows.append((entry["what"], *cells, f"`{entry['command']}`"))
    return _lines(("experiment", "capsules", "uniform couplings", "CNN", "command"), rows)


def _highlights(entries: Sequence[Entry], results: Path) -> list[str]:
    rows = []
    for entry in entries:
        if "runs" in entry:
            paper, ours = entry.get("paper"), _accuracy(entry["runs"], results)
            cnn = _accuracy(entry["cnn_runs"], results) if "cnn_runs" in entry else None
        else:
            row = _row(entry, entry["row"], results)
            paper, ours = row.paper, row.measured()
            cnn = _row(entry, entry["cnn"], results).measured() if "cnn" in entry else None
        rows.append((entry["what"], paper or "–", ours, cnn or "–"))
    return _lines(("test accuracy, %", "paper", "ours", "CNN (ours)"), rows)


def _speed(entries: Sequence[Entry], results: Path) -> list[str]:
    rows = []
    for entry in entries:
        with _complete(results / entry["file"]):
            rows.append(_speed_of(entry, _rows(results / entry["file"])))
    return _lines(("", "torchcaps", "eager PyTorch", "`torch.compile`"), rows)


def _speed_of(entry: Entry, measured: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    column, unit = ("peak MiB", "MiB") if "value" in entry else ("median ms", "ms")
    found = {
        row["implementation"]: float(row[column])
        for row in measured
        if row["case"] == entry["case"] and row.get("value") == entry.get("value")
    }
    if "fused" not in found or not (eager := found.get(EAGER) or found.get("reference")):
        value = f" and value {entry['value']!r}" if "value" in entry else ""
        raise BadInput(
            f"{entry['file']} must have two rows for case {entry['case']!r}{value}: one with implementation "
            f"'fused', and one with {EAGER!r} or 'reference'; at least one is missing: correct the entry in "
            "results/tables.toml"
        )
    ratios = [value and value / found["fused"] for value in (eager, found.get(COMPILED))]
    slower = [f"{ratio:.{0 if ratio > 10 else 1}f}×" if ratio else "–" for ratio in ratios]
    return entry["what"], f"{found['fused']:.0f} {unit}", *slower


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise BadInput(f"{path} is missing: first run `make bench`")
    with path.open(newline="", encoding="utf-8") as stream:
        rows = [*csv.DictReader(stream)]
    if not rows:
        raise BadInput(f"{path} has no rows: run `make bench` again")
    return rows


HEADINGS = {"10 % ms": "p10 ms", "90 % ms": "p90 ms", "ratio": "time / fused"}
"""Headings of columns of the benchmark files in the tables."""


def _benchmark(rows: Sequence[Mapping[str, str]]) -> list[str]:
    hidden = ("heap", "command", "seed", "torch", "commit", "processor", "threads", "gpu", "repeats", "peak GFLOP/s")
    shown = [key for key in rows[0] if key not in hidden]
    here = rows[0]
    cores = f"{here['gpu'] or here['processor']}, threads: {here['threads']}, torch {here['torch']}"
    return [
        *_lines([HEADINGS.get(key, key) for key in shown], [[row[key] for key in shown] for row in rows]),
        "",
        f"`{here['command']}`; {cores}; commit {here['commit'][:8]}.",
    ]


TABLES: dict[str, Callable[[Sequence[Entry], Path], list[str]]] = {
    "networks": _networks,
    "reduced": _networks,
    "renderings": _renderings,
    "longer_renderings": _renderings,
    "experiments": _experiments,
    "highlights": _highlights,
    "speed": _speed,
}


OF_RUNS = ("what", "runs", "command")
REQUIRED: dict[str, tuple[str, ...]] = {
    "networks": OF_RUNS,
    "reduced": OF_RUNS,
    "renderings": OF_RUNS,
    "longer_renderings": OF_RUNS,
    "experiments": ("what", "command", "result"),
    "highlights": ("what",),
    "speed": ("what", "file", "case"),
}
"""For each table, the keys that every entry in ``tables.toml`` must have."""


def _device(environment: Mapping[str, Any]) -> str:
    """Return the GPU as text, or the processor if there is no GPU; all of them if there are several machines."""
    gpus = environment["gpu"] if isinstance(environment["gpu"], list) else [environment["gpu"]]
    return " and ".join([gpu for gpu in gpus if gpu] + ([_joined(environment["processor"])] if None in gpus else []))


def _joined(value: Any) -> str:
    """Return a value of the environment as text; a list contains the values of several runs."""
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value)


def write_report(results: Path, report: Path, experiments: Mapping[str, Experiment]) -> int:
    """Write a page with all rows, notes and figures of the experiments' results.

    For each experiment and dataset, the page shows the result with the largest budget. If several results have this
    budget, the page shows the one with the most seeds.

    Arguments:
        results: folder of the results.
        report: page to write.
        experiments: experiments by name. The page lists them in this order.

    Returns:
        Number of results on the page.

    Raises:
        BadInput: `results` contains no result of an experiment, or a result lacks an entry or has an invalid one.
    """
    lines = ["# All experiments", "", *PREFACE, ""]
    best: dict[tuple[int, str], tuple[tuple[int, int], Path, dict[str, Any]]] = {}
    for path in sorted(results.glob("*.json")):
        said = _json(path)
        if isinstance(said, dict) and str(said.get("experiment")) in experiments:
            with _complete(path):
                if said["budget"] not in BUDGETS:
                    raise ValueError(f"unknown budget {said['budget']!r}")
                rank = (BUDGETS.index(said["budget"]), said["seeds"])
                key = ([*experiments].index(said["experiment"]), said["data"] or "")
                best[key] = max(best.get(key, (rank, path, said)), (rank, path, said), key=lambda one: one[0])
    for _, (_, path, said) in sorted(best.items(), key=lambda one: one[0]):
        picture = quote(Path(os.path.relpath(path.with_suffix(".png"), report.parent)).as_posix())
        with _complete(path):
            lines += _section(said, experiments[said["experiment"]], picture)
    if not best:
        raise BadInput(f"{results} contains no result: first run `torchcaps experiment NAME`, or change --results")
    report.parent.mkdir(parents=True, exist_ok=True)
    with atomically(report) as stream:
        stream.write("\n".join(lines).encode())
    return len(best)


def _section(said: Mapping[str, Any], experiment: Experiment, picture: str) -> list[str]:
    """Return the lines of the page for one result, whose figure has the relative path `picture`."""
    here = said["environment"]
    table = [(row.what, row.paper or "–", row.measured()) for row in _rows_of(said)]
    seeds = "seed 0" if said["seeds"] == 1 else f"seeds 0 to {said['seeds'] - 1}"
    only = ", the figure shows seed 0" if said["seeds"] > 1 and experiment.draws_seed_0 else ""
    machine = (
        f"{seeds}{only}; {said['training_minutes']} minutes of training; {_device(here)}, "
        f"threads: {_joined(here['threads'])}, torch {_joined(here['versions']['torch'])}, "
        f"{_joined(here['precision'])}; {'commit' if len(here['commits']) == 1 else 'commits'} "
    )
    lines = [f"## {said['experiment']}: {experiment.title}", "", f"{experiment.paper}. `{said['command']}`", ""]
    lines += [*_lines(("measurement", "paper", "ours"), table), "", *(f"{note}\n" for note in said["notes"])]
    return [*lines, f"{machine}{', '.join(here['commits'])}.", "", f"![{experiment.title}]({picture})", ""]
