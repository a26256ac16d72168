"""What `torchcaps explore` shows: a trained capsule network on an image, a strip of digits or a rendered toy."""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional

from torchcaps.classifier import Classifier
from torchcaps.data import read_image
from torchcaps.data.toys import AZIMUTHS, ELEVATIONS, LIGHTINGS, render_toy
from torchcaps.errors import BadInput
from torchcaps.inspection import Inspection, inspect
from torchcaps.models import PooledCapsNet
from torchcaps.options import kinds_of
from torchcaps.routing import ROUTINGS, Routing

SIDE = 280
"""Height of a picture in the browser, in pixels."""


class Rules(NamedTuple):
    """The routing rules of a network.

    Arguments:
        fitting: names of the rules that work with the network's weights.
        own: the name of the rule it was trained with.
        iterations: of that rule; 0 if it has no such option.
    """

    fitting: list[str]
    own: str
    iterations: int


@dataclass(frozen=True)
class Explorer:
    """Networks to explore, loaded when they are first used.

    Arguments:
        sources: name → run folder or folder of published weights.
    """

    sources: dict[str, Path]
    _loaded: dict[tuple[str, str, int], Classifier] = field(default_factory=dict)

    def classifier(self, name: str, rule: str = "", iterations: int = 0) -> Classifier:
        """A network with its own routing rule, or with another rule or number of iterations.

        Raises:
            BadInput: the folder holds no classifier, or the rule does not fit its weights.
        """
        key = name, rule, iterations
        if key not in self._loaded:
            options = {"iterations": iterations} if iterations else {}
            changes: dict[str, Any] = {"routing": Routing(rule, **options)} if rule else {}
            self._loaded[key] = Classifier.from_pretrained(self.sources[name], **changes)
        return self._loaded[key]

    def rules(self, name: str) -> Rules:
        """The rules of a network.

        Raises:
            BadInput: it has no capsules.
        """
        own_rules = [module for module in self.classifier(name).model.modules() if hasattr(module, "for_layer")]
        own = next((known for known, kind in ROUTINGS.items() if own_rules and type(own_rules[-1]) is kind), "")
        if not own:
            raise BadInput(f"{self.sources[name]} holds no capsule network: explore one with a routing rule")
        fitting = [rule for rule in ROUTINGS if rule == own or self._fits(name, rule)]
        return Rules(fitting, own, int(cast(Any, own_rules[-1]).saved_options.get("iterations", 0)))

    def _fits(self, name: str, rule: str) -> bool:
        try:
            self.classifier(name, rule)
        except (BadInput, ValueError):
            return False
        return True

    def read(self, name: str, path: str | Path) -> UInt8[Tensor, "C H W"]:
        """An image file as the network's stored image; a strip of digits keeps its width.

        Raises:
            BadInput: the file cannot be read as an image.
        """
        channels, height, width = self.classifier(name).image_shape
        if self._reads_strips(name):
            strip = read_image(Path(path), 1)
            width = max(width, round(strip.shape[2] * height / strip.shape[1]))
        return read_image(Path(path), 3 if channels == 3 else 1, (height, width)).expand(channels, -1, -1)

    def drawn(self, name: str, drawing: Float[np.ndarray, "height width"]) -> UInt8[Tensor, "C H W"]:
        """A drawing, 0 black to 255 white, as the network's stored image."""
        channels, height, width = self.classifier(name).image_shape
        grey = torch.from_numpy(np.ascontiguousarray(drawing, dtype=np.float32))[None, None]
        if self._reads_strips(name):
            width = max(width, round(grey.shape[3] * height / grey.shape[2]))
        small = functional.interpolate(grey, size=(height, width), mode="area")[0]
        return small.round().clamp(0, 255).to(torch.uint8).expand(channels, -1, -1)

    def _reads_strips(self, name: str) -> bool:
        return isinstance(self.classifier(name).model, PooledCapsNet)

    def view(self, name: str, pixels: UInt8[Tensor, "C H W"], rule: str, iterations: int, epsilon: float) -> "View":
        """Run a network on an image, attacked by the fast gradient sign method if ε is above 0.

        Arguments:
            name: of the network.
            pixels: its stored image, from `read` or `drawn`.
            rule: routing rule, one of those in `rules`.
            iterations: of the rule; ignored if it has no such option.
            epsilon: ε of the attack, the largest change of a pixel in [0, 1]; 0 for none.

        Raises:
            BadInput: the rule or the number of iterations does not fit the network.
        """
        own, own_iterations = self.rules(name)[1:]
        if rule not in ROUTINGS or "iterations" not in kinds_of(ROUTINGS[rule]):
            iterations = 0
        unchanged = (rule, iterations) == (own, own_iterations)
        classifier = self.classifier(name) if unchanged else self.classifier(name, rule, iterations)
        inputs = classifier.preparation.plain(pixels[None])[0]
        if epsilon > 0:
            inputs = attacked(classifier, pixels, epsilon)
        found = inspect(classifier, inputs)
        return View(found, self.order(classifier, found))

    def order(self, classifier: Classifier, found: Inspection) -> list[str]:
        """The digits of a strip from left to right, by the centres of their support; no other network has an order."""
        if not isinstance(classifier.model, PooledCapsNet) or found.image.shape[2] < 1.5 * found.image.shape[1]:
            return []
        present = [index for index, score in enumerate(found.scores.tolist()) if score > 0.5]
        columns = torch.arange(found.support.shape[3])
        centres = {index: float((found.support[-1, index].sum(dim=0) * columns).sum()) for index in present}
        return [found.class_names[index] for index in sorted(present, key=lambda index: centres[index])]


