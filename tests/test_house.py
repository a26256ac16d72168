"""The rules of the house: floors, imports, and how little importing the library costs."""

import ast
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torchcaps
from torchcaps.recipes import create_recipe

ROOT = Path(torchcaps.__file__).parent
FLOORS = {
    "errors": 0,
    "options": 0,
    "checks": 0,
    "capsules": 0,
    "routing_map": 0,
    "kernels": 0,
    "routing": 1,
    "convolution": 2,
    "decoder": 2,
    "layers": 2,
    "testing": 2,
    "losses": 2,
    "models": 3,
    "data": 3,
    "checkpoints": 4,
    "classifier": 4,
    "confusion": 4,
    "environment": 4,
    "pictures": 4,
    "recipe": 4,
    "run_folder": 4,
    "training": 4,
    "training_module": 4,
    "recipes": 5,
    "benchmarks": 6,
    "experiments": 6,
    "cli": 7,
}


def test_a_lower_floor_imports_nothing_above_it():
    for path in ROOT.rglob("*.py"):
        own = path.relative_to(ROOT).with_suffix("").parts[0]
        if own == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                parts = module.split(".")
                if parts[0] == "torchcaps" and len(parts) > 1:
                    assert FLOORS[parts[1]] <= FLOORS[own], f"{path.name} imports {module}"


def test_importing_the_library_loads_nothing_heavy():
    def loaded_by(code):
        code = f"import sys, torchcaps; {code}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert "torch" not in loaded_by("pass")
    loaded = loaded_by("torchcaps.CapsuleLayer, torchcaps.CapsNet, torchcaps.EMRouting, torchcaps.Preparation")
    assert "torch" in loaded
    assert not {
        "lightning",
        "matplotlib",
        "torchmetrics",
        "rich",
        "typer",
        "PIL",
        "mlxtend",
        "triton",
        "huggingface_hub",
    } & set(loaded)


def test_no_file_is_longer_than_the_house_allows():
    for path in ROOT.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path


def test_what_is_exported_is_there():
    assert all(hasattr(torchcaps, name) for name in torchcaps.__all__)
    assert sorted(torchcaps.__all__) == sorted(torchcaps._MODULE_OF)


def test_every_result_in_the_readme_is_the_one_in_its_folder():
    root = Path(__file__).parents[1]
    rows = [line for line in (root / "README.md").read_text().splitlines() if "[run](results/" in line]
    assert rows
    for row in rows:
        folder = root / row.split("[run](")[1].split(")")[0]
        metrics = json.loads((folder / "metrics.json").read_text())
        recipe = json.loads((folder / "recipe.json").read_text())
        assert f" {metrics['test_accuracy_percent']:.2f} " in row
        assert recipe["environment"]["commit"]
        assert not recipe["environment"]["commit"].endswith("-modified")
        _, _, name, *words = row.split("`")[1].replace("make demo", "torchcaps train capsnet-mnist-5k").split()
        settings = dict(
            value.split("=") if key == "--set" else (key[2:].replace("-", "_"), value)
            for key, value in zip(words[::2], words[1::2], strict=True)
        )
        now = json.loads(json.dumps(asdict(create_recipe(name, settings))))
        then = {**recipe["recipe"], "precision": now["precision"]}  # auto depends on the machine
        assert then == {key: now[key] for key in then}, row
