"""Trainings that a signal or a callback ends, and trainings in a job of SLURM."""

import json
import os
import re
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from test_run_folder import SPLITS, tiny
from torchcaps import BadInput, Classifier, PooledCNN, Preprocessing
from torchcaps.chosen_epoch import check_best
from torchcaps.evaluation import evaluate
from torchcaps.training import fit
from torchcaps.training_module import TrainingModule

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("blank_pictures")]
SLURM = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NAME": "train"}


def same_weights(one, other):
    weights, others = (load_file(folder / "model.safetensors") for folder in (one, other))
    return all(torch.equal(weights[name], others[name]) for name in weights.keys() | others.keys())


def test_a_job_of_slurm_gives_the_same_results_whatever_the_working_directory_contains(tmp_path, monkeypatch):
    handlers = []
    fit(tiny(1), SPLITS, tmp_path / "plain")
    plain = evaluate(PooledCNN.from_pretrained(tmp_path / "plain"), SPLITS.test)
    fit(tiny(1, learning_rate="0.1"), SPLITS, tmp_path / "other")
    shutil.copy(tmp_path / "other" / "last.ckpt", tmp_path / "hpc_ckpt_1.ckpt")
    monkeypatch.chdir(tmp_path)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    fit(tiny(1), SPLITS, tmp_path / "job", on_epoch_end=lambda _: handlers.append(signal.getsignal(signal.SIGUSR1)))
    assert same_weights(tmp_path / "plain", tmp_path / "job")
    assert handlers == [signal.SIG_DFL]
    again = evaluate(PooledCNN.from_pretrained(tmp_path / "plain"), SPLITS.test)
    torch.testing.assert_close(again.scores, plain.scores, rtol=0, atol=0)


def terminated(_):
    os.kill(os.getpid(), signal.SIGTERM)


def terminated_with_the_workers(_):
    os.kill(os.getpid(), signal.SIGTERM)
    raise RuntimeError("DataLoader worker (pid(s) 1) exited unexpectedly")


@pytest.mark.parametrize("stop", [terminated, terminated_with_the_workers])
def test_sigterm_interrupts_a_training_which_can_then_be_resumed(stop, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(tiny(2), SPLITS, tmp_path / "run", on_epoch_end=stop)
    fit(tiny(2), SPLITS, tmp_path / "run", resume=True)
    fit(tiny(2), SPLITS, tmp_path / "whole")
    assert same_weights(tmp_path / "run", tmp_path / "whole")


def test_an_error_after_an_interruption_keeps_its_type(tmp_path):
    """Python stores the interruption as the context of the later error."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(BadInput, match="no such thing"):
            fit(tiny(1), SPLITS, tmp_path, on_epoch_end=refuse)


def refuse(_):
    raise BadInput("no such thing")


def test_a_callback_can_exit_with_its_own_code(tmp_path):
    with pytest.raises(SystemExit) as stopped:
        fit(tiny(2), SPLITS, tmp_path, on_epoch_end=lambda _: sys.exit(3))
    assert stopped.value.code == 3


def test_an_interruption_in_another_thread_is_a_keyboard_interrupt(tmp_path):
    def interrupt(_):
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as thread, pytest.raises(KeyboardInterrupt):
        thread.submit(fit, tiny(2), SPLITS, tmp_path, on_epoch_end=interrupt).result()


def test_ctrl_c_works_again_after_an_interruption_before_the_first_step(tmp_path):
    class Interrupted(TrainingModule):
        def configure_optimizers(self):
            if self._trainer is not None:  # not while memory and time are estimated
                signal.raise_signal(signal.SIGINT)
            return super().configure_optimizers()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # processes of pytest-xdist ignore Ctrl-C
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(tiny(1), SPLITS, tmp_path, module_class=Interrupted)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_network_is_not_evaluated_by_another_thread_while_it_is_trained(tmp_path):
    found = []

    def look(model):
        classifier = Classifier(model, SPLITS.test.class_names, SPLITS.test.image_shape, Preprocessing())
        assert len(classifier.predict(SPLITS.test.pixels[:1]).scores) == 1
        with ThreadPoolExecutor(1) as thread:
            found.append(thread.submit(classifier.predict, SPLITS.test.pixels[:1]).exception())
            copy = replace(classifier, model=deepcopy(model))
            found.append(thread.submit(copy.predict, SPLITS.test.pixels[:1]).exception())

    fit(tiny(1), SPLITS, tmp_path, on_epoch_end=look)
    assert "another thread trains this network" in str(found[0])
    assert found[1] is None


@pytest.mark.parametrize(
    ("measured", "problem"),
    [
        ({"seconds": 0.0}, "on_epoch_end returned 'seconds', a column that metrics.csv already has: use another name"),
        ({"norm": "large"}, "on_epoch_end must return a dictionary of numbers or None; got dict {'norm': 'large'}"),
        (1.0, "on_epoch_end must return a dictionary of numbers or None; got 1.0"),
    ],
)
def test_a_callback_cannot_replace_a_column_of_the_metrics(measured, problem, tmp_path):
    with pytest.raises(BadInput, match=re.escape(problem)):
        fit(tiny(1), SPLITS, tmp_path, on_epoch_end=lambda _: measured)


def check_best_of(folder, losses, epochs):
    """Check the best weights of a finished run that was trained further, interrupted, and then lost best.ckpt."""
    known = {"test_images": 10, "test_accuracy_percent": 50.0, "test_evaluations": 1, "classes": {}}
    (folder / "metrics.json").write_text(json.dumps({**known, "epochs_planned": 12, "epochs": epochs, "best_epoch": 1}))
    rows = [f"{epoch},1,1,50,1,{loss}" for epoch, loss in enumerate(losses, start=1)]
    names = "epoch,seconds,train_images_per_second,validation_accuracy_percent,train_loss,validation_loss"
    (folder / "metrics.csv").write_text("\n".join([names, *rows]) + "\n")
    check_best(folder, tiny(12), trained=len(rows))


def test_lost_best_weights_of_a_run_that_stopped_early_are_noticed(tmp_path):
    with pytest.raises(BadInput, match=r"best epoch \(epoch 3\) is missing"):
        check_best_of(tmp_path, [0.5, 0.6, 0.4], epochs=2)


def test_a_run_is_not_refused_if_its_losses_differ_only_by_their_rounding(tmp_path):
    check_best_of(tmp_path, ["0.500001", "0.500000"], epochs=1)
