"""Rules for the source code: the layers of modules, the length of files, and the cost of importing the library."""

import ast
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import torchcaps
from torchcaps.models import MODELS

ROOT = Path(torchcaps.__file__).parent
REPOSITORY = Path(__file__).parents[1]
TABLE = re.findall(r"^\| (\d) \| (.*?) \|", (REPOSITORY / "CONTRIBUTING.md").read_text(), re.MULTILINE)
FLOORS = {name: int(layer) for layer, names in TABLE for name in re.findall(r"`(\w+)(?:\.py|/)`", names)}
"""Layer of each module and package, read from the table in CONTRIBUTING.md."""


def test_a_module_imports_only_from_its_own_and_lower_layers():
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
                    missing = {own, parts[1]} - FLOORS.keys()
                    assert not missing, f"add {missing} to the table of layers in CONTRIBUTING.md"
                    assert FLOORS[parts[1]] <= FLOORS[own], f"{path.name} imports {module}"


def test_importing_the_library_does_not_import_heavy_packages():
    def loaded_by(code):
        code = f"import sys, torchcaps; {code}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert "torch" not in loaded_by("pass")
    loaded = loaded_by("torchcaps.CapsuleLayer, torchcaps.CapsNet, torchcaps.EMRouting, torchcaps.Preprocessing")
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
    readers = "import torchcaps.run_report, torchcaps.model_card, torchcaps.export, torchcaps.seen_images"
    readers += ", torchcaps.batches"  # imported by each spawned worker process
    assert not {"lightning", "torchmetrics"} & set(loaded_by(readers))


def test_loading_a_network_does_not_import_the_compiler_of_pytorch():
    code = "import sys, torchcaps; [torchcaps.Classifier.from_pretrained(name) for name in sys.argv[1:]]; "
    code += "print('torch._dynamo' in sys.modules)"
    words = [sys.executable, "-c", code, *sorted((REPOSITORY / "weights").iterdir())]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "False\n"


def test_no_file_is_longer_than_400_lines():
    files = [path for folder in ("src", "tests") for path in (REPOSITORY / folder).rglob("*")]
    lines = {path: len(path.read_text().splitlines()) for path in files if path.suffix in (".py", ".hpp", ".cpp")}
    assert {".py", ".hpp", ".cpp"} == {path.suffix for path in lines}
    assert not [f"{path}: {count}" for path, count in lines.items() if count > 400]


@cache
def words_of(path):
    """Names of classes and strings in a Python file, without docstrings; all words of a C++ file, without pragmas."""
    if path.suffix != ".py":
        return set(re.findall(r"\w+", re.sub("#pragma.*", "", path.read_text())))
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    names = {getattr(node, field, None) or "" for node in nodes for field in ("id", "name", "attr")}
    return {name for name in names if name[:1].isupper()} | {
        node.value for node in nodes if isinstance(node, ast.Constant)
    }


@pytest.mark.parametrize("name", torchcaps.ROUTINGS)
def test_a_rule_is_named_only_in_its_own_file_and_in_the_table_of_rules(name):
    """Benchmarks, experiments, models and recipes may also name the rules of the papers that they reproduce."""
    rule = torchcaps.ROUTINGS[name]
    own = Path(inspect.getfile(rule)).relative_to(ROOT).as_posix()
    places = {own, "__init__.py", "routing/__init__.py", "routing/choice.py"}
    papers = {"benchmarks", "experiments", "models", "recipes"} | (
        {"layers.py"} if name in ("em", "dynamic") else set()
    )
    found = []
    for path in ROOT.rglob("*"):
        place = path.relative_to(ROOT)
        if path.suffix in (".py", ".hpp", ".cpp") and place.as_posix() not in places and place.parts[0] not in papers:
            found += [f"{place}: {word}" for word in {name, rule.__name__} & words_of(path)]
    assert not found, f"move code for the rule {name!r} to its own file; if these words do not mean it, rename the rule"
    assert {name, rule.__name__} <= words_of(ROOT / "routing/choice.py")
    assert f'| `"{name}"` |' in (REPOSITORY / "docs/concepts.md").read_text()


def test_every_exported_name_exists():
    assert all(hasattr(torchcaps, name) for name in torchcaps.__all__)
    assert sorted(torchcaps.__all__) == sorted(torchcaps._MODULE_OF)
    classes = {kind.__name__ for kind in (*torchcaps.ROUTINGS.values(), *MODELS.values())}
    assert not classes - set(torchcaps.__all__), "add these classes to src/torchcaps/__init__.py and docs/api.md"
    reference = set(re.findall(r":: torchcaps\.(\w+)\n", (REPOSITORY / "docs" / "api.md").read_text()))
    assert not set(torchcaps.__all__) - reference
