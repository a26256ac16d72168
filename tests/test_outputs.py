"""Files that commands write: files that cannot be written, full disks, and control characters in messages."""

import multiprocessing
import os
import queue
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import datasets
import numpy as np
import pytest
import torch

from conftest import new_python, train
from image_trees import refused as refuses
from test_image_table import png
from test_run_folder import SPLITS, tiny
from torchcaps import Classifier, PooledCNN, Preprocessing
from torchcaps.batches import Batches, ImageBatches
from torchcaps.cli import LONGEST, LONGEST_WAIT, QUIET_SECONDS, _OneInterrupt
from torchcaps.cli.common import print_classes
from torchcaps.confusion import per_class
from torchcaps.data import Images, load_image_table
from torchcaps.data.files import atomically
from torchcaps.export import _compiled
from torchcaps.training import fit
from torchcaps.training_module import TrainingModule


@contextmanager
def limited(kind, number):
    """Lower a resource limit of this process, such as the size of the files that it may write."""
    before, ignored = resource.getrlimit(kind), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(kind, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
        signal.signal(signal.SIGXFSZ, ignored)


def classifier(names=("cat", "dog")):
    return Classifier(PooledCNN((1, 16, 16), len(names)), names, (1, 16, 16), Preprocessing())


@pytest.mark.parametrize(
    ("words", "option", "ending"),
    [
        (("predict", "RUN", "IMAGE"), "--csv", "csv"),
        (("evaluate", "RUN"), "--csv", "csv"),
        (("inspect", "RUN", "IMAGE"), "--out", "png"),
        (("report", "RUN"), "--out", "html"),
        (("export", "RUN"), "--out", "onnx"),
        (("data", "show", "IMAGES"), "--out", "png"),
        (("bench", "rules"), "--out", "csv"),
        (("bench", "memory"), "--plot", "png"),
    ],
)
def test_links_devices_and_folders_are_not_replaced(words, option, ending, refused, finished, images, tmp_path):
    """Without this check, root could replace a device such as /dev/null by a file."""
    known = {"RUN": finished[0], "IMAGE": images / "left" / "000.png", "IMAGES": images}
    words = [known.get(word, word) for word in words]
    link, pipe, folder = (tmp_path / f"{name}.{ending}" for name in ("link", "pipe", "folder"))
    link.symlink_to(tmp_path / "target")
    os.mkfifo(pipe)
    folder.mkdir()
    for path, says in ((link, "a link or a device"), (pipe, "a link or a device"), (folder, "a folder")):
        assert re.search(f"{option} is {path}, .*{says}.*: give the name of a file", refused(*words, option, path))
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in (link, pipe, folder))


def test_a_file_that_a_command_reads_is_not_overwritten(refused, finished, images, tmp_path):
    run, copy, table = finished[0], shutil.copytree(images, tmp_path / "images"), tmp_path / "labels.csv"
    files = sorted(copy.rglob("*.png"))
    table.write_text("".join(["path,label\n", *(f"{one.relative_to(tmp_path)},{one.parent.name}\n" for one in files)]))
    before = {path: path.read_bytes() for path in (*files, table)}
    reads, csv = "which this command reads: give another name", "--csv must be a file name that ends in .csv; got"
    assert reads in refused("evaluate", run, "--data", table, "--csv", table)
    assert csv in refused("evaluate", run, "--data", copy, "--csv", files[0])
    assert csv in refused("predict", run, copy, "--csv", files[3])
    assert reads in refused("inspect", run, files[0], "--out", files[0])
    assert reads in refused("data", "show", copy, "--out", files[0])
    assert reads in refused("data", "show", table, "--out", files[0])
    assert "would be read as an image of" in refused("data", "show", copy, "--out", files[0].with_name("sheet.png"))
    linked = tmp_path / "linked"
    linked.mkdir()
    for folder in ("left", "right"):
        (linked / folder).symlink_to(copy / folder)
    assert reads in refused("data", "show", linked, "--out", linked / "left" / files[0].name)
    for place in (linked, copy):
        assert "would be read as an image of" in refused("data", "show", linked, "--out", place / "left" / "sheet.png")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_plot_is_refused_for_a_benchmark_without_a_plot(refused, tmp_path):
    assert "`bench devices` draws no picture" in refused("bench", "devices", "--plot", tmp_path / "a.png")


