"""Inspection of a capsule network: which parts of an image support each class in each routing pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional

from torchcaps.capsules import Capsules, Prediction
from torchcaps.classifier import Classifier
from torchcaps.errors import BadInput, printable
from torchcaps.pictures import as_picture
from torchcaps.routing import votes as routing_votes
from torchcaps.routing.agreement import Agreement, Moments
from torchcaps.routing.votes import Votes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORDING = RLock()
"""Held while the passes of a model are recorded: the observer of votes belongs to the process."""


class Pass(NamedTuple):
    """One pass of a routing rule: its votes, the agreement that gave the couplings, and the moments."""

    votes: Votes
    agreement: Agreement | None
    moments: Moments


@dataclass
class Layer:
    """Record of what one capsule layer computed for an image.

    Arguments:
        name: name of the layer's routing rule in the network, such as ``class_capsules.routing``.
        passes: the passes of the rule, in order.
        children, parents: child capsules and parent capsules of the layer.
    """

    name: str
    passes: list[Pass] = field(default_factory=list)
    children: Capsules | None = None
    parents: Capsules | None = None

    @torch.no_grad()
    def shares(self, number: int) -> Float[Tensor, "J E C"]:
        """Compute which share of each parent's mass comes from each child along each edge, in one pass.

        The shares of a parent sum to 1. ``number`` is the index of the pass.
        """
        weights, parent = self._weights(number)
        return weights / self._at_edges(self._sums(weights, parent), parent)

    @torch.no_grad()
    def support(self, number: int) -> Float[Tensor, "J E C"]:
        """Compute which share of each parent's mean vote comes from each child along each edge, in pass ``number``.

        ::

            support_ij = max(0, w_ij V_ij · μ_j / |μ_j|), divided by its sum over the children of parent j

        Here w_ij = activation_i · coupling_ij is the weight of the vote V_ij, and μ_j is the mean vote for parent j.
        """
        weights, parent = self._weights(number)
        found = self.passes[number]
        votes = found.votes.materialised()[0].flatten(3)
        mean = functional.normalize(found.moments.mean[0].flatten(2), dim=2)
        along = torch.einsum("jecn,ejn->jec", votes, mean[parent].to(votes.dtype))
        weights = (weights * along).clamp_min(0)
        return weights / self._at_edges(self._sums(weights, parent), parent)

    def _weights(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the weights w_ij ``[J, E, C]``, and the parent site of every edge."""
        found = self.passes[number]
        edges = found.votes.routing_map.edges_on(found.moments.mass.device)
        return found.votes.weights(found.agreement)[0], edges[:, 1]

    def _sums(self, values: Tensor, parent: Tensor) -> Float[Tensor, "P J"]:
        sites = self.passes[0].votes.routing_map.parent_sites
        return values.new_zeros(sites, values.shape[0]).index_add(0, parent, values.sum(dim=2).mT)

    @staticmethod
    def _at_edges(sums: Tensor, parent: Tensor) -> Float[Tensor, "J E 1"]:
        return sums.clamp_min(torch.finfo(sums.dtype).tiny)[parent].mT[:, :, None]


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Layer]]:
    """Record every pass of every routing rule of a model, in the order in which the rules first run.

    A rule that runs several times, as in concurrent attention routing, has the passes of all its runs. Only the passes
    of this thread are recorded, and one thread at a time records.

    Example:
        >>> from torchcaps import CapsNet
        >>> model = CapsNet((1, 20, 20), 3, convolution_channels=8, primary_types=2).eval()
        >>> with recorded(model) as layers, torch.inference_mode():
        ...     prediction = model(torch.rand(1, 1, 20, 20))
        >>> [(layer.name, len(layer.passes)) for layer in layers]
        [('class_capsules.routing', 3)]
    """
    layers: list[Layer] = []
    running: list[Layer] = []
    thread, handles = get_ident(), []

    def begin(name: str) -> Any:
        def hook(module: nn.Module, given: Any) -> None:
            if get_ident() == thread:
                layer = next((known for known in layers if known.name == name), None)
                if layer is None:
                    layer = Layer(name)
                    layers.append(layer)
                layer.children = given[0]
                running.append(layer)

        return hook

    def end(module: nn.Module, given: Any, result: Any) -> None:
        if get_ident() == thread:
            running.pop().parents = result if isinstance(result, Capsules) else result[0]

    def observe(*found: Any) -> None:
        if get_ident() == thread and running:
            running[-1].passes.append(Pass(*found))

    with RECORDING:
        for name, module in model.named_modules():
            if hasattr(module, "for_layer"):
                handles += [module.register_forward_pre_hook(begin(name)), module.register_forward_hook(end)]
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
        support: ``[passes, classes, H, W]``, the share of the support for each class that comes from each pixel, in
            each routing pass. The values of one pass and class sum to 1. If the first capsules have only one site, as
            in `EfficientCapsNet`, all pixels have the same value.
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

    def figure(self, count: int = 3) -> "Figure":
        """Draw the image, all scores, the support for the ``count`` best classes in each pass, and a reconstruction."""
        from matplotlib.figure import Figure

        passes, classes = self.support.shape[:2]
        best = self.scores.argsort(descending=True)[: min(count, classes)].tolist()
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
            name = f"{printable(self.class_names[index])}: {self.scores[index]:.2f}"
            axes[row, 2].set_ylabel(name, fontsize=9, parse_math=False)
        axes[0, 0].imshow(picture, cmap="gray")
        axes[0, 0].set_title("image", fontsize=9)
        if self.reconstruction is not None and len(best) > 1:
            axes[1, 0].imshow(as_picture(self.reconstruction.clamp(0, 1)), cmap="gray")
            axes[1, 0].set_title("reconstruction", fontsize=9)
        for axis in axes.flat:
            axis.set_xticks([])
            axis.set_yticks([])
        bars = axes[0, 1]
        names = [printable(name)[:12] for name in self.class_names]
        colours = ["#0072B2" if index in best else "#999999" for index in range(classes)]
        bars.barh(range(classes), self.scores.numpy(), color=colours)
        bars.set_yticks(range(classes), names, fontsize=7, parse_math=False)
        bars.invert_yaxis()
        bars.set_title("scores", fontsize=9)
        for axis in (*axes[1:, 1], *axes[2 if self.reconstruction is not None else 1 :, 0]):
            axis.axis("off")
        return figure


