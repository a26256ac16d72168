"""The code, links, tables and commands on the pages of the documentation."""

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from conftest import SMALL_CAPSNET, new_python
from torchcaps.experiments import EXPERIMENTS
from torchcaps.experiments.capsnet_table1 import WIDER
from torchcaps.experiments.report import write_pages, write_report
from torchcaps.experiments.study import Study
from torchcaps.models import create_model, routing_of
from torchcaps.recipes import OWN_IMAGES, RECIPES, create_recipe

ROOT = Path(__file__).parents[1]
DATASET_NAMES = {"CIFAR-10": "cifar-10", "CIFAR-100": "cifar-100", "SVHN": "svhn", "smallNORB": "smallnorb"}
BLOCKS = {
    page: re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}


@pytest.mark.parametrize("page", [page for page, blocks in BLOCKS.items() if blocks], ids=lambda page: page.name)
def test_every_python_block_of_a_page_runs(page, python, tmp_path):
    """The blocks of a page run one after another in one new process, because torch.compile cannot trace type checks."""
    (tmp_path / "weights").symlink_to(ROOT / "weights")
    run = new_python if page.name == "README.md" else python
    done = run(["-c", "\n".join(BLOCKS[page])], tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_script_for_an_own_rule_trains_and_evaluates_a_run(python, refused, images, tmp_path):
    page = ROOT / "docs" / "write-your-own-rule.md"
    rule, _, _, named, *_ = BLOCKS[page]
    (tmp_path / "soft_k_means.py").write_text(rule + named)
    (tmp_path / "own.py").write_text(re.search(r"```py\n(.*?)```", page.read_text(), re.DOTALL)[1])
    training, evaluation = re.findall(r"^python (own.py .*)", page.read_text(), re.MULTILINE)
    run = tmp_path / "runs" / "own"
    for words in (f"{training} --data {images} {shlex.join(SMALL_CAPSNET)} --epochs 1", evaluation):
        done = python(shlex.split(words), tmp_path)
        assert done.returncode == 0, done.stderr
    assert json.loads((run / "recipe.json").read_text())["recipe"]["routing_options"] == {"iterations": 2}
    assert "is 'soft_k_means', which is not in torchcaps.ROUTINGS: import the module" in refused("evaluate", run)


def test_the_factors_on_a_gpu_equal_the_stored_results():
    page, times = (ROOT / "docs" / "benchmarks.md").read_text(), {}
    for name in ("routing", "rules"):
        with (ROOT / "results" / f"bench-{name}-gpu.csv").open() as file:
            for row in csv.DictReader(file):
                times[row["case"].split(",")[0], row["case"].split(", ")[-1], row["implementation"]] = row["median ms"]
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \(([\d.]+)\) \| ([\d.]+) \(([\d.]+)\) \|$", page, re.MULTILINE)
    assert len(rows) == 6
    for rule, *factors in rows:
        of = {way: float(x) for (one, what, way), x in times.items() if (one, what) == (rule, "forward and backward")}
        slower = [of["materialised votes"], of["materialised votes, compiled"]]
        right = [time / of[way] for time in slower for way in ("fused", "fused, CUDA graph")]
        assert [float(x) for x in factors] == [float(f"{x:.{2 if x < 1 else 1}f}") for x in right]


def test_the_readme_has_the_times_of_the_published_implementations():
    with (ROOT / "results" / "bench-published-warm.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["case"].endswith("forward and backward")]
    slower = [float(row["ratio"]) for row in rows if row["implementation"] != "fused"]
    assert len(slower) == 6
    sentence = f"forward and backward take {min(slower):.0f} to {max(slower):.0f} times as long."
    assert sentence in " ".join((ROOT / "README.md").read_text().split())


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(p.name for p in (ROOT / "docs").glob("*.md"))])
def test_every_link_to_a_file_leads_to_an_existing_file(page):
    path = next(each for each in (ROOT / page, ROOT / "docs" / page) if each.exists())
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert "://" in link or (path.parent / link).exists(), link


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_bytes()) <= 5_000


