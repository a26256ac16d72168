"""Inspection of a capsule network: which parts of an image support each class in each routing pass."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from itertools import pairwise
from pathlib import Path
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from torchcaps.capsules import Capsules, Prediction
from torchcaps.classifier import Classifier, evaluating
from torchcaps.errors import BadInput, caption
from torchcaps.feature_maps import feature_maps, in_the_image
from torchcaps.pictures import COLOURS, as_picture
from torchcaps.routing import votes as routing_votes
from torchcaps.routing.agreement import Agreement, Moments
from torchcaps.routing.votes import Votes
from torchcaps.routing_map import RoutingMap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORDING = RLock()
"""Lock that ensures that only one thread at a time records the routing passes of a model."""


class Pass(NamedTuple):
    """One pass of a routing rule: the votes, the agreement and the moments.

    The agreement determines the couplings. The moments are the mass (sum of the weights), mean and variance of the
    votes for each parent.
    """

    votes: Votes
    agreement: Agreement | None
    moments: Moments


class Run(NamedTuple):
    """One call of a routing rule: its children, its parents, and the index of its last pass in the `Layer`."""

    children: Capsules
    parents: Capsules
    last_pass: int


@dataclass
class Layer:
    """Record of what one capsule layer computed for an image.

    Arguments:
        name: module name of the layer's routing rule, as in ``named_modules()``, such as ``class_capsules.routing``.
        rule: the routing rule.
        routing_map: graph that connects the layer's child sites with its parent sites.
        passes: the passes of the rule, in order.
        runs: the calls of the rule, in order.
    """

    name: str
    rule: nn.Module
    routing_map: RoutingMap
    passes: list[Pass] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def children(self) -> Capsules:
        """Child capsules of the last call."""
        return self.runs[-1].children

    @property
    def parents(self) -> Capsules:
        """Parent capsules of the last call."""
        return self.runs[-1].parents

    @torch.no_grad()
    def shares(self, number: int) -> Float[Tensor, "J E C"]:
        """Compute which fraction of each parent's mass comes from each child in pass ``number``, counted from 0.

        The mass of a parent is the sum over its children of activation · coupling. For each parent, the fractions of
        all children sum to 1.
        """
        return self._divided(self._weights(number))

    @torch.no_grad()
    def support(self, number: int) -> Float[Tensor, "J E C"]:
        """Compute which fraction of each parent's mean vote comes from each child in pass ``number``, counted from 0.

        ::

            support_ij = max(0, w_ij V_ij · μ_j / |μ_j|), divided by its sum over the children of parent j

        Here w_ij = activation_i · coupling_ij is the weight of the vote V_ij, and μ_j is the mean vote for parent j.
        If the activation of a parent depends only on its mass, as in self-routing, this formula is not used: the method
        returns the result of `shares`.
        """
        if getattr(self.rule, "activation_from_mass", False):
            return self.shares(number)
        found, columns = self.passes[number], self.parents.pose.shape[4]  # a rule may append columns to the votes
        votes = found.votes.materialised()[0, ..., :columns].flatten(3)
        mean = functional.normalize(found.moments.mean[0, ..., :columns].flatten(2), dim=2)
        mean = self.routing_map.at_edges(mean.to(votes.dtype).transpose(0, 1)[None])[0]
        along = torch.einsum("jecn,jen->jec", votes, mean)
        return self._divided((self._weights(number) * along).clamp_min(0))

    def _weights(self, number: int) -> Float[Tensor, "J E C"]:
        """Return the weights w_ij."""
        found = self.passes[number]
        return found.votes.weights(found.agreement)[0]

    def _divided(self, values: Float[Tensor, "J E C"]) -> Float[Tensor, "J E C"]:
        """Divide each value by the sum of all values of the same parent. If the sum is 0, return equal fractions."""
        values = torch.where(self._sums(values) > 0, values, 1.0)
        return values / self._sums(values)

    def _sums(self, values: Float[Tensor, "J E C"]) -> Float[Tensor, "J E 1"]:
        """Sum the values over all children of each parent, and copy the sum of a parent to each of its edges."""
        sums = self.routing_map.sum_at_parents(values.sum(dim=2)[None])
        return self.routing_map.at_edges(sums)[0][:, :, None]


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Layer]]:
    """Context manager that records every pass of every routing rule of a model.

    It returns a list of `Layer`, filled in the order in which the rules first run. If a rule runs several times, the
    passes of all its runs are recorded in the same `Layer`. If a rule runs on its own parents, because a model uses one
    layer twice, the second run is recorded as another `Layer`. Passes of other threads are not recorded. If another
    thread is already recording, this thread waits until the other thread has finished.

    Arguments:
        model: network with routing rules.

    Example:
        >>> from torchcaps import CapsNet
        >>> model = CapsNet((1, 20, 20), 3, convolution_channels=8, primary_types=2).eval()
        >>> with recorded(model) as layers, torch.inference_mode():
        ...     prediction = model(torch.rand(1, 1, 20, 20))
        >>> [(layer.name, len(layer.passes)) for layer in layers]
        [('class_capsules.routing', 3)]
    """
    layers: list[Layer] = []
    running: list[tuple[Layer, Capsules]] = []
    thread, handles = get_ident(), []

    def begin(name: str) -> Any:
        def hook(module: nn.Module, given: Any, named: Mapping[str, Any]) -> None:
            if get_ident() == thread:
                children, _, routing_map, *_ = signature(module.forward).bind(*given, **named).arguments.values()
                same = [known for known in layers if known.name == name and known.routing_map is routing_map]
                if not same or any(_equal(same[-1].parents, children)):
                    layers.append(Layer(name, module, routing_map))
                    same = layers[-1:]
                running.append((same[-1], children))

        return hook

    def end(module: nn.Module, given: Any, result: Any) -> None:
        if get_ident() == thread:
            layer, children = running.pop()
            parents = result if isinstance(result, Capsules) else result[0]
            layer.runs.append(Run(children, parents, len(layer.passes) - 1))

    def observe(*found: Any) -> None:
        if before is not None:
            before(*found)
        if get_ident() == thread and running:
            running[-1][0].passes.append(Pass(*found))

    with RECORDING:
        for name, module in model.named_modules():
            if hasattr(module, "for_layer"):
                handles.append(module.register_forward_pre_hook(begin(name), with_kwargs=True))
                handles.append(module.register_forward_hook(end))
        before, routing_votes.observer = routing_votes.observer, observe
        try:
            yield layers
        finally:
            routing_votes.observer = before
            for handle in handles:
                handle.remove()


@dataclass(frozen=True)
class Inspection:
    """Result of `inspect`: what a capsule network computed for one image.

    Arguments:
        image: the network's input ``[C, H, W]``.
        class_names: name of each class.
        scores: ``[classes]``, score of each class.
        support: ``[passes, classes, H, W]``: for each routing pass and class, the fraction of the support that comes
            from each pixel. The values of one pass and class sum to 1. If the first capsules have only one site, as in
            `EfficientCapsNet`, all pixels have the same value.
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
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("a figure needs matplotlib: pip install 'torchcaps[train]'") from error

        passes, classes = self.support.shape[:2]
        ranked = self.scores.argsort(descending=True, stable=True).tolist()
        best, shown = ranked[:count], sorted(ranked[: max(20, count)])
        figure = Figure(figsize=(2.2 * (passes + 2), 2.3 * len(best)), layout="constrained")
        axes = figure.subplots(len(best), passes + 2, squeeze=False)
        picture = as_picture(self.image)
        for row, index in enumerate(best):
            for number in range(passes):
                axis = axes[row, 2 + number]
                axis.imshow(picture, cmap="gray")
                axis.imshow(self.support[number, index].numpy(), cmap="inferno", alpha=0.65, vmin=0)
                if not row:
                    axis.set_title(f"pass {number + 1}", fontsize=9)
            name = f"{caption(self.class_names[index])}: {self.scores[index]:.2f}"
            axes[row, 2].set_ylabel(name, fontsize=9, parse_math=False)
        axes[0, 0].imshow(picture, cmap="gray")
        axes[0, 0].set_title("image", fontsize=9)
        if self.reconstruction is not None and len(best) > 1:
            axes[1, 0].imshow(as_picture(self.reconstruction.clamp(0, 1)), cmap="gray")
            axes[1, 0].set_title("reconstruction", fontsize=9)
        for axis in axes.flat:
            axis.set(xticks=[], yticks=[])
        bars = axes[0, 1]
        colours = [COLOURS[0] if index in best else COLOURS[3] for index in shown]
        bars.barh(range(len(shown)), self.scores[shown].numpy(), color=colours)
        names = [caption(self.class_names[index], 12) for index in shown]
        bars.set_yticks(range(len(shown)), names, fontsize=7, parse_math=False)
        bars.invert_yaxis()
        bars.set_title("scores" if len(shown) == classes else f"{len(shown)} highest scores", fontsize=9)
        for axis in (*axes[1:, 1], *axes[2 if self.reconstruction is not None else 1 :, 0]):
            axis.axis("off")
        return figure


