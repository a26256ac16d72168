"""Export of a classifier to ONNX, torch.export or AOTInductor: one file that maps uint8 pixels to scores."""

import copy
import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, gettempdir
from time import perf_counter
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from torchcaps.checks import check_choice
from torchcaps.classifier import Classifier, uncompiled
from torchcaps.data import Images, Preprocessing
from torchcaps.data.files import atomically
from torchcaps.decoder import has_optional_decoder
from torchcaps.errors import BadInput, first_line
from torchcaps.models.pretrained import model_name
from torchcaps.routing import Rule
from torchcaps.threads import without_warnings

Format = Literal["onnx", "pt2", "aoti"]
FORMATS: tuple[str, ...] = get_args(Format)
ENDINGS = {"onnx": ".onnx", "pt2": ".pt2", "aoti": ".pt2"}
"""End of the file name for each format."""
EXTRA_FILE = "torchcaps.json"
"""Name of a JSON file inside each .pt2 file. It contains the class names, the image shape and the name of the model."""
LARGEST_DIFFERENCE = 1e-2
"""Largest accepted difference between a score of the exported network and the same score of the classifier. If the
largest score is above 1, as for logits, the difference is first divided by the largest score."""
Run = Callable[[Tensor], Float[Tensor, "N K"]]
SEVERAL = 5
BATCH = 100
"""Number of images in each batch of the comparison on given images."""


class Export(NamedTuple):
    """Result of `export_classifier`: comparison of the exported network with the classifier.

    Arguments:
        runtime: library that ran the exported network: ``onnxruntime``, ``onnx.reference``, ``torch.export`` or
            ``AOTInductor``.
        images: number of images on which the scores were compared: the given images, or random images if none were
            given.
        largest_difference: largest absolute difference between a score of the exported network and the same score of
            the classifier.
        same_classes: number of images for which the exported network and the classifier predict the same class.
        images_per_second: speed of the exported network on the given images: median over batches of 100 images. None if
            fewer than 300 images were given.
        classifier_images_per_second: speed of the classifier on the same batches.
    """

    runtime: str
    images: int
    largest_difference: float
    same_classes: int
    images_per_second: float | None = None
    classifier_images_per_second: float | None = None


class _PixelsToScores(nn.Module):
    """Network that applies the preprocessing and the model of a classifier to uint8 pixels."""

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.model = model
        self.preprocessing = preprocessing
        self.dtype = next((weight.dtype for weight in model.parameters()), torch.float32)

    def forward(self, images: Tensor) -> Tensor:
        views = self.preprocessing.views(images).to(self.dtype)
        scores = self.model(views.flatten(0, 1)).scores.float()
        return scores.unflatten(0, (views.shape[0], -1)).mean(dim=0)