PAGES_WITH_TABLES = ("README.md", "docs/results.md", "docs/benchmarks.md")


def test_tables_of_the_pages_equal_the_stored_results(tmp_path):
    pages = []
    for name in PAGES_WITH_TABLES:
        pages.append(tmp_path / Path(name).name)
        shutil.copy(ROOT / name, pages[-1])
    write_pages(ROOT / "results", pages)
    for name, page in zip(PAGES_WITH_TABLES, pages, strict=True):
        assert page.read_text() == (ROOT / name).read_text(), f"{name}: run `make tables`"


def test_the_page_of_all_experiments_equals_the_stored_results(tmp_path):
    (tmp_path / "results").mkdir()
    for path in (ROOT / "results").glob("*.json"):
        shutil.copy(path, tmp_path / "results")
    write_report(tmp_path / "results", tmp_path / "docs/experiments.md", EXPERIMENTS)
    page = (ROOT / "docs/experiments.md").read_text()
    assert (tmp_path / "docs/experiments.md").read_text() == page, "run `make tables`"


ENTRIES = tomllib.loads((ROOT / "results/tables.toml").read_text())


COMMANDS = [
    *((entry["command"], entry["runs"]) for entry in [*ENTRIES["networks"], *ENTRIES["reduced"]]),
    *(
        (entry["command"].replace("RENDERING", re.search(r"render(\d+)", runs[0])[1]), runs)
        for entry in [*ENTRIES["renderings"], *ENTRIES["longer_renderings"]]
        for runs in entry["runs"]
    ),
]


