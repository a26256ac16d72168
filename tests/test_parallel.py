"""Data-parallel and sharded training in two processes computes the same as training in one process."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import COMMAND, ENVIRONMENT, SMALL_CAPSNET, TWO_PROCESSES, train
from torchcaps import BadInput, Routing, create_model
from torchcaps.environment import LAUNCHER, check_variables, first_process, processes
from torchcaps.recipe import Recipe
from torchcaps.training import may_have_unused_parameters
from torchcaps.training_module import TrainingModule

SMALL = {
    "capsnet": {"convolution_channels": 4, "primary_types": 2, "class_pose_size": 4, "decoder": False},
    "matrix-capsnet": {"widths": [4, 2, 3, 3]},
    "pooled-capsnet": {"class_pose_size": 4},
}
GRADIENTS = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchcaps import create_model, margin_loss

torch.set_num_threads(1)
way, out, models = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
rank, world = 0, 1
if way != "alone":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
found = {}
for name, options in models.items():
    torch.manual_seed(0)
    model = create_model(name, image_shape=(1, 18, 18), num_classes=3, **options)
    images, labels = torch.rand(8, 1, 18, 18), torch.arange(8) % 3
    run = model
    if way == "ddp":
        run = DistributedDataParallel(model)
    if way == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    for step in range(2):  # in the second step, the weights are gathered again
        model.zero_grad()
        margin_loss(run(images[rank::world]).scores, labels[rank::world]).backward()
    for path, weights in model.named_parameters():
        gradient = weights.grad
        found[f"{name}.{path}"] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
if rank == 0:
    torch.save(found, out)
if way != "alone":
    dist.barrier()
    os._exit(0)  # a thread of gloo can abort the process while Python shuts down
"""


def gradients(folder: Path, way: str) -> dict[str, torch.Tensor]:
    (folder / "script.py").write_text(GRADIENTS)
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if way != "alone" else []
    words = [sys.executable, *several, folder / "script.py", way, folder / f"{way}.pt", json.dumps(SMALL)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / f"{way}.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_compute_the_same_gradients_as_one(way, tmp_path):
    alone, together = gradients(tmp_path, "alone"), gradients(tmp_path, way)
    assert alone.keys() == together.keys()
    assert {name.partition(".")[0] for name in alone} == set(SMALL)
    for name, gradient in alone.items():
        torch.testing.assert_close(
            together[name], gradient, rtol=1e-3, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}"
        )


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def trained(images: Path, out: Path, agents: list[list[str]], *more: str) -> list[str]:
    """Train in the processes that several agents of torchrun start; return what each agent printed."""
    words = ["-m", "torchcaps.cli", "train", "capsnet-mnist", "--data", str(images), "--out", str(out)]
    words += [*SMALL_CAPSNET, "--epochs", "2", "--batch-size", "8", *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENVIRONMENT}
    started = [subprocess.Popen([*TORCHRUN, *agent, *words], **pipes) for agent in agents]
    printed = []
    for process in started:
        found, error = process.communicate(timeout=280)
        assert process.returncode == 0, error[-3000:]
        printed.append(found)
    return printed


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@TWO_PROCESSES
@pytest.mark.slow
@pytest.mark.parametrize("weight", ["0", "0.0005"])
def test_two_processes_train_with_and_without_reconstruction_loss(command, images, tmp_path, weight):
    settings = ("--set", f"reconstruction_weight={weight}", "--epochs", 1, "--batch-size", 8, "--devices", 2)
    done = train(command, images, tmp_path / "run", *settings)
    assert done.returncode == 0, done.stderr
    assert "find_unused_parameters" not in done.stdout + done.stderr
    assert (tmp_path / "run" / "metrics.json").is_file()