def export_classifier(
    classifier: Classifier, file: str | Path, format: Format = "onnx", images: Images | None = None
) -> Export:
    """Write a classifier to one file, and compare the file with the classifier on random images and on ``images``.

    The exported network has an input named ``images``: uint8 pixels ``[N, C, H, W]`` from 0 to 255, where N ≥ 1 and
    ``(C, H, W)`` is the classifier's ``image_shape``. It has an output named ``scores``: ``[N, K]`` for K classes. The
    exported network scales, standardises and crops the pixels as the classifier does.

    The file also contains four entries: ``class_names`` and ``image_shape`` are JSON lists, ``resize`` is how image
    files were resized, as for `Classifier`, and ``model`` is the name of the network. ONNX files and AOTInductor
    packages store these entries as metadata; programs of `torch.export` store them in the extra file
    ``torchcaps.json``. The file is written only if the scores of the exported network and of the classifier agree.

    Arguments:
        classifier: the classifier; it is not changed.
        file: file to write.
        format: ``onnx`` computes the routing with the reference implementation, in standard ONNX operators. ``pt2`` is
            a program of `torch.export`. It calls the fused operators of torchcaps, so import torchcaps before you load
            it. ``aoti`` is a package of `AOTInductor`, compiled for this processor from the reference implementation.
            C++ programs need only libtorch to load the package. Compiling takes a minute and needs a C++ compiler. The
            package does not check its input: if the pixels are not contiguous in memory, not uint8, or of another size,
            the scores are wrong, without an error.
        images: images with the classifier's ``image_shape``, such as a validation split. If given, scores and speed are
            compared on these images too, after the comparison on random images.

    Raises:
        BadInput: the file name lacks the ending of the format; the packages for ``onnx`` or the C++ compiler for
            ``aoti`` is missing; ``images`` do not have the classifier's ``image_shape``; the network cannot be exported
            to this format; the file cannot be written; or a score differs from the classifier's by more than the
            tolerance. The tolerance is 0.01. If the largest absolute score is above 1, the tolerance is 1 % of that
            score.
        ValueError: ``format`` is unknown.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from torchcaps import PooledCNN
        >>> classifier = Classifier(PooledCNN((1, 16, 16), 2), ("cat", "dog"), (1, 16, 16), Preprocessing())
        >>> with TemporaryDirectory() as folder:
        ...     export_classifier(classifier, f"{folder}/model.pt2", "pt2").same_classes
        6
    """
    check_choice("format", format, FORMATS)
    if Path(file).suffix.lower() != ENDINGS[format]:
        raise BadInput(f"file must be a name that ends in {ENDINGS[format]} for the format {format}; got {file}")
    if format == "onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise BadInput("export to ONNX needs onnx and onnxscript: pip install 'torchcaps[onnx]'")
    if images is not None and images.image_shape != tuple(classifier.image_shape):
        raise BadInput(
            f"the images have the shape {images.image_shape}, but the classifier needs {classifier.image_shape}: give "
            "images of this shape"
        )
    model = copy.deepcopy(uncompiled(classifier.model)).cpu().eval()
    if has_optional_decoder(model):
        model.decoder = None  # type: ignore[assignment]
    facts = {
        "class_names": json.dumps(list(classifier.class_names)),
        "image_shape": json.dumps(list(classifier.image_shape)),
        "resize": classifier.resize,
        "model": model_name(type(model)),
    }
    shape = classifier.image_shape
    own = _PixelsToScores(model, classifier.preprocessing)
    with _quiet(), torch.no_grad():
        write, load = {"onnx": (_onnx, _onnx_runner), "pt2": (_pt2, _pt2_runner), "aoti": (_aoti, _aoti_runner)}[format]
        content = write(copy.deepcopy(own), _random(SEVERAL, shape), facts)
        runtime, run = load(content)
        given = [_random(1, shape), _random(SEVERAL, shape)]
        found = torch.cat([run(pixels) for pixels in given])
        result = _compared(runtime, found, classifier.predict(torch.cat(given)).scores, file)
        if images is not None:
            result = _compared_on(images, runtime, run, own, file)
    with atomically(Path(file)) as stream:
        stream.write(content)
    return result


def _compared(runtime: str, found: Tensor, right: Tensor, file: str | Path) -> Export:
    """Compare the scores of an exported network with the scores of the classifier, and refuse large differences."""
    difference = (found - right).abs().max().item()
    if not difference <= LARGEST_DIFFERENCE * max(1.0, right.abs().max().item()):
        other = "use the format pt2, or " if runtime.startswith("onnx") else ""
        raise BadInput(
            f"{file} was not written: the scores of the exported network and of the classifier differ by up to "
            f"{difference:.2g}; {other}report this as a bug"
        )
    same = int((found.argmax(dim=1) == right.argmax(dim=1)).sum())
    return Export(runtime, len(right), difference, same)


def _compared_on(images: Images, runtime: str, run: Run, own: Run, file: str | Path) -> Export:
    """Compare the scores and the speed of an exported network and of the classifier on images."""
    (right, own_speed), (found, speed) = _scores_and_speed(own, images), _scores_and_speed(run, images)
    result = _compared(runtime, found, right, file)
    return result._replace(images_per_second=speed, classifier_images_per_second=own_speed)


