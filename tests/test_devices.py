"""Settings of PyTorch, devices and GPU memory during training and evaluation, as far as a CPU can show them."""

import copy
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._inductor import config
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

from conftest import SMALL_CAPSNET
from test_run_folder import SPLITS, tiny
from torchcaps import BadInput, Capsules, ClassCaps, Classifier, PooledCNN, Preprocessing, kernels, margin_loss
from torchcaps.batches import Batches, ImageBatches
from torchcaps.capsules import check_labels
from torchcaps.constant import Constant
from torchcaps.devices import clear_memory_errors, reproducible
from torchcaps.evaluation import evaluate
from torchcaps.training import fit
from torchcaps.training_module import TrainingModule

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("blank_pictures")]


def settings():
    return (
        torch.get_deterministic_debug_mode(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        getattr(config, "deterministic", None),
    )


def test_the_settings_are_restored_when_the_last_of_several_trainings_ends():
    before, first, second = settings(), reproducible(), reproducible()
    first.__enter__()
    during = settings()
    second.__enter__()
    first.__exit__(None, None, None)
    assert settings() == during != before
    second.__exit__(None, None, None)
    assert settings() == before


@pytest.mark.parametrize("fails", [False, True])
def test_training_is_deterministic_and_restores_the_settings_of_pytorch(fails, tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before, random, seen = settings(), torch.get_rng_state(), []

    def look(*_):
        seen.append((*settings()[:3], os.environ["CUBLAS_WORKSPACE_CONFIG"]))
        if fails and len(seen) == 2:
            raise ValueError("stop")

    options = {"on_start": look, "on_epoch_end": lambda model: look()}
    if fails:
        with pytest.raises(ValueError, match="stop"):
            fit(tiny(1), SPLITS, tmp_path / "run", **options)
    else:
        fit(tiny(1), SPLITS, tmp_path / "run", **options)
    assert seen == 2 * [(1, False, False, ":4096:8")]
    assert settings() == before
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(("precision", "fast"), [("bf16", False), ("bf16", True), ("float32", False)])
def test_training_in_bf16_says_so_if_float32_is_faster(precision, fast, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: fast)
    fit(tiny(1, precision=precision), SPLITS, tmp_path / "run", logger="none")
    slow = precision == "bf16" and not fast
    assert ("bf16 is slower than float32 on this hardware" in capsys.readouterr().out) == slow
    fit(tiny(1, precision=precision), SPLITS, tmp_path / "run", logger="none", resume=True)
    assert "slower" not in capsys.readouterr().out


PROCESS_GROUP = """
import atexit, sys
from pathlib import Path
from torch import distributed
atexit.register(lambda: print("open" if distributed.is_initialized() else "closed"))  # runs last
from test_run_folder import SPLITS, tiny
from torchcaps.training import fit
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
fit(tiny(1), SPLITS, Path(sys.argv[1]) / "first", logger="none")
assert distributed.is_initialized()  # for the next training
logger = sys.argv[2]
fit(tiny(1), SPLITS, Path(sys.argv[1]) / "second", logger=logger)
"""


@pytest.mark.parametrize(
    ("logger", "at_exit", "error"),
    [("none", "closed", ""), pytest.param("wrong", "open", "logger must be one", marks=pytest.mark.slow)],
)
def test_the_process_group_is_closed_at_exit_unless_the_last_training_failed(logger, at_exit, error, python, tmp_path):
    done = python(["-c", PROCESS_GROUP, tmp_path, logger], Path(__file__).parent)
    assert done.stdout.split()[-1] == at_exit, done.stderr
    assert done.returncode == bool(error)
    assert error in done.stderr


class Nondeterministic(TrainingModule):
    def loss_and_scores(self, images, labels, train):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))  # has no deterministic implementation on any device
        return super().loss_and_scores(images, labels, train)


def test_an_operation_that_is_not_deterministic_causes_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
        fit(tiny(1), SPLITS, tmp_path / "run", module_class=Nondeterministic)


def test_the_users_strict_setting_is_kept(tmp_path):
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            fit(tiny(1), SPLITS, tmp_path / "run", module_class=Nondeterministic)
        assert torch.get_deterministic_debug_mode() == 2
    finally:
        torch.use_deterministic_algorithms(False)


def test_attention_is_deterministic_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "cudnn_sdp_enabled")
    before = [getattr(torch.backends.cuda, name)() for name in names]
    with reproducible():
        assert not any(getattr(torch.backends.cuda, name)() for name in names)
    assert [getattr(torch.backends.cuda, name)() for name in names] == before
    assert any(before)


def test_the_command_shows_the_warning_of_an_operation_that_is_not_deterministic_once(call, monkeypatch):
    def info():
        torch.use_deterministic_algorithms(True, warn_only=True)
        for _ in range(2):
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
        torch.use_deterministic_algorithms(False)
        return {"versions": {}}

    monkeypatch.setattr("torchcaps.environment.environment", info)
    code, _, error = call("info")
    assert code == 0
    assert error.startswith("warning: put_ does not have a deterministic implementation")
    assert error.count("warning: ") == 1


