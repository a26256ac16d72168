"""Run a trained capsule network on an image, a strip of digits or a rendered toy, for `torchcaps explore`."""

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional

from torchcaps.attacks import fgsm
from torchcaps.classifier import Classifier
from torchcaps.data import read_image
from torchcaps.data.image_file import read_for_network
from torchcaps.data.toys import AZIMUTHS, ELEVATIONS, LIGHTINGS, render_toy
from torchcaps.errors import BadInput
from torchcaps.inspection import Inspection, about_crops, inspect
from torchcaps.models import PooledCapsNet
from torchcaps.options import kinds_of
from torchcaps.pictures import stretched
from torchcaps.process_memory import release_free_memory
from torchcaps.routing import ROUTINGS, Routing, Rule

LOADED = 12
"""Number of networks that stay in memory. A network that runs with two rules counts as two networks."""
LONGEST_STRIP = 20
"""Largest number of digits in a strip."""
SIDE = 280
"""Height of a picture in the browser, in pixels."""


class Rules(NamedTuple):
    """Names of the routing rules that a network can use.

    Arguments:
        fitting: names of all rules that work with the network's weights.
        own: name of the rule that the network was trained with.
        iterations: number of iterations of the rule `own`; 0 if the rule has no such option.
    """

    fitting: list[str]
    own: str
    iterations: int


@dataclass(frozen=True)
class Explorer:
    """Networks to explore. Each network is loaded when it is first used.

    Arguments:
        sources: name of each network → its run folder, or its folder of published weights.
    """

    sources: dict[str, Path]
    _loaded: OrderedDict[tuple[str, str, int], Classifier] = field(default_factory=OrderedDict)
    _rules: dict[str, Rules] = field(default_factory=dict)
    _lock: Any = field(default_factory=RLock)

    def classifier(self, name: str, rule: str = "", iterations: int = 0) -> Classifier:
        """Load a network. If `rule` is given, it replaces the network's own routing rule.

        Arguments:
            name: name of the network.
            rule: name of a routing rule; if empty, the network keeps its own rule and its number of iterations.
            iterations: number of iterations of `rule`; 0 for the default of this rule.

        Raises:
            BadInput: the folder contains no classifier, or the rule does not fit the network's weights.
        """
        key = name, rule, iterations
        with self._lock:
            if key not in self._loaded:
                options = {"iterations": iterations} if iterations else {}
                changes: dict[str, Any] = {"routing": Routing(rule, **options)} if rule else {}
                self._loaded[key] = Classifier.from_pretrained(self.sources[name], **changes)
                if len(self._loaded) > LOADED:
                    self._loaded.popitem(last=False)
            self._loaded.move_to_end(key)
            return self._loaded[key]

    def rules(self, name: str) -> Rules:
        """Return the routing rules that a network can use.

        Raises:
            BadInput: the network has no capsules.
        """
        with self._lock:
            if name not in self._rules:
                self._rules[name] = self._find_rules(name)
            return self._rules[name]

    def _find_rules(self, name: str) -> Rules:
        own_rules = [module for module in self.classifier(name).model.modules() if isinstance(module, Rule)]
        own = next((known for known, kind in ROUTINGS.items() if own_rules and type(own_rules[-1]) is kind), "")
        if not own:
            raise BadInput(f"{self.sources[name]} contains no capsule network: give a network with a routing rule")
        fitting = [rule for rule in ROUTINGS if rule == own or self._fits(name, rule)]
        return Rules(fitting, own, int(own_rules[-1].saved_options.get("iterations", 0)))

    def _fits(self, name: str, rule: str) -> bool:
        try:
            self.classifier(name, rule)
        except (BadInput, ValueError):
            return False
        return True

    def read(self, name: str, path: str | Path) -> UInt8[Tensor, "C H W"]:
        """Read an image file, and convert it to the size and channels of the images that the network was trained on.

        If the network reads strips of digits, an image that is wider than a single digit keeps its aspect ratio.

        Raises:
            BadInput: the file cannot be read as an image, or the image is too wide for a strip.
        """
        classifier = self.classifier(name)
        channels, height, width = classifier.image_shape
        if self._reads_strips(name):
            strip = read_image(Path(path), 1)
            width = max(width, round(strip.shape[2] * height / strip.shape[1]))
            if width > LONGEST_STRIP * height:
                raise BadInput(
                    f"{path} is too wide for a strip of at most {LONGEST_STRIP} digits: cut it into shorter strips"
                )
        return read_for_network(Path(path), (channels, height, width), classifier.resize)

    def drawn(self, name: str, drawing: Float[np.ndarray, "height width"]) -> UInt8[Tensor, "C H W"]:
        """Convert a drawing to the size and channels of the network's training images; 0 is black, 255 is white."""
        channels, height, width = self.classifier(name).image_shape
        grey = torch.from_numpy(np.ascontiguousarray(drawing, dtype=np.float32))[None, None]
        if self._reads_strips(name):
            width = max(width, round(grey.shape[3] * height / grey.shape[2]))
        small = functional.interpolate(grey, size=(height, width), mode="area")[0]
        return small.round().clamp(0, 255).to(torch.uint8).expand(channels, -1, -1)

    def _reads_strips(self, name: str) -> bool:
        return isinstance(self.classifier(name).model, PooledCapsNet)

    def view(self, name: str, pixels: UInt8[Tensor, "C H W"], rule: str, iterations: int, epsilon: float) -> "View":
        """Run a network on an image. If ε is above 0, attack the image first, by the fast gradient sign method.

        Arguments:
            name: name of the network.
            pixels: image returned by `read` or `drawn`.
            rule: name of a routing rule that `rules` lists.
            iterations: number of iterations of the rule; ignored if the rule has no such option.
            epsilon: ε of the attack, the largest change of a pixel, where pixels are in [0, 1]; 0 for no attack.

        Raises:
            BadInput: the rule or the number of iterations does not fit the network.
        """
        own, own_iterations = self.rules(name)[1:]
        if rule not in ROUTINGS or "iterations" not in kinds_of(ROUTINGS[rule]):
            iterations = 0
        unchanged = (rule, iterations) == (own, own_iterations)
        classifier = self.classifier(name) if unchanged else self.classifier(name, rule, iterations)
        inputs = classifier.preprocessing.plain(pixels[None])[0]
        if epsilon > 0:
            inputs = attacked(classifier, pixels, epsilon)
        found = inspect(classifier, inputs)
        return View(found, self.order(classifier, found), about_crops(classifier))

    def order(self, classifier: Classifier, found: Inspection) -> list[str]:
        """Return the digits of a strip from left to right, sorted by the centre of the pixels that support them.

        These are the classes with the highest scores, one for each square of the strip: round(width / height). The list
        is empty for a network that does not read strips, and for an image too narrow to be a strip.
        """
        if not isinstance(classifier.model, PooledCapsNet) or found.image.shape[2] < 1.5 * found.image.shape[1]:
            return []
        digits = min(round(found.image.shape[2] / found.image.shape[1]), len(found.scores))
        present = found.scores.topk(digits).indices.tolist()
        columns = torch.arange(found.support.shape[3], device="cpu")
        centres = {index: float((found.support[-1, index].sum(dim=0) * columns).sum()) for index in present}
        return [found.class_names[index] for index in sorted(present, key=lambda index: centres[index])]