def _scores_and_speed(run: Run, images: Images) -> tuple[Float[Tensor, "N K"], float | None]:
    """Return the scores of all images and the median speed in images per second, without the first batch."""
    scores, seconds = [], []
    for indices in torch.arange(len(images), device="cpu").split(BATCH):
        pixels = images.batch(indices)
        begin = perf_counter()
        scores.append(run(pixels))
        seconds.append(perf_counter() - begin)
    full = seconds[1 : len(images) // BATCH]
    return torch.cat(scores), BATCH / median(full) if len(full) > 1 else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence all warnings, and the log messages of torch.onnx below the level ERROR."""
    levels = {log: log.level for log in map(logging.getLogger, ("torch.onnx", "onnx_ir"))}
    for log in levels:
        log.setLevel(logging.ERROR)
    try:
        with without_warnings():
            yield
    finally:
        for log, level in levels.items():
            log.setLevel(level)


def _random(count: int, shape: tuple[int, int, int]) -> UInt8[Tensor, "N C H W"]:
    """Draw the same random images in every call, without changing the random state."""
    random = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=random, device="cpu")


def _unfused(network: nn.Module) -> nn.Module:
    """Make every routing rule use the reference implementation."""
    for module in network.modules():
        if isinstance(module, Rule):
            module.backend = "reference"
    return network


def _onnx(network: nn.Module, images: Tensor, facts: dict[str, str]) -> bytes:
    try:
        program = torch.onnx.export(
            _unfused(network),
            (images,),
            input_names=["images"],
            output_names=["scores"],
            dynamo=True,
            dynamic_shapes={"images": {0: "N"}},
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:
        reason = first_line(error.__cause__ or error)
        raise BadInput(f"torch.onnx cannot export this network ({reason}): use the format pt2") from error
    assert program is not None
    program.model.metadata_props.update(facts)
    return program.model_proto.SerializeToString()


def _traced(network: nn.Module, images: Tensor) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("N", min=1)
    return torch.export.export(network, (images,), dynamic_shapes={"images": {0: batch}})


def _pt2(network: nn.Module, images: Tensor, facts: dict[str, str]) -> bytes:
    program = _traced(network, images)
    stream = io.BytesIO()
    torch.export.save(program, stream, extra_files={EXTRA_FILE: json.dumps(facts)})
    return stream.getvalue()


def _aoti(network: nn.Module, images: Tensor, facts: dict[str, str]) -> bytes:
    from torch._inductor import aoti_compile_and_package, cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        cpp_builder.get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise BadInput("export to AOTInductor needs a C++ compiler: install g++, or set CXX") from error
    program = _traced(_unfused(network), images)
    with _compiled(), TemporaryDirectory() as folder:
        settings = {"aot_inductor.metadata": facts}
        package = aoti_compile_and_package(program, package_path=f"{folder}/model.pt2", inductor_configs=settings)
        return Path(package).read_bytes()


@contextmanager
def _compiled() -> Iterator[None]:
    """Convert the errors of AOTInductor and of the C++ compiler, which have many lines, to `BadInput`."""
    try:
        yield
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in lines if " error: " in line), lines[0] if lines else type(error).__name__)
        full = "No space left" in str(error)
        cure = f"free disk space in {gettempdir()}, or set TMPDIR to another folder" if full else "use the format pt2"
        raise BadInput(f"AOTInductor cannot compile this network ({reason}): {cure}") from error


def _onnx_runner(content: bytes) -> tuple[str, Run]:
    if find_spec("onnxruntime"):
        from onnxruntime import InferenceSession

        try:
            session = InferenceSession(content, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has many classes of errors
            raise BadInput(
                f"onnxruntime cannot run this network ({first_line(error)}): convert it to float32 with model.float(), "
                "or use the format pt2"
            ) from error
        return "onnxruntime", lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    import onnx
    from onnx.reference import ReferenceEvaluator

    def run(images: Tensor) -> Tensor:
        (scores,) = evaluator.run(None, {"images": images.numpy()})
        return torch.from_numpy(scores)

    evaluator = ReferenceEvaluator(onnx.load_from_string(content))
    return "onnx.reference", run


def _aoti_runner(content: bytes) -> tuple[str, Run]:
    from torch._inductor import aoti_load_package

    with _compiled(), TemporaryDirectory() as folder:
        file = Path(folder, "model.pt2")
        file.write_bytes(content)
        return "AOTInductor", aoti_load_package(str(file))


def _pt2_runner(content: bytes) -> tuple[str, Run]:
    return "torch.export", torch.export.load(io.BytesIO(content)).module()
