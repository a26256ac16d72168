"""Several threads use networks, files and random numbers at the same time, also beside an export or a training."""

import os
import sys
import threading
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image

from conftest import new_python
from test_run_folder import SPLITS, tiny
from torchcaps import BadInput, CapsNet, Capsules, Classifier, EfficientCapsNet, Preprocessing, Routing, SharedCaps
from torchcaps.data import Images, read_image
from torchcaps.data.files import atomically
from torchcaps.evaluation import evaluate
from torchcaps.export import export_classifier
from torchcaps.kernels import in_onnx_export
from torchcaps.kernels.flops import let_flops_be_counted
from torchcaps.recording import recorded
from torchcaps.threads import Lock, evaluating, training
from torchcaps.training import fit, new_module

TINY = {"image_shape": (1, 20, 20), "num_classes": 3, "convolution_channels": 8, "primary_types": 2}
NAMES = ("a", "b", "c")


def images(count, size=20):
    return Images(torch.randint(0, 255, (count, 1, size, size), dtype=torch.uint8), torch.zeros(count).long(), NAMES)


def beside(work, call):
    """Run `work` in another thread, and repeat `call` until it ends. Return all results of `call`."""
    results = []
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(work)
        while not done.done():
            results.append(call())
        done.result()
    return results


@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_an_evaluation_and_predictions_of_a_network_in_training_mode_do_not_disturb_each_other():
    network = EfficientCapsNet((1, 28, 28), 3)
    classifier = Classifier(network, NAMES, (1, 28, 28), Preprocessing())
    few, many = images(4, 28), images(48, 28)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    scores = evaluate(classifier, many, batch_size=4).scores
    right = classifier.predict(few.pixels).scores
    found = beside(
        lambda: torch.testing.assert_close(evaluate(classifier, many, batch_size=4).scores, scores, rtol=0, atol=0),
        lambda: classifier.predict(few.pixels).scores,
    )
    assert found
    assert all(torch.equal(one, right) for one in found)
    assert network.training
    for name, value in network.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_an_evaluation_leaves_the_weights_where_they_are_in_memory():
    """Another thread may be reading them."""
    network = EfficientCapsNet((1, 28, 28), 3)
    before = {name: value.data_ptr() for name, value in network.state_dict().items()}
    evaluate(Classifier(network, NAMES, (1, 28, 28), Preprocessing()), images(4, 28))
    assert {name: value.data_ptr() for name, value in network.state_dict().items()} == before


@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_a_network_counts_as_trained_from_the_start_of_fit(tmp_path):
    refused = []

    def predict(module, _):
        classifier = Classifier(module.model, SPLITS.test.class_names, (1, 28, 28), Preprocessing())
        with ThreadPoolExecutor(1) as thread, pytest.raises(BadInput, match="another thread trains this network"):
            thread.submit(classifier.predict, SPLITS.test.pixels[:1]).result()
        refused.append(True)

    fit(tiny(1), SPLITS, tmp_path / "run", on_start=predict)
    assert refused


def test_networks_that_share_modules_keep_their_modes():
    network = CapsNet(**TINY)
    outer, entered, leave = torch.nn.Sequential(network), threading.Event(), threading.Event()

    def use():
        with evaluating(outer):
            entered.set()
            leave.wait(60)
            return {module.training for module in network.modules()}

    with ThreadPoolExecutor(1) as thread:
        with evaluating(network):
            other = thread.submit(use)
            assert entered.wait(60)
        leave.set()
        assert other.result() == {False}
    assert {module.training for module in outer.modules()} == {True}


def test_a_network_is_trained_until_its_last_training_ends():
    network = CapsNet(**TINY)

    def use():
        with evaluating(network):
            pass

    with ThreadPoolExecutor(1) as thread, training(network):
        with training(network):
            pass
        with pytest.raises(BadInput, match="another thread trains"):
            thread.submit(use).result()