class View(NamedTuple):
    """Results of a network on one image, as the browser shows them.

    Arguments:
        found: scores, poses and supports of the classes in the image.
        order: digits of a strip from left to right; empty for any other image.
        remark: remark on the crop of the image; empty without crops.
    """

    found: Inspection
    order: list[str]
    remark: str = ""

    def sentence(self) -> str:
        """Describe the prediction in words."""
        if self.order:
            return f"From left to right: {', '.join(self.order)}"
        return f"{self.names()[self.found.best]} ({float(self.found.scores[self.found.best]):.2f}{self.remark})"

    def names(self) -> list[str]:
        """Return the class names. If several classes have the same name, each of them is followed by its index."""
        names = self.found.class_names
        return [f"{name} ({index})" if names.count(name) > 1 else name for index, name in enumerate(names)]

    def bars(self) -> dict[str, float]:
        """Return the score of each class, in [0, 1]; logits are converted to probabilities."""
        scores = self.found.scores
        if scores.min() < 0 or scores.max() > 1 + 1e-4:
            scores = scores.softmax(dim=0)
        return dict(zip(self.names(), scores.clamp(0, 1).tolist(), strict=True))

    def picture(self) -> UInt8[np.ndarray, "H W 3"]:
        """Return the network's input as an enlarged picture."""
        return enlarged(self.found.image)

    def pose(self) -> UInt8[np.ndarray, "H W 3"]:
        """Draw the pose of the predicted class: negative numbers are blue, positive numbers are red."""
        from matplotlib import colormaps

        pose = self.found.poses[self.found.best]
        share = 0.5 + 0.5 * pose / pose.abs().max().clamp_min(1e-12)
        colours = torch.from_numpy(colormaps["coolwarm"](share.numpy())[..., :3]).float().permute(2, 0, 1)
        return enlarged(colours, spread_out=False, side=80 if len(pose) == 1 else SIDE)

    def numbers(self) -> str:
        """Write the pose of the predicted class as numbers, row by row, for those who cannot see the colours."""
        rows = self.found.poses[self.found.best].tolist()
        return "; ".join(" ".join(f"{value:.2f}" for value in row) for row in rows)

    def support(self, number: int, index: int) -> UInt8[np.ndarray, "H W 3"]:
        """Draw the support of class `index` in colour over the picture. The first iteration has the `number` 1."""
        from matplotlib import colormaps

        maps = self.found.support[min(number, len(self.found.support)) - 1, index]
        warm = torch.from_numpy(colormaps["inferno"]((maps / maps.max().clamp_min(1e-12)).numpy())[..., :3]).float()
        grey = self.found.image.mean(dim=0) if len(self.found.image) == 3 else self.found.image[0]
        grey = stretched(grey)
        return enlarged((0.35 * grey[:, :, None] + 0.65 * warm).permute(2, 0, 1), spread_out=False)