def inspect(classifier: Classifier, image: str | Path | Tensor | np.ndarray) -> Inspection:
    """Run a network on one image and trace every class back to the parts of the image that support it.

    For each pass of the last layer, `Layer.support` computes how much each child supports each class. In every layer
    below, the support of each parent is distributed among its children, in proportion to activation · coupling. The
    support on the grid of the first capsules is then interpolated to the size of the image.

    If the preprocessing has a crop, the network is run on the central crop. With ``test_crops`` above 1, the scores
    therefore differ from those of `Classifier.predict`, which are means over several crops.

    Arguments:
        classifier: a trained capsule network, for example loaded with `Classifier.from_pretrained`.
        image: path of an image file; uint8 pixels ``[C, H, W]``, as a tensor or an array; or floating-point numbers
            ``[C, H, W]`` that are already preprocessed as the network's input.

    Raises:
        BadInput: the network has no capsules; the positions of its first capsules in the image are unknown; the rule of
            a layer does not call `Votes.moments`; the parents of a layer are not the children of the next layer, for
            example in a network with two heads; the last layer does not have one capsule per class; the file cannot be
            read; or the pixels have the wrong dtype or shape.

    Example:
        >>> from torchcaps import CapsNet, Preprocessing
        >>> network = CapsNet((1, 20, 20), 3, convolution_channels=8, primary_types=2).eval()
        >>> classifier = Classifier(network, ("ant", "bee", "cat"), (1, 20, 20), Preprocessing())
        >>> inspect(classifier, torch.zeros(1, 20, 20, dtype=torch.uint8)).support.shape
        torch.Size([3, 3, 20, 20])
    """
    inputs, model = classifier.preprocessed(image), classifier.model
    with (
        RECORDING,
        evaluating(model),
        recorded(model) as layers,
        feature_maps(model, layers, inputs) as maps,
        torch.no_grad(),
    ):
        prediction = model(inputs)
    if not layers or prediction.capsules is None:
        raise BadInput("this network has no capsules: inspect a network with a routing rule")
    for layer in layers:
        if not layer.passes:
            raise BadInput(f"the rule {layer.name} never calls Votes.moments: inspect a network with another rule")
    _check_chain(layers, prediction.capsules, prediction.scores.shape[1])
    support = in_the_image(_support_below(layers), maps, inputs.shape[2], inputs.shape[3])
    return _inspection(classifier, inputs, prediction, support)