def test_more_devices_than_gpus_are_refused_before_anything_is_written(refused, images, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    words = ("train", "capsnet-mnist", "--data", images, "--out", tmp_path / "run", "--batch-size", 8, "--devices", 2)
    assert "devices must be at most 1, the number of GPUs of this machine; got 2" in refused(*words)
    assert not (tmp_path / "run").exists()


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")


CURE = "the memory of the GPU ran out: use smaller batches"


def test_memory_of_the_gpu_that_runs_out_in_the_training_is_one_line(refused, images, tmp_path, monkeypatch):
    words = ("train", "capsnet-mnist", "--data", images, "--epochs", 1, *SMALL_CAPSNET, "--out", tmp_path / "run")
    monkeypatch.setattr("torchcaps.estimate._Steps.train", out_of_memory)
    assert CURE in refused(*words, "--dry-run")
    monkeypatch.setattr("torchcaps.estimate.print_estimate", lambda *_, **__: None)
    monkeypatch.setattr(TrainingModule, "training_step", out_of_memory)
    assert CURE in refused(*words)


def test_memory_of_the_gpu_that_runs_out_in_a_prediction_is_one_line(monkeypatch):
    network = PooledCNN((1, 28, 28), 10)
    monkeypatch.setattr(PooledCNN, "forward", out_of_memory)
    with pytest.raises(BadInput, match=CURE):
        evaluate(network, SPLITS.test)
    with pytest.raises(BadInput, match="the memory of the GPU ran out: free memory, or move the network from the GPU"):
        Classifier(network, SPLITS.test.class_names, (1, 28, 28), Preprocessing()).predict(SPLITS.test.pixels[:1])


def test_memory_of_the_cpu_that_runs_out_is_one_line():
    with pytest.raises(BadInput, match="the memory of the CPU ran out: smaller"), clear_memory_errors("smaller"):
        torch.empty(2**55, device="cpu")
    with pytest.raises(BadInput, match="the memory of the CPU ran out: smaller"), clear_memory_errors("smaller"):
        raise MemoryError("std::bad_alloc")  # as from the kernels


def test_other_errors_stay_as_they_are():
    with pytest.raises(BadInput, match="smaller"), clear_memory_errors("smaller"):
        raise RuntimeError("CUDA error: out of memory")
    with pytest.raises(RuntimeError, match="other"), clear_memory_errors("smaller"):
        raise RuntimeError("other")


@pytest.mark.parametrize("fails", [False, True])
def test_evaluate_leaves_the_model_on_its_device(fails, monkeypatch):
    """The meta device plays the GPU. Like Lightning, the replaced function moves the model to the CPU."""

    def test(trainer, module, *_):
        module.to_empty(device="cpu")
        if fails:
            raise KeyboardInterrupt
        module.tested, module.scored = torch.eye(10).long(), None
        return 50.0

    monkeypatch.setattr("torchcaps.evaluation.accuracy_on", test)
    network = PooledCNN((1, 28, 28), 10).to("meta")
    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        evaluate(network, SPLITS.test)
    assert {weights.device.type for weights in network.parameters()} == {"meta"}


def test_batches_are_pinned_for_a_gpu(monkeypatch):
    def loader():
        return Batches(ImageBatches(SPLITS.test, Preprocessing()), np.arange(20), 8, 0, torch.device("cpu"))

    for gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert loader().pin_memory is gpu


def test_labels_are_checked_with_one_transfer():
    transfers = []

    class Transfers(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__int__, torch.Tensor.__bool__):
                transfers.append(function)
            return function(*args, **(kwargs or {}))

    with Transfers():
        check_labels(torch.arange(3), 3)
        margin_loss(torch.rand(2, 2), torch.rand(2, 2))
    # Tensor.item reads the smallest score, which is checked only on CPUs.
    assert transfers == [torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.tolist]


@pytest.mark.parametrize("add_coordinates", [False, True])
@pytest.mark.parametrize("moved", [False, True])
def test_a_created_or_moved_layer_copies_all_constants_that_routing_uses(moved, add_coordinates, monkeypatch):
    layer = ClassCaps(torch.rand(4, 2), 3, 2, (2, 2), add_coordinates)
    copied, used, on = [], [], Constant.on
    monkeypatch.setattr(Constant, "on", lambda constant, device: copied.append(constant) or on(constant, device))
    layer = layer.to("cpu") if moved else ClassCaps(torch.rand(4, 2), 3, 2, (2, 2), add_coordinates)
    monkeypatch.setattr(Constant, "on", lambda constant, device: used.append(constant) or on(constant, device))
    layer(Capsules(torch.rand(1, 4, 3, 2, 2), torch.rand(1, 4, 3)), return_couplings=True)
    assert len({*map(id, used)}) > add_coordinates
    assert {*map(id, used)} <= {*map(id, copied)}


def test_a_copied_constant_keeps_its_copies_on_other_devices():
    constant = Constant(torch.arange(3))
    constant._copies[torch.device("meta")] = torch.arange(3, device="meta")
    copied = copy.deepcopy(constant)
    assert copied.on("meta").is_meta
    assert copied._copies.keys() == constant._copies.keys()
    assert copied.values is not constant.values


@pytest.mark.parametrize(
    ("capability", "hip", "compiling", "fits"),
    [
        ((6, 1), None, False, False),
        ((7, 0), None, False, True),
        ((9, 0), None, True, True),
        ((9, 4), "6.4", False, False),
        ((9, 4), "6.4", True, False),
    ],
)
def test_triton_is_not_chosen_on_gpus_that_it_does_not_support(capability, hip, compiling, fits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    monkeypatch.setattr(kernels, "_TRITON", True)
    kernels._has_capability.cache_clear()
    with FakeTensorMode():
        pose, transform = torch.empty(1, 2, 3, 1, 4, device="cuda"), torch.empty(2, 3, 2, 4, 4, device="cuda")
        found = kernels.obstacle(pose, transform, torch.float32)
    kernels._has_capability.cache_clear()
    assert found == (None if fits else "the fused kernels need an NVIDIA GPU of compute capability 7.0 or higher")