@pytest.mark.parametrize(("option", "ending", "other"), [("--out", ".csv", "m.png"), ("--plot", ".png", "m.csv")])
def test_a_benchmark_refuses_a_file_name_with_another_ending(option, ending, other, refused, tmp_path):
    line = refused("bench", "memory", option, tmp_path / other)
    assert line == f"error: {option} must be a file name that ends in {ending}; got {tmp_path / other}"


@pytest.mark.parametrize(("option", "value"), [("--heap", "warm"), ("--repeats", "3")])
def test_options_that_the_memory_benchmark_does_not_use_are_refused(refused, option, value):
    assert f"leave out {option}" in refused("bench", "memory", option, value)


def test_a_device_is_not_replaced_from_python(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is a folder or a device"), atomically(tmp_path / "pipe"):
        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_file_whose_writing_fails_or_is_interrupted_leaves_no_temporary_file(error, tmp_path):
    with pytest.raises(error), atomically(tmp_path / "scores.csv"):
        raise error
    assert not any(tmp_path.iterdir())


def test_a_full_disk_leaves_matching_weights_and_options(tmp_path):
    """config.json is larger than the weights and than the limit for files."""
    earlier, later = classifier(), classifier(("cat" * 100_000, "dog"))
    earlier.save_pretrained(tmp_path)
    pixels = torch.zeros(1, 1, 16, 16, dtype=torch.uint8)
    with limited(resource.RLIMIT_FSIZE, 200_000), pytest.raises(ValueError, match=r"config\.json could not be written"):
        later.save_pretrained(tmp_path)
    assert torch.equal(Classifier.from_pretrained(tmp_path).predict(pixels).scores, earlier.predict(pixels).scores)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_logger_on_a_full_disk_names_the_cure(tmp_path):
    code = (
        "import resource, signal, sys, pathlib; from torchcaps.loggers import create_logger; "
        "from torchcaps.recipes import create_recipe; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
        "import traceback; sys.excepthook = lambda *error: print(*traceback.format_exception(*error), sep='', end=''); "
        "create_logger('tensorboard', pathlib.Path(sys.argv[1]), create_recipe('capsnet-mnist'))"
    )  # to standard output, because TensorBoard's thread may write to standard error at the same time
    done = new_python(["-c", code, tmp_path])
    assert re.search(f"BadInput: the logger tensorboard cannot start .*: free disk space in {tmp_path}", done.stdout)


def test_the_cache_of_a_dataset_on_a_full_disk_names_the_cure(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    content = {"image": [png(one) for one in range(6)], "label": [0, 1] * 3}
    datasets.Dataset.from_dict(content).to_parquet(tmp_path / "photos.parquet")
    with limited(resource.RLIMIT_FSIZE, 500):
        refuses(lambda: load_image_table(tmp_path / "photos.parquet"), "File too large", "free disk space", "HF_HOME")


@pytest.mark.filterwarnings("ignore:This DataLoader", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_worker_processes_that_cannot_start_cause_an_error_of_one_line():
    images = Images(torch.zeros(8, 1, 4, 4, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64), ("cat",))
    loader = Batches(ImageBatches(images, Preprocessing()), np.arange(8), 1, 4, torch.device("cpu"))
    limit = len(os.listdir("/proc/self/fd")) + 3
    with limited(resource.RLIMIT_NOFILE, limit):
        refuses(lambda: next(iter(loader)), "4 worker processes cannot start (Too many open files): use fewer")


@pytest.mark.parametrize(
    ("said", "cure"), [("No space left on device", "free disk space in .*TMPDIR"), ("sorry", "use the format pt2")]
)
def test_an_error_of_the_compiler_of_aotinductor_becomes_one_line(said, cure):
    text = f"C++ compile error\n\nOutput:\na.cpp:1: fatal error: {said}\ncompilation terminated.\n"
    expected = rf"cannot compile this network \(a.cpp:1: fatal error: {said}\): {cure}"
    with pytest.raises(ValueError, match=expected), _compiled():
        raise RuntimeError(text)


def test_messages_contain_no_control_characters_and_have_a_limited_length(refused, call, tmp_path):
    table = tmp_path / "photos.csv"
    table.write_text("path,label\n\x1b[2J\0.png,cat\nb.png,cat\nc.png,dog\nd.png,dog\n")
    assert f"\\x1b[2J\\x00.png in line 2 of {table} does not exist" in refused(
        "data", "show", table, "--out", tmp_path / "a.png"
    )
    table.write_text("path,label\n" + "x" * 100_000 + ",cat\nb.png,cat\nc.png,dog\nd.png,dog\n")
    said = refused("data", "show", table, "--out", tmp_path / "a.png")
    assert len(said) < LONGEST + 20
    assert said.endswith("does not exist: correct the path or remove the line")


@pytest.fixture
def interruptible():
    """Let Ctrl-C interrupt this process: a background job ignores it, and so does the command after an interruption."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_an_export_is_reported_as_an_interruption(
    number, expected, call, finished, tmp_path, monkeypatch
):
    def exporter(*_, **__):
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        except KeyboardInterrupt as error:
            raise torch.onnx.OnnxExporterError("no") from error

    monkeypatch.setattr(torch.onnx, "export", exporter)
    code, _, error = call("export", finished[0], "--out", tmp_path / "model.onnx")
    assert (code, error) == (expected, "interrupted\n")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_during_a_finaliser_interrupts_the_command(call, finished, tmp_path, monkeypatch):
    """An example is the finaliser of a data loader, which waits for its worker processes."""

    class Slow:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    def exporter(*_, **__):
        del Slow.one
        time.sleep(10)

    Slow.one = Slow()
    monkeypatch.setattr(torch.onnx, "export", exporter)
    code, _, error = call("export", finished[0], "--out", tmp_path / "model.onnx")
    assert (code, error) == (130, "interrupted\n")


def put_into_a_queue(interrupt, monkeypatch):
    waiting = queue.Queue()
    monkeypatch.setattr(waiting, "_put", interrupt)
    waiting.put(1)


def fork_a_process(interrupt, monkeypatch):
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: interrupt() or fork())
    multiprocessing.get_context("fork").Process(target=signal.getsignal, args=(signal.SIGINT,)).start()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("action", [put_into_a_queue, fork_a_process])
def test_ctrl_c_waits_for_functions_that_must_end(action, call, finished, tmp_path, monkeypatch):
    """Otherwise, the reader of a queue may not wake up, and Python ignores exceptions while it forks a process."""
    continued = []

    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGINT)
        continued.append(action)

    def exporter(*_, **__):
        action(interrupt, monkeypatch)
        time.sleep(10)

    monkeypatch.setattr(torch.onnx, "export", exporter)
    code, _, error = call("export", finished[0], "--out", tmp_path / "model.onnx")
    assert (code, error) == (130, "interrupted\n")
    assert continued == [action]


def test_a_later_ctrl_c_interrupts_if_the_first_had_no_effect(monkeypatch):
    handler, now = _OneInterrupt(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with pytest.raises(KeyboardInterrupt):
        handler(signal.SIGINT, None)
    now[0] = QUIET_SECONDS - 1
    handler(signal.SIGINT, None)
    now[0] = QUIET_SECONDS
    with pytest.raises(KeyboardInterrupt):
        handler(signal.SIGINT, None)


def test_ctrl_c_waits_only_a_limited_time_for_a_blocked_queue(monkeypatch):
    handler, now, waiting = _OneInterrupt(), [1.0], queue.Queue()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(threading, "Timer", lambda *_: threading.Thread())  # it sends no second signal

    def blocked(_):
        handler(signal.SIGINT, sys._getframe())
        now[0] += LONGEST_WAIT
        with pytest.raises(KeyboardInterrupt):
            handler(signal.SIGINT, sys._getframe())

    monkeypatch.setattr(waiting, "_put", blocked)
    waiting.put(1)


def test_refused_commands_leave_no_folder_behind(refused, images, finished, tmp_path, monkeypatch):
    out = tmp_path / "some" / "new" / "run"
    refused("train", "capsnet-images", "--data", tmp_path / "nothing", "--out", out)
    refused("publish", tmp_path / "nothing", out)
    assert not (tmp_path / "some").exists()
    assert "give another folder with --out" in refused(
        "train", "capsnet-images", "--data", images, "--out", images / "run"
    )
    monkeypatch.chdir(images)
    assert "runs/capsnet-images-seed0 is inside the folder of" in refused("train", "capsnet-images", "--data", ".")
    assert sorted(path.name for path in images.iterdir()) == ["left", "right"]


def test_names_of_unknown_users_empty_weights_and_other_readmes_are_refused(refused, images, finished, tmp_path):
    words = ("train", "capsnet-images", "--out", tmp_path / "run")
    assert "~nobody-here" in refused(*words, "--data", "~nobody-here")
    assert "--from is empty" in refused(*words, "--data", images, "--from", "")
    (tmp_path / "README.md").write_text("# My project")
    assert "README.md does not belong to a network of torchcaps" in refused("publish", finished[0], tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert "would be replaced: give another folder" in refused("publish", finished[0], tmp_path)
    assert (tmp_path / "README.md").read_text() == "# My project"
    assert (tmp_path / "config.json").read_text() == '{"model_type": "bert"}'


def test_no_output_replaces_a_file_of_a_run(call, refused, images, run):
    for words in (("evaluate", run), ("predict", run, images)):
        for name, says in (("metrics.csv", "is a file of the network in"), ("config.json", "that ends in .csv; got")):
            before = (run / name).read_bytes()
            assert says in refused(*words, "--csv", run / name)
            assert (run / name).read_bytes() == before
    assert call("predict", run, images, "--csv", run / "predictions.csv")[0] == 0
    for name in ("recipe.json", "config.json"):  # of a run that is not finished, and of published weights
        (run.parent / name).mkdir()
        (run.parent / name / name).touch()
        assert "is a file of the network in" in refused("evaluate", run, "--csv", run.parent / name / "metrics.csv")


def test_several_processes_check_one_new_folder_at_the_same_time(tmp_path):
    checks = "import sys; from pathlib import Path; from torchcaps.cli.common import writable\n"
    checks += "for seed in range(300): writable(Path(sys.argv[1], 'sweep', str(seed % 3)))"
    words = [sys.executable, "-c", checks, str(tmp_path)]
    together = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[1] for process in together] == [""] * 3
    assert not any(tmp_path.iterdir())


def test_of_many_classes_those_with_errors_are_printed_lowest_recall_first(capsys):
    names = [f"c{number}" for number in range(60)]
    confusion = 4 * torch.eye(60).long()
    confusion[:20] = 0  # classes without images
    print_classes(per_class(confusion, names))
    assert capsys.readouterr().out == "no errors in the 60 classes\n"
    confusion[59] = torch.arange(60) == 3
    confusion[40, 7] = 1
    print_classes(per_class(confusion, names))
    out = capsys.readouterr().out
    assert "the 2 of 60 classes with errors" in out
    rows = [re.split(r"[^\w.-]+", line)[1:-1] for line in out.splitlines() if re.search(r"\bc\d", line)]
    assert rows == [["c59", "1", "-", "0.0", "c3"], ["c40", "5", "100.0", "80.0", "c7"]]
    nearly = 30_000 * torch.eye(60).long()
    nearly[4, 4:6] = torch.tensor([29_999, 1])
    print_classes(per_class(nearly, names))
    assert re.search(r"c4 .* 100.0 .* c5 ", capsys.readouterr().out)
    print_classes({"cat": {"images": 1, "precision_percent": 50.0, "recall_percent": 100.0}})  # a run of an old version
    assert "cat" in capsys.readouterr().out
    print_classes(per_class(confusion.roll(1, dims=1), names))
    assert "20 of 60 classes with the lowest recall; 20 more have errors" in " ".join(capsys.readouterr().out.split())


def test_a_run_whose_path_contains_two_colons_can_be_resumed(call, images, tmp_path):
    run = tmp_path / "lr::2"
    for epochs in (1, 2):
        code, _, error = train(call, images, run, "--epochs", epochs, *["--resume"][: epochs - 1])
        assert code == 0, error


@pytest.mark.filterwarnings("ignore")
def test_the_time_left_includes_the_validation_of_every_epoch_that_is_left(tmp_path, monkeypatch, capsys):
    class Slow(TrainingModule):
        def on_validation_epoch_end(self):
            time.sleep(2)
            super().on_validation_epoch_end()

    monkeypatch.setattr("torchcaps.run_writers.PROGRESS_SECONDS", 0.0)
    fit(tiny(3), SPLITS, tmp_path / "run", module_class=Slow, test=False)
    left = re.findall(r"epoch (\d)/3  step 3/3 .*  (\d+) s left", capsys.readouterr().out)
    assert [epoch for epoch, _ in left] == ["1", "2", "3"]
    assert int(left[1][1]) >= 4
    assert int(left[2][1]) >= 2