@pytest.mark.parametrize(("command", "runs"), COMMANDS, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_the_command_of_a_result_gives_the_recipe_stored_in_its_folder(command, runs):
    command = command.replace("make demo", "torchcaps train capsnet-mnist-5k")
    _, _, name, *words = shlex.split(command)
    settings = dict(
        value.split("=") if key == "--set" else (key[2:].replace("-", "_"), value)
        for key, value in zip(words[::2], words[1::2], strict=True)
    )
    now = json.loads(json.dumps(asdict(create_recipe(name, settings))))
    for seed, run in enumerate(runs):
        recipe = json.loads((ROOT / "results" / run / "recipe.json").read_text())
        assert recipe["environment"]["commit"]
        assert not recipe["environment"]["commit"].endswith("-modified")
        expected = {**now, "seed": seed} if len(runs) > 1 else now
        if now["precision"] == "auto":  # depends on the machine
            assert recipe["recipe"]["precision"] == ("float32" if "5k" in name else "bf16")
            expected = {**expected, "precision": recipe["recipe"]["precision"]}
        assert recipe["recipe"] == {key: expected[key] for key in recipe["recipe"]}


def test_every_run_in_the_readme_is_also_on_the_page_results():
    shown = {run for entry in ENTRIES["networks"] for run in entry["runs"]}
    shown |= {entry["what"] for entry in ENTRIES["renderings"]}
    shown |= {run for entry in ENTRIES["longer_renderings"] for runs in entry["runs"] for run in runs}
    for entry in ENTRIES["highlights"]:
        for runs in [entry[key] for key in ("runs", "cnn_runs") if key in entry]:
            for group in [runs] if isinstance(runs, str) else runs:  # a run, or the runs on a rendering
                assert {group} <= shown if isinstance(group, str) else set(group) <= shown


def test_the_table_of_weights_agrees_with_the_model_cards():
    page, folders = (ROOT / "docs" / "own-images.md").read_text(), sorted((ROOT / "weights").iterdir())
    rows = dict(re.findall(r"^\| `weights/([\w-]+)` \| (.*) \|$", page, re.MULTILINE))
    assert sorted(rows) == [folder.name for folder in folders]
    for folder in folders:
        card = (folder / "README.md").read_text()
        parameters, accuracy = re.search(r"([\d,]+) parameters", card), re.search(r"accuracy \| ([\d.]+ %)", card)
        assert rows[folder.name].endswith(f"| {parameters[1]} | {accuracy[1]}")


def test_the_page_on_papers_names_the_recipes_without_a_stored_run():
    page = (ROOT / "docs" / "reproduce.md").read_text()
    stored = {json.loads(path.read_text())["recipe"]["name"] for path in (ROOT / "results").glob("*/recipe.json")}
    without = [name for name, make in RECIPES.items() if name not in stored and make().data != OWN_IMAGES]
    said = re.search(r"No recipe for (.*?) has a stored\srun, and neither have (.*?):", page, re.DOTALL)
    datasets = {DATASET_NAMES[name] for name in re.split(", | or ", said[1])}
    assert all(RECIPES[name]().data in datasets or f"`{name}`" in said[2] for name in without)
    assert not [name for name in stored if RECIPES[name]().data in datasets or f"`{name}`" in said[2]]


def test_the_site_is_built_without_a_warning(tmp_path):
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in ("api", "gradients"):  # formulas are MathML, which needs no script
        text = (tmp_path / f"{page}.html").read_text()
        assert "<msub>" in text
        assert "squash(Σ" not in text
        assert "aligned" not in text


def parameters_in_millions(recipe, image_shape, classes):
    shape = recipe.preprocessing().image_shape(image_shape)
    rule = routing_of(recipe.model, recipe.model_options, recipe.routing_options)
    options = {**recipe.model_options, "image_shape": shape, "num_classes": classes}
    with torch.device("meta"):
        model = create_model(recipe.model, **(options if rule is None else {**options, "routing": rule}))
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


def test_the_table_of_the_networks_in_experiments_has_the_right_numbers_of_parameters(tmp_path):
    study = Study("standard", None, 1, tmp_path, tmp_path)
    size, networks = {"images": 21_870, "epochs": 3}, ("CNN", "capsules")

    def digits(recipe_of, side):
        recipes = [recipe_of(name, 0, data="mnist", shift=0, **size) for name in networks]
        return [parameters_in_millions(recipe, (1, side, side), 10) for recipe in recipes]

    def toys(recipe_of):
        return [parameters_in_millions(recipe_of(name, 0, **size), (2, 48, 48), 5) for name in networks]

    def own(names, image_shape, classes):
        return [parameters_in_millions(create_recipe(f"{name}-images"), image_shape, classes) for name in names]

    table1 = [
        study.digit_recipe(name, 0, data="mnist", shift=2, **size, **options)
        for name, options in (("CNN", {}), ("capsules", {**WIDER, "decoder": False}), ("capsules", WIDER))
    ]
    few = ("cnn", "matrix-capsnet", "residual-capsnet")
    assert own(["variational-capsnet"], (2, 48, 48), 5) == own(["matrix-capsnet"], (2, 48, 48), 5)
    expected = {
        "affnist": digits(study.digit_recipe, 40),
        "affnist-recent": digits(study.recent_digit_recipe, 40),
        "multimnist": digits(study.digit_recipe, 36),
        "multimnist-recent": digits(study.recent_digit_recipe, 36),
        "capsnet-table1": [parameters_in_millions(recipe, (1, 28, 28), 10) for recipe in table1],
        "novel-viewpoints`, `adversarial": toys(study.toy_recipe),
        "novel-viewpoints-recent`, `adversarial-recent`, `recipe-ablation": toys(study.recent_toy_recipe),
        "own-images`, toys": own(few, (2, 48, 48), 5),
        "own-images`, Fashion-MNIST": own((*few, "capsnet"), (1, 28, 28), 10),
    }
    page = (ROOT / "docs/results.md").read_text()
    table = page.partition("| experiment | CNN | capsule network |\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert len(table) == len(expected)
    for row, (experiment, numbers) in zip(table, expected.items(), strict=True):
        assert row.strip("| `").startswith(experiment)
        shown = re.findall(r"\d+\.\d+", row)
        assert shown == [
            f"{number:.{len(text.partition('.')[2])}f}" for number, text in zip(numbers, shown, strict=True)
        ]
