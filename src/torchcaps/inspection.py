"""Look inside a capsule network: which parts of an image support each class, pass by pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional

from torchcaps.capsules import Capsules, Prediction
from torchcaps.classifier import Classifier
from torchcaps.errors import BadInput, printable
from torchcaps.routing import votes as routing_votes
from torchcaps.routing.agreement import Agreement, Moments
from torchcaps.routing.votes import Votes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Pass(NamedTuple):
    """One pass of a routing rule: its votes, the agreement that gave the couplings, and the moments."""

    votes: Votes
    agreement: Agreement | None
    moments: Moments


@dataclass
class Layer:
    """What one layer of capsules did with an image.

    Arguments:
        name: of the layer's routing rule in the network, such as ``class_capsules.routing``.
        passes: in their order.
        children, parents: the capsules below and above.
    """

    name: str
    passes: list[Pass] = field(default_factory=list)
    children: Capsules | None = None
    parents: Capsules | None = None

    @torch.no_grad()
    def shares(self, number: int) -> Float[Tensor, "J E C"]:
        """The share of each parent's mass that comes from each child along each edge; 1 in all for a parent."""
        weights, parent = self._weights(number)
        return weights / self._at_edges(self._sums(weights, parent), parent)

    @torch.no_grad()
    def support(self, number: int) -> Float[Tensor, "J E C"]:
        """The share of each parent's mean vote that comes from each child along each edge.

        ::

            support_ij = max(0, w_ij V_ij · μ_j / |μ_j|), divided by its sum over the children of parent j

        with the weight w_ij = activation_i · coupling_ij, the vote V_ij and the mean vote μ_j.
        """
        weights, parent = self._weights(number)
        found = self.passes[number]
        votes = found.votes.materialised()[0].flatten(3)
        mean = functional.normalize(found.moments.mean[0].flatten(2), dim=2)
        along = torch.einsum("jecn,ejn->jec", votes, mean[parent].to(votes.dtype))
        weights = (weights * along).clamp_min(0)
        return weights / self._at_edges(self._sums(weights, parent), parent)

    def _weights(self, number: int) -> tuple[Tensor, Tensor]:
        """w_ij ``[J, E, C]``, and the parent of every edge."""
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
    """Record every pass of every routing rule of a model, in the order in which the rules run.

    Example:
        >>> from torchcaps import CapsNet
        >>> model = CapsNet((1, 20, 20), 3, convolution_channels=8, primary_types=2).eval()
        >>> with recorded(model) as layers, torch.inference_mode():
        ...     prediction = model(torch.rand(1, 1, 20, 20))
        >>> [(layer.name, len(layer.passes)) for layer in layers]
        [('class_capsules.routing', 3)]
    """
    layers: list[Layer] = []
    handles = []

    def begin(name: str) -> Any:
        return lambda module, given: layers.append(Layer(name, children=given[0]))

    def end(module: nn.Module, given: Any, result: Any) -> None:
        layers[-1].parents = result if isinstance(result, Capsules) else result[0]

    for name, module in model.named_modules():
        if hasattr(module, "for_layer"):
            handles += [module.register_forward_pre_hook(begin(name)), module.register_forward_hook(end)]
    before, routing_votes.observer = routing_votes.observer, lambda *found: layers[-1].passes.append(Pass(*found))
    try:
        yield layers
    finally:
        routing_votes.observer = before
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Inspection:
    """What a capsule network did with one image.

    Arguments:
        image: the network's input ``[C, H, W]``.
        class_names: one per class.
        scores: ``[classes]``.
        support: ``[passes, classes, H, W]``, the share of each class's support per routing pass and pixel; the values
            of a class and pass sum to 1. A network whose first capsules have one site, such as `EfficientCapsNet`, has
            the same value everywhere.
        poses: of the class capsules ``[classes, R, N]``.
        reconstruction: of the highest class, ``[C, H, W]``, or None for a network without a decoder.
    """

    image: Float[Tensor, "C H W"]
    class_names: tuple[str, ...]
    scores: Float[Tensor, " classes"]
    support: Float[Tensor, "passes classes H W"]
    poses: Float[Tensor, "classes R N"]
    reconstruction: Float[Tensor, "C H W"] | None

    def figure(self, count: int = 3) -> "Figure":
        """The image, the scores, the support of the `count` highest classes in each pass, and the reconstruction."""
        from matplotlib.figure import Figure

        passes, classes = self.support.shape[:2]
        best = self.scores.argsort(descending=True)[: min(count, classes)].tolist()
        figure = Figure(figsize=(2.2 * (passes + 2), 2.3 * len(best)), layout="constrained")
        axes = figure.subplots(len(best), passes + 2, squeeze=False)
        picture = _picture(self.image)
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
            axes[1, 0].imshow(_picture(self.reconstruction.clamp(0, 1)), cmap="gray")
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

    The couplings of each pass give the support of a class on the capsules below (`Layer.support`). The layers below
    distribute it among their children in proportion to the mass that each child gives. The result on the grid of the
    first capsules is interpolated to the image.

    Arguments:
        classifier: a trained capsule network, as `Classifier.from_pretrained` loads it.
        image: a file; uint8 pixels of the classifier's ``image_shape``; or a float tensor, the prepared input.

    Raises:
        BadInput: the network has no capsules, the file cannot be read, or the pixels have another shape.

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
                raise BadInput("this network has no capsules: inspect one with a routing rule")
            below = _support_below(layers)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    sites = below.shape[2]
    grid = next((shape for shape in reversed(grids) if shape.numel() == sites), None)
    if grid is None:
        raise BadInput(
            f"the first capsules have {sites} sites, and no layer has a feature map of this size: their position in "
            "the image is unknown"
        )
    maps = below.unflatten(2, tuple(grid))
    maps = functional.interpolate(maps, size=inputs.shape[2:], mode="bilinear", align_corners=False)
    maps = maps / maps.sum(dim=(2, 3), keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)
    return _inspection(classifier, inputs, prediction, maps)


def _support_below(layers: list[Layer]) -> Float[Tensor, "passes J S"]:
    """The support of every class, by its last layer's passes, at the sites of the first capsules."""
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
    """Distribute the relevance of a layer's parents among their children, in proportion to the mass from each child."""
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


def _picture(image: Tensor) -> Any:
    """As matplotlib draws it: three channels in colour, others by the first; any range becomes [0, 1]."""
    image = image if image.shape[0] == 3 else image[:1]
    low, high = image.min(), image.max()
    return ((image - low) / (high - low).clamp_min(1e-6)).permute(1, 2, 0).squeeze(-1).numpy()
