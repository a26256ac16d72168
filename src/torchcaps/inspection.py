"""Inspection of a capsule network: which parts of an image support each class in each routing iteration."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.capsules import Capsules, Prediction
from torchcaps.checks import described
from torchcaps.classifier import Classifier, check_finite
from torchcaps.errors import BadInput, captions
from torchcaps.feature_maps import feature_maps, in_the_image, place_of
from torchcaps.pictures import COLOURS, as_picture
from torchcaps.recording import RECORDING, Layer, equal_parts, recorded
from torchcaps.scores import scores_apart
from torchcaps.threads import evaluating

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Inspection:
    """Result of `inspect`: what a capsule network computed for one image.

    Arguments:
        image: the network's input ``[C, H, W]``.
        class_names: name of each class.
        scores: ``[classes]``, score of each class.
        support: ``[passes, classes, H, W]``: for each pass (routing iteration) and class, the fraction of the support
            that comes from each pixel. The values of one pass and class sum to 1. If the first capsules have only one
            site, as in `EfficientCapsNet`, all pixels have the same value.
        poses: ``[classes, R, N]``, poses of the class capsules.
        reconstruction: ``[C, H, W]``, reconstructed from the class with the highest score; None for a network without a
            decoder.
    """

    image: Float[Tensor, "C H W"]
    class_names: tuple[str, ...]
    scores: Float[Tensor, " classes"]
    support: Float[Tensor, "passes classes H W"]
    poses: Float[Tensor, "classes R N"]
    reconstruction: Float[Tensor, "C H W"] | None

    @property
    def best(self) -> int:
        """Index of the class with the highest score."""
        return int(self.scores.argmax())

    def figure(self, count: int = 3) -> "Figure":
        """Draw image, reconstruction, the 20 highest scores, and `support` for the ``count`` top-scoring classes."""
        try:
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("a figure needs matplotlib: pip install 'torchcaps[train]'") from error

        passes, classes = self.support.shape[:2]
        ranked = self.scores.argsort(descending=True, stable=True).tolist()
        best, shown = ranked[:count], sorted(ranked[: max(20, count)])
        rows = max(len(best), 1 if self.reconstruction is None else 2)
        figure = Figure(figsize=(2.2 * (passes + 2), 2.3 * rows), layout="constrained")
        axes = figure.subplots(rows, passes + 2, squeeze=False)
        picture = as_picture(self.image)
        labels = captions(self.class_names)
        numbers = scores_apart(self.scores[best].tolist())
        for row, index in enumerate(best):
            for number in range(passes):
                axis = axes[row, 2 + number]
                axis.imshow(picture, cmap="gray", vmin=0, vmax=1)
                axis.imshow(self.support[number, index].numpy(), cmap="inferno", alpha=0.65, vmin=0)
                if not row:
                    axis.set_title(f"iteration {number + 1}", fontsize=9)
            axes[row, 2].set_ylabel(f"{labels[index]}: {numbers[row]}", fontsize=9, parse_math=False)
        axes[0, 0].imshow(picture, cmap="gray", vmin=0, vmax=1)
        axes[0, 0].set_title("image", fontsize=9)
        if self.reconstruction is not None:
            axes[1, 0].imshow(as_picture(self.reconstruction.clamp(0, 1)), cmap="gray", vmin=0, vmax=1)
            axes[1, 0].set_title("reconstruction", fontsize=9)
        for axis in axes.flat:
            axis.set(xticks=[], yticks=[])
        bars = axes[0, 1]
        colours = [COLOURS[0] if index in best else COLOURS[3] for index in shown]
        bars.barh(range(len(shown)), self.scores[shown].numpy(), color=colours)
        labels = captions(self.class_names, 12)
        bars.set_yticks(range(len(shown)), [labels[index] for index in shown], fontsize=7, parse_math=False)
        bars.invert_yaxis()
        bars.set_title("scores" if len(shown) == classes else f"{len(shown)} highest scores", fontsize=9)
        bars.xaxis.set_major_locator(MaxNLocator(3))
        bars.tick_params(axis="x", labelsize=7)
        if ((self.scores >= 0) & (self.scores <= 1)).all():
            bars.set_xlim(0, 1)
        for axis in (
            *axes[1:, 1],
            *axes[2 if self.reconstruction is not None else 1 :, 0],
            *axes[len(best) :, 2:].flat,
        ):
            axis.axis("off")
        return figure


def inspect(classifier: Classifier, image: str | Path | Tensor | np.ndarray) -> Inspection:
    """Run a network on one image and trace every class back to the parts of the image that support it.

    For each pass of the last layer, `Layer.support` computes how much each child supports each class. In every layer
    below, the support of each parent is distributed among its children, in proportion to activation · coupling in the
    last pass, or by `Layer.support` if the rule ignores activations. The support of each site of the first capsules is
    then distributed among the pixels around the centre of its receptive field. Poses and activations may change between
    two layers, but a skip connection around a capsule layer is not taken into account.

    If the preprocessing has a crop, the network is run on the central crop. With ``test_crops`` above 1, the scores
    therefore differ from those of `Classifier.predict`, which are means over several crops.

    Arguments:
        classifier: a trained capsule network, for example loaded with `Classifier.from_pretrained`.
        image: path of an image file; uint8 pixels ``[C, H, W]``, as a tensor or an array; or floating-point numbers
            ``[C, H, W]`` that are already preprocessed as the network's input.

    Raises:
        BadInput: the network has no capsules; the positions of its first capsules in the image are unknown; the rule of
            a layer does not call `Votes.moments`; the parents of a layer are not the children of the next layer, for
            example in a network with two heads, or they are its children in another order; the last layer does not have
            one capsule per class; the file cannot be read; or the pixels have the wrong dtype or shape.
        Diverged: a score is not finite.

    Example:
        >>> from torchcaps import CapsNet, Preprocessing
        >>> network = CapsNet((1, 20, 20), 3, convolution_channels=8, primary_types=2).eval()
        >>> classifier = Classifier(network, ("ant", "bee", "cat"), (1, 20, 20), Preprocessing())
        >>> inspect(classifier, torch.zeros(1, 20, 20, dtype=torch.uint8)).support.shape
        torch.Size([3, 3, 20, 20])
    """
    if not isinstance(classifier, Classifier):
        raise BadInput(
            f"classifier must be a Classifier; got {described(classifier)}: use Classifier(network, class_names, "
            "image_shape, Preprocessing())"
        )
    inputs, model = classifier.preprocessed(image), classifier.model
    if not torch.isfinite(inputs).all():
        raise BadInput("image contains NaN or Inf: give finite numbers")
    with (
        RECORDING,
        evaluating(model),
        recorded(model) as layers,
        feature_maps(model, layers, inputs) as maps,
        torch.no_grad(),
    ):
        prediction = model(inputs)
    check_finite(prediction.scores, model)
    if not layers or prediction.capsules is None:
        raise BadInput("this network has no capsules: inspect a network with a routing rule")
    for layer in layers:
        if not layer.passes:
            raise BadInput(f"the rule {layer.name} never calls Votes.moments: inspect a network with another rule")
    _check_chain(layers, prediction.capsules, prediction.scores.shape[1])
    # A layer such as SharedCaps counts every capsule as a site of its own. The first capsules show the positions.
    same = [one for one in maps.capsules if all(equal_parts(one, layers[0].children))]
    positions = (same[0] if same else layers[0].children).activation.shape[1]
    place = place_of(maps, positions, sure=bool(same))
    support = in_the_image(_support_below(layers), place, inputs.shape[2], inputs.shape[3])
    return _inspection(classifier, inputs, prediction, support)


def about_crops(classifier: Classifier) -> str:
    """Return a remark if the classifier averages the scores of several crops, because `inspect` uses one crop only."""
    crops = classifier.preprocessing.test_crops**2
    return f", central crop; predictions average {crops} crops" if crops > 1 else ""


def _check_chain(layers: list[Layer], last: Capsules, classes: int) -> None:
    """Check that each layer takes the capsules of the layer before it, and that `last` has one capsule per class.

    A network may change poses or activations between two layers, but not the order of the capsules.

    Raises:
        BadInput: the layers are no such chain.
    """
    if not all(all(equal_parts(layers[0].children, run.children)) for run in layers[0].runs):
        raise BadInput(
            f"the rule {layers[0].name} ran with different children: inspect a network that runs its first capsule "
            "layer on one input only"
        )
    for number, (lower, upper) in enumerate(pairwise(layers), start=1):
        below, above = (one.activation[0].numel() for one in (lower.parents, upper.children))
        siblings = any(equal_parts(other.children, upper.children)[0] for other in layers[:number])
        if _reordered(lower.parents, upper.children):
            raise BadInput(
                f"the children of {upper.name} are the parents of {lower.name} in another order: inspect a network "
                "that keeps the capsules in the order of sites, and of types at each site"
            )
        if below != above or (siblings and not any(equal_parts(lower.parents, upper.children))):
            raise BadInput(
                f"the parents of {lower.name} are not the children of {upper.name}: inspect a network in which each "
                "capsule layer takes the capsules of the layer before it"
            )
    if not any(equal_parts(layers[-1].parents, last)):
        raise BadInput(
            f"the parents of the last rule, {layers[-1].name}, are not the class capsules: inspect a network whose "
            "last capsule layer computes the class capsules"
        )
    sites, types = last.activation.shape[1:]
    if (sites, types) != (1, classes):
        raise BadInput(
            f"the last capsule layer (rule {layers[-1].name}) has {sites} sites and {types} parent types, but the "
            f"network has {classes} classes: inspect a network with one class capsule per class"
        )


def _reordered(below: Capsules, above: Capsules) -> bool:
    """Return whether the activations or the sums of the poses are the same, but in another order."""
    columns = min(below.pose.shape[4], above.pose.shape[4])
    keys = [(one.activation[0], one.pose[0, ..., :columns].sum(dim=(2, 3))) for one in (below, above)]
    pairs = [(one.flatten().to(other.dtype), other.flatten()) for one, other in zip(*keys, strict=True)]
    return any(
        one.shape == other.shape and not torch.equal(one, other) and torch.equal(one.sort().values, other.sort().values)
        for one, other in pairs
    )


def _support_below(layers: list[Layer]) -> Float[Tensor, "passes J S"]:
    """Compute the support for every class at the sites of the first capsules, in each pass of the last layer."""
    last = layers[-1]
    edges = last.routing_map.edges_on(torch.device("cpu"))
    maps = []
    for number in range(len(last.passes)):
        support = last.support(number).cpu()
        shape = support.shape[0], *last.children.activation.shape[1:]
        relevance = support.new_zeros(shape).index_add(1, edges[:, 0], support)
        children = next(run.children for run in last.runs if run.last_pass >= number)
        for layer in reversed(layers[:-1]):
            run = next((run for run in layer.runs if equal_parts(run.parents, children)[1]), layer.runs[-1])
            relevance, children = _passed_on(layer, relevance, run.last_pass), run.children
        maps.append(relevance.sum(dim=2))
    return torch.stack(maps).float()


def _passed_on(layer: Layer, relevance: Float[Tensor, "K P J"], number: int) -> Float[Tensor, "K S C"]:
    """Distribute the support of each parent among its children, in proportion to activation · coupling in a pass.

    If the rule ignores activations, `Layer.support` distributes it, so that a child whose pose is 0 gets nothing.
    """
    edges = layer.routing_map.edges_on(torch.device("cpu"))
    shares = (layer.shares(number) if layer.rule.weighs_activations else layer.support(number)).cpu()
    sites = layer.parents.activation.shape[1:]
    relevance = relevance.reshape(len(relevance), *sites)  # undo the flattening of sites between layers
    given = torch.einsum("kej,jec->kec", relevance[:, edges[:, 1]], shares)
    shape = len(relevance), *layer.children.activation.shape[1:]
    return given.new_zeros(shape).index_add(1, edges[:, 0], given)


def _inspection(classifier: Classifier, inputs: Tensor, prediction: Prediction, support: Tensor) -> Inspection:
    assert prediction.capsules is not None
    drawn = prediction.reconstruction
    return Inspection(
        inputs[0].float().cpu(),
        tuple(classifier.class_names),
        prediction.scores[0].float().cpu(),
        support,
        prediction.capsules.pose[0].flatten(0, 1).float().cpu(),
        None if drawn is None else drawn[0].float().cpu(),
    )
