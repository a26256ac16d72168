"""Settings of PyTorch, devices and GPU memory during training and evaluation, as far as a CPU can show them."""

import os

import pytest
import torch
from torch._inductor import config

from test_run_folder import SPLITS, tiny
from torchcaps.training import fit
from torchcaps.training_module import TrainingModule

pytestmark = pytest.mark.filterwarnings("ignore")


def settings():
    return (
        torch.get_deterministic_debug_mode(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        getattr(config, "deterministic", None),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_training_is_deterministic_and_restores_the_settings_of_pytorch(fails, tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before, seen = settings(), []

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


class Nondeterministic(TrainingModule):
    def loss_and_scores(self, images, labels, train):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))  # has no deterministic implementation on any device
        return super().loss_and_scores(images, labels, train)


def test_an_operation_that_is_not_deterministic_causes_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
        fit(tiny(1), SPLITS, tmp_path / "run", module_class=Nondeterministic)


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
    assert "devices is 2, but this machine has 1 GPU: use at most 1" in refused(*words)
    assert not (tmp_path / "run").exists()
