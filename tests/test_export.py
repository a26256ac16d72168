"""Exported files take stored pixels and give the same scores as the classifier, for any batch size."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from image_trees import tree
from test_models import NETWORKS, SMALL
from torchcaps import ROUTINGS, BadInput, Classifier, Preprocessing, Routing, cli, create_model
from torchcaps.data import Images
from torchcaps.export import LARGEST_DIFFERENCE, export_classifier
from torchcaps.kernels import _cpu
from torchcaps.routing.variational_bayes import written_digamma

PAGE = Path(__file__).parents[1] / "docs/export.md"
FAST = ("pooled-cnn",)
pytestmark = pytest.mark.usefixtures("untyped")
STANDARDISED = Preprocessing(standardise="last", crop=18, test_crops=2)


def slow_unless(fast, names):
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


def classifier_of(name, shape=(1, 20, 22), preprocessing=STANDARDISED, **options):
    options = {"image_shape": preprocessing.image_shape(shape), "num_classes": 3, **SMALL[name], **options}
    model = create_model(name, **options).eval()
    for weights in model.parameters():
        if not weights.any():  # scores would be equal
            torch.nn.init.normal_(weights, std=0.1)
    return Classifier(model, ("a", "b", "ß"), shape, preprocessing)


def scores_of_file(file, images):
    if file.suffix == ".onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(file)
        return torch.from_numpy(session.run(["scores"], {"images": images.numpy()})[0])
    return torch.export.load(file).module()(images)


def check(classifier, file):
    """Check that the exported file gives the classifier's scores for batches of one, two and seven images."""
    found = export_classifier(classifier, file, file.suffix[1:])
    assert found.largest_difference < 1e-4
    assert found.same_classes == found.images == 6
    if file.suffix == ".onnx":  # onnxruntime's ScatterND adds to one element in several threads at once
        nodes = pytest.importorskip("onnx").load(file).graph.node
        assert not [node.name for node in nodes if node.op_type == "ScatterND" and node.attribute]
    for batch in (1, 2, 7):
        images = torch.randint(0, 256, (batch, *classifier.image_shape), dtype=torch.uint8)
        right = classifier.predict(images).scores
        torch.testing.assert_close(scores_of_file(file, images), right, rtol=0, atol=1e-4)
        assert not torch.equal(right, right[:1].expand_as(right)) or batch == 1


@pytest.mark.parametrize("format", ["onnx", "pt2"])
@pytest.mark.parametrize("name", slow_unless(FAST, NETWORKS))
def test_exported_files_give_the_scores_of_every_model(name, format, tmp_path):
    check(classifier_of(name), tmp_path / f"model.{format}")


@pytest.mark.parametrize("format", ["onnx", "pt2"])
@pytest.mark.parametrize("rule", slow_unless(("dynamic",), ROUTINGS))
def test_exported_files_give_the_scores_of_every_rule(rule, format, tmp_path):
    plain = Preprocessing(standardise="first")
    check(classifier_of("capsnet", (2, 18, 18), plain, routing=rule), tmp_path / f"model.{format}")


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "pt2"])
@pytest.mark.parametrize("rule", ROUTINGS)
def test_exported_files_give_the_scores_of_matrix_capsules_with_every_rule(rule, format, tmp_path):
    routing = Routing("em", iterations=2) if rule == "em" else rule
    check(classifier_of("matrix-capsnet", routing=routing), tmp_path / f"model.{format}")


def test_the_digamma_function_of_onnx_files_equals_that_of_torch():
    x = torch.cat([torch.linspace(1, 20, 2000), torch.logspace(1, 6, 100)]).double()
    torch.testing.assert_close(written_digamma(x), x.digamma(), rtol=1e-9, atol=1e-9)


def test_a_network_with_an_operator_that_onnx_lacks_is_refused(tmp_path):
    class Lacking(torch.nn.Module):
        def forward(self, images):
            return images.lgamma()

    classifier = classifier_of("pooled-cnn", preprocessing=Preprocessing())
    classifier.model.trunk = torch.nn.Sequential(Lacking(), classifier.model.trunk)
    with pytest.raises(BadInput, match=r"torch.onnx cannot export this network \(.*lgamma.*use the format pt2"):
        export_classifier(classifier, tmp_path / "model.onnx")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("standardise", "crop", "test_crops"), [("none", 0, 1), ("first", 15, 1), ("first", 14, 3), ("last", 15, 1)]
)
def test_the_exported_file_contains_the_preprocessing_of_images(standardise, crop, test_crops, tmp_path):
    preprocessing = Preprocessing(shift=2, standardise=standardise, crop=crop, flip=True, test_crops=test_crops)
    classifier, file = classifier_of("pooled-cnn", (2, 18, 17), preprocessing), tmp_path / "model.pt2"
    images = torch.randint(0, 256, (3, 2, 18, 17), dtype=torch.uint8)
    images[1] = 0
    right = classifier.predict(images).scores
    export_classifier(classifier, file, "pt2")
    torch.testing.assert_close(scores_of_file(file, images), right, rtol=0, atol=1e-5)
    classifier.model.double()
    export_classifier(classifier, file, "pt2")
    torch.testing.assert_close(scores_of_file(file, images), right, rtol=0, atol=1e-5)