def test_a_process_that_is_forked_inside_a_lock_can_leave_it():
    script = """
import os, warnings
from torchcaps.threads import Lock, without_warnings
with Lock(), without_warnings():
    child = os.fork()
with without_warnings():
    warnings.warn("seen although silenced")
if child:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = new_python(["-c", script])
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.filterwarnings("ignore")
def test_an_export_does_not_change_what_other_threads_compute(tmp_path):
    exported = Classifier(CapsNet(**TINY).eval(), NAMES, (1, 20, 20), Preprocessing())
    used = Classifier(CapsNet(**TINY).eval(), NAMES, (1, 20, 20), Preprocessing())
    used.save_pretrained(tmp_path / "used")
    pixels = images(3).pixels
    right = used.predict(pixels).scores
    layer, children = SharedCaps(8, 3, 16), Capsules(torch.randn(1, 50, 2, 1, 8), torch.rand(1, 50, 2))
    sites = iter(range(1, 10_000))

    def call():
        count = next(sites)
        with torch.inference_mode():
            layer(Capsules(children.pose[:, : count % 50 + 1], children.activation[:, : count % 50 + 1]))
        loaded = Classifier.from_pretrained(tmp_path / "used")
        # torch.export switches oneDNN off in all threads, so convolutions round in another way.
        found = [one.predict(pixels).scores for one in (used, loaded)]
        torch.testing.assert_close(found, [right, right], rtol=1e-5, atol=1e-6)
        return layer._map.edge_lists is not None and loaded.model.class_capsules.routing_map.own_transforms

    found = beside(lambda: export_classifier(exported, tmp_path / "network.onnx", "onnx"), call)
    assert found
    assert all(found)


def test_modules_of_pytorch_that_another_thread_is_importing_are_ignored(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.onnx", types.ModuleType("torch.onnx"))
    monkeypatch.setitem(sys.modules, "torch.utils.flop_counter", types.ModuleType("torch.utils.flop_counter"))
    assert not in_onnx_export()
    let_flops_be_counted()


def test_threads_that_read_images_leave_the_filters_of_warnings_as_they_were(tmp_path):
    Image.new("RGB", (300, 300)).save(tmp_path / "one.png")
    before = list(warnings.filters)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: read_image(tmp_path / "one.png", 3, (20, 20)), range(200)))
    assert list(warnings.filters) == before
    with pytest.warns(UserWarning, match="seen"):
        warnings.warn("seen", stacklevel=1)


def test_threads_that_write_one_file_do_not_mix_their_content(tmp_path):
    def write(number):
        with atomically(tmp_path / "file") as stream:
            for _ in range(5):
                stream.write(bytes([number]) * 10_000)
        return (tmp_path / "file").read_bytes()

    with ThreadPoolExecutor(2) as threads:
        for content in threads.map(write, range(100)):
            assert len(content) == 50_000
            assert len(set(content)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("routing", ["em", "attention"])
def test_loading_and_saving_do_not_change_the_random_numbers_of_other_threads(routing, tmp_path):
    classifier = Classifier(CapsNet(**TINY, routing=Routing(routing)), NAMES, (1, 20, 20), Preprocessing())
    stop = threading.Event()

    def draw():
        torch.manual_seed(0)
        numbers = []
        while not stop.is_set():
            numbers.append(torch.rand(()).item())
        return numbers

    with ThreadPoolExecutor(1) as thread:
        drawn = thread.submit(draw)
        for _ in range(5):
            classifier.save_pretrained(tmp_path / "network")
            Classifier.from_pretrained(tmp_path / "network")
        stop.set()
        found = drawn.result()
    torch.manual_seed(0)
    assert found == [torch.rand(()).item() for _ in found]


def test_trainings_that_start_together_have_the_initial_weights_of_their_seeds():
    recipe = tiny(1)
    right = new_module(recipe, SPLITS).model.state_dict()
    with ThreadPoolExecutor(2) as threads:
        found = [module.model.state_dict() for module in threads.map(lambda _: new_module(recipe, SPLITS), range(6))]
    for state in found:
        assert all(torch.equal(state[name], value) for name, value in right.items())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of os.fork in a process with threads
def test_a_lock_that_another_thread_holds_is_free_after_a_fork():
    lock, held, leave = Lock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            leave.wait(60)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(hold)
        assert held.wait(60)
        child = os.fork()
        if not child:
            with lock:
                os._exit(0)
        ended, limit = 0, time.monotonic() + 20
        while not ended and time.monotonic() < limit:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        leave.set()
        if not ended:
            os.kill(child, 9)
            os.waitpid(child, 0)
    assert ended
    assert status == 0


def test_recordings_may_end_in_any_order():
    model, pixels = CapsNet(**TINY).eval(), torch.rand(1, 1, 20, 20)
    first, second = recorded(model), recorded(model)
    first.__enter__()
    layers = second.__enter__()
    first.__exit__(None, None, None)
    model(pixels)
    second.__exit__(None, None, None)
    assert [len(layer.passes) for layer in layers] == [3]