@pytest.mark.parametrize("routing", ["em", "attention"])
@pytest.mark.parametrize("iterations", [1, 2])
def test_processes_search_for_unused_parameters_only_if_there_may_be_some(routing, iterations):
    rule = Routing(routing, iterations=iterations)
    model = create_model("matrix-capsnet", image_shape=(1, 18, 18), num_classes=3, routing=rule, widths=[4, 2, 3, 3])
    recipe = Recipe("own", "matrix-capsnet", "own-images", loss="cross_entropy")
    images, labels = torch.rand(4, 1, 18, 18), torch.arange(4) % 3
    module = TrainingModule(model, recipe, 3)
    assert may_have_unused_parameters(module) == (routing == "attention")
    assert all(part.training for part in model.modules())
    module.loss_of(model(images, labels), images, labels, train=True).backward()
    unused = [name for name, weights in model.named_parameters() if weights.grad is None]
    assert bool(unused) == (routing == "attention")
    assert may_have_unused_parameters(TrainingModule(model, replace(recipe, early_epochs=1, epochs=2), 3))
    assert may_have_unused_parameters(type("OwnLoss", (TrainingModule,), {})(model, recipe, 3))
    model.append = type("Own", (torch.nn.Identity,), {})()
    assert may_have_unused_parameters(module)


def test_the_decoder_is_unused_without_reconstruction_loss():
    model = create_model("capsnet", image_shape=(1, 18, 18), num_classes=3, **{**SMALL["capsnet"], "decoder": True})
    for weight in (0.0, 0.0005):
        recipe = Recipe("own", "capsnet", "own-images", reconstruction_weight=weight)
        assert may_have_unused_parameters(TrainingModule(model, recipe, 3)) == (weight == 0)


def test_processes_and_machines_are_those_of_torchrun(monkeypatch):
    assert processes(3) == (3, 1)
    of_second_machine = {"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
    for name, value in {"TORCHELASTIC_RUN_ID": "run", **of_second_machine}.items():
        monkeypatch.setenv(name, value)
    assert processes(1) == (2, 2)
    assert not first_process()
    check_variables(2)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(BadInput, match="TORCHELASTIC_RUN_ID is set, but LOCAL_WORLD_SIZE= is not a number"):
        processes(1)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK"])
@pytest.mark.parametrize("value", ["1", "2"])
def test_variables_of_a_job_system_do_not_make_a_training_overwrite_a_run(
    name, value, monkeypatch, refused, run, images
):
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    monkeypatch.setenv(name, value)
    assert first_process()
    error = train(refused, images, run, "--epochs", 1, "--batch-size", 2, "--lr", 0.1)
    assert f"the environment variable {name} is set, but torchrun has not started this process" in error
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("value", ["", "abc"])
def test_a_rank_that_is_not_a_number_is_refused(value):
    words = [*COMMAND, "train", "capsnet-mnist-5k", "--dry-run"]
    environment = {**ENVIRONMENT, "RANK": value}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"the environment variable RANK is not a number; got {value!r}: unset RANK" in done.stderr


def test_a_rank_of_0_is_refused_only_if_lightning_would_wait_for_other_processes(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    check_variables(1)
    with pytest.raises(BadInput, match="LOCAL_RANK is set"):
        check_variables(2)
    monkeypatch.setenv(LAUNCHER, str(os.getpid()))  # LOCAL_RANK=0 is then from Lightning, in the first process
    check_variables(2)


@TWO_PROCESSES
@pytest.mark.slow
def test_torchrun_trains_on_one_machine_and_on_two(command, images, tmp_path):
    """This machine plays both machines. The weights must equal those of two processes that Lightning starts."""
    done = train(command, images, tmp_path / "lightning", "--epochs", 2, "--batch-size", 8, "--devices", 2)
    assert done.returncode == 0, done.stderr
    right = weights_of(tmp_path / "lightning")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    machines = [
        ["--nnodes", "2", "--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", port] for rank in "01"
    ]
    for name, agents in (("one", [["--standalone", "--nproc-per-node", "2"]]), ("two", machines)):
        printed = trained(images, tmp_path / name, agents)
        assert "".join(printed).count("epoch 2/2") == 1
        assert weights_of(tmp_path / name).keys() == right.keys()
        assert all(torch.equal(found, right[path]) for path, found in weights_of(tmp_path / name).items())
        assert json.loads((tmp_path / name / "metrics.json").read_text())["test_images"] == 16
    again = trained(images, tmp_path / "one", [["--standalone", "--nproc-per-node", "2"]], "--resume")
    assert "is finished" in again[0]