class View(NamedTuple):
    """What the browser shows of one image.

    Arguments:
        found: what the network did with it.
        order: the classes of a strip from left to right, or none.
    """

    found: Inspection
    order: list[str]

    def sentence(self) -> str:
        """The prediction in words."""
        if self.order:
            return f"From left to right: {', '.join(self.order)}"
        best = int(self.found.scores.argmax())
        return f"{self.found.class_names[best]} ({float(self.found.scores[best]):.2f})"

    def bars(self) -> dict[str, float]:
        """Class → score in [0, 1]; logits are turned into probabilities."""
        scores = self.found.scores
        if scores.min() < 0 or scores.max() > 1:
            scores = scores.softmax(dim=0)
        return dict(zip(self.found.class_names, scores.tolist(), strict=True))

    def picture(self) -> UInt8[np.ndarray, "H W 3"]:
        """The network's input, enlarged."""
        return enlarged(self.found.image)

    def pose(self) -> UInt8[np.ndarray, "H W 3"]:
        """The pose of the winning capsule as a picture: blue is negative, red positive."""
        from matplotlib import colormaps

        pose = self.found.poses[int(self.found.scores.argmax())]
        share = 0.5 + 0.5 * pose / pose.abs().max().clamp_min(1e-12)
        colours = torch.from_numpy(colormaps["coolwarm"](share.numpy())[..., :3]).float().permute(2, 0, 1)
        return enlarged(colours, spread_out=False, side=80 if len(pose) == 1 else SIDE)

    def support(self, number: int, class_name: str) -> UInt8[np.ndarray, "H W 3"]:
        """The picture with the support of a class in one pass, in colour."""
        from matplotlib import colormaps

        index = self.found.class_names.index(class_name)
        maps = self.found.support[min(number, len(self.found.support)) - 1, index]
        warm = torch.from_numpy(colormaps["inferno"]((maps / maps.max().clamp_min(1e-12)).numpy())[..., :3]).float()
        grey = self.found.image.mean(dim=0)
        grey = (grey - grey.min()) / (grey.max() - grey.min()).clamp_min(1e-6)
        return enlarged((0.35 * grey[:, :, None] + 0.65 * warm).permute(2, 0, 1), spread_out=False)


def attacked(classifier: Classifier, pixels: UInt8[Tensor, "C H W"], epsilon: float) -> Float[Tensor, "C H W"]:
    """The prepared image after a step of the fast gradient sign method against the predicted class."""
    images = (pixels[None].float() / 255).requires_grad_()
    with torch.enable_grad():
        scores = classifier.model(classifier.preparation.plain_of(images)).scores
        functional.cross_entropy(scores, scores.argmax(dim=1)).backward()
    assert images.grad is not None
    moved = (images + epsilon * images.grad.sign()).clamp(0, 1).detach()
    return classifier.preparation.plain_of(moved)[0]


def redrawn(classifier: Classifier, found: Inspection, pose: list[float]) -> UInt8[np.ndarray, "H W 3"]:
    """The reconstruction of the highest class with another pose.

    Raises:
        BadInput: the network has no decoder.
    """
    decoder = getattr(classifier.model, "decoder", None)
    if not isinstance(decoder, nn.Module):
        raise BadInput("this network has no decoder: train one with a decoder to change its pose")
    best = int(found.scores.argmax())
    poses = found.poses[None, None].clone()
    poses[0, 0, best] = torch.tensor(pose).view_as(found.poses[best])
    with torch.inference_mode():
        return enlarged(decoder(poses, torch.tensor([best]))[0])


@lru_cache(maxsize=32)
def toy_views(category: int, instance: int) -> UInt8[Tensor, "elevation azimuth lighting 2 48 48"]:
    """Every view of a toy that no network here was trained on: rendering 1."""
    views = torch.from_numpy(render_toy(category, instance, seed=1))
    return views.unflatten(0, (len(ELEVATIONS), len(AZIMUTHS), len(LIGHTINGS)))


def enlarged(
    image: Float[Tensor, "C H W"], spread_out: bool = True, side: int = SIDE
) -> UInt8[np.ndarray, "height width 3"]:
    """An image about `side` pixels high, in whole pixels; with `spread_out` its range becomes black to white."""
    image = image if image.shape[0] == 3 else image[:1].expand(3, -1, -1)
    if spread_out:
        image = (image - image.min()) / (image.max() - image.min()).clamp_min(1e-6)
    times = max(1, round(side / image.shape[1]))
    large = image.repeat_interleave(times, dim=1).repeat_interleave(times, dim=2)
    return (255 * large.clamp(0, 1)).round().to(torch.uint8).permute(1, 2, 0).numpy()


def sources_of(source: Path | None) -> dict[str, Path]:
    """The networks to explore: one folder, or those under weights/.

    Raises:
        BadInput: there are none.
    """
    if source is not None:
        if not (source / "config.json").is_file():
            raise BadInput(f"{source} holds no network: name a run folder or a folder of weights")
        return {source.name: source}
    found = {path.parent.name: path.parent for path in sorted(Path("weights").glob("*/config.json"))}
    if not found:
        raise BadInput("there is no folder weights/ here: name a run folder, or run the command in a clone")
    return found