def inspect(classifier: Classifier, image: str | Path | UInt8[Tensor, "C H W"] | Float[Tensor, "C H W"]) -> Inspection:
    """Run a network on one image and trace every class back to the parts of the image that support it.

    In each pass of the last layer, the couplings give the support of each child for a class (`Layer.support`). Every
    layer below distributes the support of its parents among its children, in proportion to the mass that comes from
    each child. The support on the grid of the first capsules is then interpolated to the size of the image.

    Arguments:
        classifier: a trained capsule network, for example loaded with `Classifier.from_pretrained`.
        image: path of an image file; uint8 pixels with the classifier's ``image_shape``; or a float tensor that is
            already prepared as the network's input.

    Raises:
        BadInput: the network has no capsules, or the positions of its first capsules in the image are unknown; or the
            file cannot be read, or the pixels have another shape.

    Example:
        >>> from torchcaps import CapsNet, Preparation
        >>> network = CapsNet((1, 20, 20), 3, convolution_channels=8, primary_types=2).eval()
        >>> classifier = Classifier(network, ("ant", "bee", "cat"), (1, 20, 20), Preparation())
        >>> inspect(classifier, torch.zeros(1, 20, 20, dtype=torch.uint8)).support.shape
        torch.Size([3, 3, 20, 20])
    """
    inputs = classifier.prepared(image)
    model, grids = classifier.model, []

    def look(module: nn.Module, given: Any, result: Any) -> None:
        if isinstance(result, Tensor) and result.ndim == 4:
            grids.append(result.shape[2:])

    handles = [module.register_forward_hook(look) for module in model.modules()]
    was_training = model.training
    model.eval()
    try:
        with recorded(model) as layers, torch.inference_mode():
            prediction = model(inputs)
            if not layers or prediction.capsules is None:
                raise BadInput("this network has no capsules: inspect a network with a routing rule")
            below = _support_below(layers)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    sites = below.shape[2]
    grid = next((shape for shape in reversed(grids) if shape.numel() == sites), None)
    if grid is None:
        raise BadInput(
            f"the first capsules have {sites} sites, and no layer has a feature map of this size: the positions of "
            "these capsules in the image are unknown"
        )
    maps = below.unflatten(2, tuple(grid))
    maps = functional.interpolate(maps, size=inputs.shape[2:], mode="bilinear", align_corners=False)
    maps = maps / maps.sum(dim=(2, 3), keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)
    return _inspection(classifier, inputs, prediction, maps)


def _support_below(layers: list[Layer]) -> Float[Tensor, "passes J S"]:
    """Compute the support for every class at the sites of the first capsules, in each pass of the last layer."""
    last = layers[-1]
    edges = last.passes[0].votes.routing_map.edges_on(torch.device("cpu"))
    assert last.children is not None
    maps = []
    for number in range(len(last.passes)):
        support = last.support(number).cpu()
        shape = support.shape[0], *last.children.activation.shape[1:]
        relevance = support.new_zeros(shape).index_add(1, edges[:, 0], support)
        for layer in reversed(layers[:-1]):
            relevance = _passed_on(layer, relevance)
        maps.append(relevance.sum(dim=2))
    return torch.stack(maps).float()


def _passed_on(layer: Layer, relevance: Float[Tensor, "K P J"]) -> Float[Tensor, "K S C"]:
    """Distribute the relevance of a layer's parents among its children, in proportion to the mass from each child."""
    edges = layer.passes[-1].votes.routing_map.edges_on(torch.device("cpu"))
    shares = layer.shares(len(layer.passes) - 1).cpu()
    given = torch.einsum("kej,jec->kec", relevance[:, edges[:, 1]], shares)
    assert layer.children is not None
    shape = len(relevance), *layer.children.activation.shape[1:]
    return given.new_zeros(shape).index_add(1, edges[:, 0], given)


def _inspection(classifier: Classifier, inputs: Tensor, prediction: Prediction, support: Tensor) -> Inspection:
    assert prediction.capsules is not None
    drawn = prediction.reconstruction
    return Inspection(
        inputs[0].cpu(),
        tuple(classifier.class_names),
        prediction.scores[0].float().cpu(),
        support,
        prediction.capsules.pose[0].flatten(0, 1).float().cpu(),
        None if drawn is None else drawn[0].float().cpu(),
    )