def about_crops(classifier: Classifier) -> str:
    """Return a remark if the classifier averages the scores of several crops, because `inspect` uses one crop only."""
    crops = classifier.preprocessing.test_crops**2
    return f", central crop; predictions average {crops} crops" if crops > 1 else ""


def _check_chain(layers: list[Layer], last: Capsules, classes: int) -> None:
    """Check that each layer takes the capsules of the layer before it, and that `last` has one capsule per class.

    A network may change poses or activations between two layers.

    Raises:
        BadInput: the layers are no such chain.
    """
    if not all(all(_equal(layers[0].children, run.children)) for run in layers[0].runs):
        raise BadInput(
            f"the rule {layers[0].name} ran with different children: inspect a network that runs its first capsule "
            "layer on one input only"
        )
    for number, (lower, upper) in enumerate(pairwise(layers), start=1):
        below, above = (one.activation[0].numel() for one in (lower.parents, upper.children))
        siblings = any(_equal(other.children, upper.children)[0] for other in layers[:number])
        if below != above or (siblings and not any(_equal(lower.parents, upper.children))):
            raise BadInput(
                f"the parents of {lower.name} are not the children of {upper.name}: inspect a network in which each "
                "capsule layer takes the capsules of the layer before it"
            )
    if not any(_equal(layers[-1].parents, last)):
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


def _equal(one: Capsules, other: Capsules) -> tuple[bool, bool]:
    """Return whether two groups of capsules have the same activations, and whether they have the same poses.

    If one group has poses with more columns, such as coordinates that a layer appends, these columns are not compared.
    """
    columns = min(one.pose.shape[4], other.pose.shape[4])
    pairs = (one.activation, other.activation), (one.pose[..., :columns], other.pose[..., :columns])
    same = [
        first.flatten(1).shape == second.flatten(1).shape
        and torch.equal(first.flatten(1).nan_to_num().to(second.dtype), second.flatten(1).nan_to_num())
        for first, second in pairs
    ]
    return same[0], same[1]


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
            run = next((run for run in layer.runs if _equal(run.parents, children)[1]), layer.runs[-1])
            relevance, children = _passed_on(layer, relevance, run.last_pass), run.children
        maps.append(relevance.sum(dim=2))
    return torch.stack(maps).float()


def _passed_on(layer: Layer, relevance: Float[Tensor, "K P J"], number: int) -> Float[Tensor, "K S C"]:
    """Distribute the support of each parent among its children, in proportion to activation · coupling in a pass."""
    edges = layer.routing_map.edges_on(torch.device("cpu"))
    shares = layer.shares(number).cpu()
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