def attacked(classifier: Classifier, pixels: UInt8[Tensor, "C H W"], epsilon: float) -> Float[Tensor, "C H W"]:
    """Attack an image by one step of the fast gradient sign method against the predicted class.

    Returns:
        The attacked image, preprocessed for the network.
    """
    device = next(classifier.model.parameters()).device
    images = (pixels[None].float() / 255).to(device)
    with torch.no_grad():
        labels = classifier.model(classifier.preprocessing.plain_of(images)).scores.argmax(dim=1)
    moved = fgsm(lambda x: classifier.model(classifier.preprocessing.plain_of(x)), images, labels, epsilon)
    return classifier.preprocessing.plain_of(moved)[0]


def redrawn(classifier: Classifier, found: Inspection, pose: list[float]) -> UInt8[np.ndarray, "H W 3"]:
    """Reconstruct an image from the capsule of the class with the highest score, with `pose` in place of its own pose.

    Raises:
        BadInput: the network has no decoder.
    """
    decoder = getattr(classifier.model, "decoder", None)
    if not isinstance(decoder, nn.Module):
        raise BadInput("this network has no decoder to draw the image of a changed pose: use a network with a decoder")
    best, device = found.best, next(decoder.parameters()).device
    poses = found.poses[None, None].clone()
    poses[0, 0, best] = torch.tensor(pose, device="cpu").view_as(found.poses[best])
    with torch.inference_mode():
        return enlarged(decoder(poses.to(device), torch.tensor([best], device=device))[0].cpu())


def toy_view(
    shape: tuple[int, int, int], category: int, instance: int, elevation: int, azimuth: int, lighting: int
) -> UInt8[Tensor, "2 H W"] | None:
    """Return a stereo pair of a toy, resized to a network's image `shape`; None unless the shape has two channels."""
    channels, height, width = shape
    if channels != 2:
        return None
    view = toy_views(category, instance)[elevation, azimuth // 2, lighting]
    if view.shape[1:] == (height, width):
        return view
    resized = functional.interpolate(view[None].float(), (height, width), mode="bilinear", antialias=True)[0]
    return resized.round().to(torch.uint8)


@lru_cache(maxsize=32)
def toy_views(category: int, instance: int) -> UInt8[Tensor, "elevation azimuth lighting 2 48 48"]:
    """Render all views of a toy. The seed of the rendering is 1."""
    views = torch.from_numpy(render_toy(category, instance, seed=1))
    release_free_memory()  # the C library keeps most of the memory that the rendering has used
    return views.unflatten(0, (len(ELEVATIONS), len(AZIMUTHS), len(LIGHTINGS)))


def enlarged(
    image: Float[Tensor, "C H W"], spread_out: bool = True, side: int = SIDE
) -> UInt8[np.ndarray, "height width 3"]:
    """Enlarge an image by an integer factor, to a height of about `side` pixels.

    With `spread_out`, the smallest value of the image becomes black and the largest becomes white.
    """
    image = image if image.shape[0] == 3 else image[:1].expand(3, -1, -1)
    if spread_out:
        image = stretched(image)
    times = max(1, round(side / image.shape[1]))
    large = image.repeat_interleave(times, dim=1).repeat_interleave(times, dim=2)
    return (255 * large.clamp(0, 1)).round().to(torch.uint8).permute(1, 2, 0).numpy()


def sources_of(source: Path | None) -> dict[str, Path]:
    """Find the networks to explore: the network in the folder `source`, or, without `source`, all networks in weights/.

    Raises:
        BadInput: the folder `source` contains no network, or weights/ contains none.
    """
    if source is not None:
        if not (source / "config.json").is_file():
            raise BadInput(f"{source} contains no network: give a run folder or a folder of weights")
        return {source.resolve().name: source}
    found = {path.parent.name: path.parent for path in sorted(Path("weights").glob("*/config.json"))}
    if not found:
        raise BadInput(
            "there is no network in the folder weights/: give a run folder, or run the command in a clone of torchcaps"
        )
    return found