def test_the_exported_file_contains_class_names_image_shape_and_model_name(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    classifier = classifier_of("pooled-cnn")
    for format in ("onnx", "pt2"):
        export_classifier(classifier, tmp_path / f"model.{format}", format)
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    extra = {"torchcaps.json": ""}
    torch.export.load(tmp_path / "model.pt2", extra_files=extra)
    for facts in (session.get_modelmeta().custom_metadata_map, json.loads(extra["torchcaps.json"])):
        assert json.loads(facts["class_names"]) == ["a", "b", "ß"]
        assert json.loads(facts["image_shape"]) == [1, 20, 22]
        assert facts["model"] == "pooled-cnn"
    (images,) = session.get_inputs()
    assert (images.type, images.shape[1:]) == ("tensor(uint8)", [1, 20, 22])


@pytest.mark.skipif(_cpu is None, reason="the fused kernels are not built")
def test_a_pt2_file_contains_fused_operators_and_an_onnx_file_contains_none(tmp_path):
    classifier = classifier_of("capsnet", routing=Routing("dynamic", backend="fused"))
    export_classifier(classifier, tmp_path / "model.pt2", "pt2")
    graphs = torch.export.load(tmp_path / "model.pt2").graph_module.modules()
    targets = [str(node.target) for part in graphs if hasattr(part, "graph") for node in part.graph.nodes]
    assert any(target.startswith("torchcaps.") for target in targets)
    found = export_classifier(classifier, tmp_path / "model.onnx", "onnx")
    assert found.largest_difference < 1e-4
    assert classifier.model.class_capsules.routing.backend == "fused"
    assert classifier.model.decoder is not None


def test_a_network_whose_exported_scores_differ_is_not_written(tmp_path):
    """The scores of this network depend on the other images of a batch; the classifier runs one image at a time."""
    classifier = classifier_of("pooled-cnn", preprocessing=Preprocessing())
    trunk = classifier.model.trunk
    classifier.model.trunk = torch.nn.Sequential(trunk, torch.nn.BatchNorm2d(128, track_running_stats=False))
    file = tmp_path / "model.pt2"
    with pytest.raises(BadInput, match=r"model.pt2 was not written: the scores .* differ by up to 0\.\d+"):
        export_classifier(classifier, file, "pt2")
    assert not [*tmp_path.iterdir()]
    assert LARGEST_DIFFERENCE == 1e-2  # export.md and the docstring say so


@pytest.mark.parametrize("format", ["onnx", pytest.param("pt2", marks=pytest.mark.slow)])
def test_the_command_writes_the_file_and_prints_the_largest_difference(format, command, finished, tmp_path):
    pytest.importorskip("onnxruntime")
    folder, _ = finished
    file = tmp_path / f"model.{format}"
    done = command("export", folder, "--format", format, "--out", file)
    assert (done.returncode, done.stderr) == (0, "")
    runtime = "onnxruntime" if format == "onnx" else "torch.export"
    assert (
        f"{runtime}, 6 random images: the scores of the exported network differ from the classifier's by at most "
        in done.stdout
    )
    assert "both predict the same class for 6 of 6 images" in done.stdout
    classifier = Classifier.from_pretrained(folder)
    images = torch.randint(0, 256, (3, *classifier.image_shape), dtype=torch.uint8)
    right = classifier.predict(images).scores
    torch.testing.assert_close(scores_of_file(file, images), right, rtol=0, atol=1e-4)


@pytest.fixture
def export(monkeypatch, capfd):
    """Return a function that runs `torchcaps export` in this process.

    It returns the exit code and all output, also the output of C++ libraries.
    """

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["torchcaps", "export", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0, *capfd.readouterr()

    return run


def test_the_command_compares_scores_on_validation_images(export, finished, images, tmp_path):
    """For a run folder, these are the validation images of the run; for published weights, those of any dataset."""
    pytest.importorskip("onnxruntime")
    folder, _ = finished
    code, out, error = export(folder, "--out", tmp_path / "model.onnx", "--data", images)
    count = json.loads((folder / "metrics.json").read_text())["validation_images"]
    assert (code, error) == (0, "")
    assert f"onnxruntime, {count} validation images: " in out
    assert f"both predict the same class for {count} of {count} images" in out
    assert "images/s" not in out  # too few images


def test_scores_and_speed_are_compared_on_given_images(tmp_path):
    classifier = classifier_of("pooled-cnn")
    pixels = torch.randint(0, 256, (401, 1, 20, 22), dtype=torch.uint8)
    images = Images(pixels, torch.zeros(401, dtype=torch.int64), classifier.class_names)
    found = export_classifier(classifier, tmp_path / "model.pt2", "pt2", images)
    assert found.images == 401 >= found.same_classes > 390
    assert found.largest_difference < 1e-4
    assert found.images_per_second > 0 < found.classifier_images_per_second
    few = export_classifier(classifier, tmp_path / "model.pt2", "pt2", images.subset([0, 1]))
    assert (few.images, few.images_per_second) == (2, None)
    with pytest.raises(BadInput, match=r"have the shape \(1, 20, 20\), but the classifier needs \(1, 20, 22\)"):
        export_classifier(classifier, tmp_path / "x.pt2", "pt2", Images(pixels[..., :20], images.labels, ("a",)))
    with pytest.raises(BadInput, match=r"file must be a name that ends in \.onnx for the format onnx; got .*x\.pt2"):
        export_classifier(classifier, tmp_path / "x.pt2")


@pytest.mark.slow
def test_a_compiled_package_runs_in_the_cpp_program_of_the_documentation(tmp_path):
    if not (shutil.which("cmake") and shutil.which("g++")) or (torch.version.cuda and not shutil.which("nvcc")):
        pytest.skip("needs cmake and g++, and for a PyTorch with CUDA also the CUDA toolkit")
    classifier = classifier_of("capsnet", (3, 32, 32), Preprocessing(), decoder=False)
    classifier.model.class_capsules.transform.data *= 60  # scores well above 0
    found = export_classifier(classifier, tmp_path / "photos-compiled.pt2", "aoti")
    assert (found.runtime, found.same_classes) == ("AOTInductor", 6)
    package = torch._inductor.aoti_load_package(tmp_path / "photos-compiled.pt2")
    for batch in (1, 2, 7):
        images = torch.randint(0, 256, (batch, 3, 32, 32), dtype=torch.uint8)
        torch.testing.assert_close(package(images), classifier.predict(images).scores, rtol=0, atol=1e-4)
    for kind, name in (("cpp", "classify.cpp"), ("cmake", "CMakeLists.txt")):
        (block,) = re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)
        (tmp_path / name).write_text(block)
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for words in (["cmake", "-B", "build", prefix, "."], ["cmake", "--build", "build"], ["./build/classify"]):
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    names, *scores = done.stdout.splitlines()
    assert json.loads(names) == ["a", "b", "ß"]
    right = classifier.predict(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)).scores[0]
    torch.testing.assert_close(torch.tensor([float(score) for score in scores]), right, rtol=0, atol=1e-4)
    assert right.max() > 0.1


