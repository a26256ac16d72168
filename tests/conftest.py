import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image

from torchcaps import cli
from warm_python import WarmPython

torch.set_num_threads(1)
pytest_plugins = ["gpu_problems"]
settings.register_profile("house", deadline=None, derandomize=True)  # the same examples in every run
settings.register_profile("search", deadline=None)  # new examples in every run: --hypothesis-profile=search
settings.load_profile("house")


def examples(usual: int, search: int) -> int:
    """Return the number of examples of a test in the usual profile and in the profile `search`."""
    return usual if settings().derandomize else search


COMMAND = [sys.executable, "-m", "torchcaps.cli"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SMALL_CAPSNET = ["--set", "model.convolution_channels=8", "--set", "model.primary_types=2", "--precision", "float32"]
TWO_PROCESSES = pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs")
"""Mark of tests that train in two processes: on a machine with GPUs, each process needs a GPU."""
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read once, when Triton is imported: torch.compile does so too


@pytest.fixture(autouse=True)
def seeded():
    """Set the random seed, so that the random numbers of a test do not depend on the tests that ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def blank_pictures(monkeypatch):
    """Write empty files instead of pictures, for tests that train and look at no picture; drawing takes long."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)


@pytest.fixture
def untyped():
    """Switch off the run-time checks of shapes and types.

    The library's own checks then raise the errors, and tests that call small functions very often take half as long.
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def on_every_instruction_set(compute):
    """Call a function with each instruction set of this processor. Return the results, keyed by the instruction set."""
    from torchcaps.kernels import _cpu, cpu_instruction_sets

    results = {}
    try:
        for name in cpu_instruction_sets():
            _cpu.use(name)
            results[name] = compute()
    finally:
        _cpu.use(cpu_instruction_sets()[0])
    return results


def check_against_reference(run, rtol, atol):
    """Check that `run` gives the same results with both backends. The fused kernels use each instruction set."""
    reference = run(backend="reference")
    for name, fused in on_every_instruction_set(partial(run, backend="fused")).items():
        for found, right in zip(fused, reference, strict=True):
            torch.testing.assert_close(found, right, rtol=rtol, atol=atol, msg=f"{{}} with {name}".format)


def new_python(words, folder=".", timeout=300) -> subprocess.CompletedProcess:
    """Run Python in a process that imports everything itself."""
    words = [sys.executable, *(str(word) for word in words)]
    options = {"cwd": folder, "env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": timeout}
    return subprocess.run(words, **options, check=False)


@pytest.fixture(scope="session")
def python():
    """Return a function that runs Python in its own process, which need not import PyTorch and Lightning again.

    With a GPU, it imports them again, because a copy of a process cannot use the GPU.
    """
    if torch.cuda.is_available():
        yield new_python
    else:
        with WarmPython(ENVIRONMENT) as warm:
            yield warm


@pytest.fixture(scope="session")
def command(python):
    """Return a function that runs `torchcaps` in its own process."""

    def run(*arguments: object) -> subprocess.CompletedProcess:
        return python([*COMMAND[1:], *arguments])

    return run


def make_images(root: Path, per_class: int = 40, size: tuple[int, int] = (20, 24), seed: int = 0) -> Path:
    """Colour images of two classes: bright on the left, bright on the right."""
    random = np.random.default_rng(seed)
    for name, columns in (("left", slice(0, 12)), ("right", slice(12, 24))):
        (root / name).mkdir(parents=True)
        for index in range(per_class):
            pixels = random.integers(0, 60, (*size, 3), dtype=np.uint8)
            pixels[:, columns] += random.integers(100, 190, 3, dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index:03}.png")
    return root


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    return make_images(tmp_path_factory.mktemp("data") / "images")


@pytest.fixture
def call(monkeypatch, capsys):
    """Return a function that runs `torchcaps` in this process and returns exit code, output and error output.

    The estimate before a training measures one step instead of six; `test_estimate.py` tests the estimate itself.
    """

    def run(*arguments):
        if arguments[:1] == ("train",):
            monkeypatch.setattr("torchcaps.estimate.MOST_STEPS", 1)
        monkeypatch.setattr(sys, "argv", ["torchcaps", *(str(argument) for argument in arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        return stop.value.code or 0, printed.out, printed.err

    return run


@pytest.fixture
def succeeds(call):
    """Return a function that runs a command in this process, checks that it succeeds, and returns its output."""

    def run(*arguments):
        code, output, error = call(*arguments)
        assert code == 0, error
        return output

    return run


@pytest.fixture
def refused(call):
    """Return a function that runs a command, checks that it ends with an error of one line, and returns this line."""

    def run(*arguments):
        code, _, error = call(*arguments)
        assert code == 2, error
        assert "Traceback" not in error
        lines = error.strip().splitlines()
        assert len(lines) == 1, error
        assert lines[0].startswith("error: ")
        return lines[0]

    return run


def train(command, images, out, *more):
    return command("train", "capsnet-mnist", "--data", images, "--out", out, *SMALL_CAPSNET, *more)


@pytest.fixture(scope="session")
def finished(command, images, tmp_path_factory):
    """A run of three epochs that was not interrupted: its folder and the finished process with its output."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    done = train(command, images, folder, "--epochs", 3, "--batch-size", 2)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the folder of the run `finished`."""
    return shutil.copytree(finished[0], tmp_path / "run")