def test_bad_arguments_of_the_command_are_refused(refused, tmp_path):
    weights = classifier_of("pooled-cnn")
    weights.save_pretrained(tmp_path)
    export = ("export", tmp_path, "--out")
    assert "--format must be one of onnx, pt2, aoti; got 'pt'" in refused(
        *export, tmp_path / "x.onnx", "--format", "pt"
    )
    assert "ends in .onnx for the format onnx" in refused(*export, tmp_path / "x.pt2")
    assert "ends in .pt2 for the format aoti" in refused(*export, tmp_path / "x.aoti", "--format", "aoti")
    assert "does not exist" in refused(*export, tmp_path / "none" / "x.onnx")
    assert "does not exist: give a run folder" in refused("export", tmp_path / "none", "--out", tmp_path / "x.onnx")
    onnx = (*export, tmp_path / "x.onnx", "--data", "mnist-5k")
    assert "and of the network differ (only the data: 0, 1, 2 and 7 more; only the network: a, b, ß)" in refused(*onnx)
    replace(weights, class_names=("a", "ß", "b")).save_pretrained(tmp_path / "other")
    photos = tree(tmp_path / "photos", ("a", "b", "ß"), size=(22, 20))
    line = refused("export", tmp_path / "other", "--out", tmp_path / "x.onnx", "--data", photos)
    assert "has the classes of the network in another order (class 1 is b instead of ß): number its classes" in line


@pytest.mark.parametrize(
    ("absent", "says"), [("onnxscript", "pip install 'torchcaps[onnx]'"), ("onnxruntime", "onnx.reference")]
)
def test_a_missing_optional_package_is_named(absent, says, export, tmp_path, monkeypatch):
    classifier_of("pooled-cnn", preprocessing=Preprocessing()).save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, absent, None)
    _, out, error = export(tmp_path, "--out", tmp_path / "model.onnx")
    assert says in out + error
    assert len((out + error).splitlines()) == (1 if absent == "onnxscript" else 2)
    assert (tmp_path / "model.onnx").exists() == (absent == "onnxruntime")


def test_the_name_of_a_compiled_network_is_that_of_the_network(tmp_path):
    classifier = classifier_of("pooled-cnn")
    compiled = Classifier(torch.compile(classifier.model, backend="eager"), *classifier_parts(classifier))
    export_classifier(compiled, tmp_path / "model.pt2", "pt2")
    extra = {"torchcaps.json": ""}
    torch.export.load(tmp_path / "model.pt2", extra_files=extra)
    assert json.loads(extra["torchcaps.json"])["model"] == "pooled-cnn"


def classifier_parts(classifier):
    return classifier.class_names, classifier.image_shape, classifier.preprocessing


def test_a_network_that_onnxruntime_cannot_run_is_refused(tmp_path):
    pytest.importorskip("onnxruntime")
    classifier = classifier_of("pooled-cnn")
    classifier.model.double()
    with pytest.raises(
        BadInput, match=r"onnxruntime cannot run this network \(.*model.float\(\), or use the format pt2"
    ):
        export_classifier(classifier, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
