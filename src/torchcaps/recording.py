"""Recording of the routing passes of a network."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from threading import get_ident
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from torchcaps.capsules import Capsules
from torchcaps.checks import has_values
from torchcaps.routing import votes as routing_votes
from torchcaps.routing.agreement import Agreement, Means, Moments
from torchcaps.routing.rule import Rule
from torchcaps.routing.votes import Votes
from torchcaps.routing_map import RoutingMap
from torchcaps.threads import Lock

RECORDING = Lock()
"""Lock that ensures that only one thread at a time records the routing passes of a model."""


class Pass(NamedTuple):
    """One pass of a routing rule: the votes, the agreement and the moments.

    The agreement determines the couplings. The moments are the mass (sum of the weights), the mean and,
    if the rule needs it, the variance of the votes for each parent.
    """

    votes: Votes
    agreement: Agreement | None
    moments: Moments | Means


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
    rule: Rule
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
        all children sum to 1. The result is that of the first sample of the batch.
        """
        return self._divided(self._weights(number))

    @torch.no_grad()
    def support(self, number: int) -> Float[Tensor, "J E C"]:
        """Compute which fraction of each parent's mean vote comes from each child in pass ``number``, counted from 0.

        ::

            support_ij = max(0, w_ij V_ij · μ_j / |μ_j|), divided by its sum over the children of parent j

        Here w_ij = activation_i · coupling_ij is the weight of the vote V_ij, and μ_j is the mean vote for parent j.
        If a rule defines other `Rule.contributions` than w_ij V_ij, such as self-attention, they and their sum replace
        w_ij V_ij and μ_j. If the activation of a parent depends only on its mass, as in self-routing, this formula is
        not used: the method returns the result of `shares`. The result is that of the first sample of the batch.
        """
        if self.rule.activation_from_mass:
            return self.shares(number)
        votes, columns = self.passes[number].votes.materialised()[0], self.parents.pose.shape[4]
        given = self.rule.contributions(votes, self._weights(number).to(votes.dtype), columns).flatten(3)
        total = self.routing_map.sum_at_parents(given.sum(dim=2)[None])
        direction = self.routing_map.at_edges(functional.normalize(total, dim=3))[0]
        return self._divided(torch.einsum("jecn,jen->jec", given, direction).clamp_min(0))

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

    Training that follows does not change the record: it contains copies of the weights. A call that raises an error is
    not recorded. Record the network itself, not the result of `torch.compile`.

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
    running: list[tuple[Layer, Capsules, int]] = []
    copied: dict[tuple[int, bool], tuple[Tensor, int, Tensor]] = {}
    thread: int | None = get_ident()
    handles = []

    def discard(module: nn.Module) -> None:
        """Remove the record of a call that has not ended."""
        while running and any(layer.rule is module for layer, _, _ in running):
            layer, _, first = running.pop()
            del layer.passes[first:]
            layers[:] = [known for known in layers if known is not layer or known.runs]

    def copy(tensor: Tensor) -> Tensor:
        """Copy a tensor that training can change in place. A tensor is copied again only if it has changed."""
        if tensor.is_inference() or not has_values(tensor.detach()):  # the type of a weight is not Tensor
            return tensor
        key = tensor.data_ptr(), tensor.requires_grad and torch.is_grad_enabled()
        known, version, found = copied.get(key, (tensor, -1, tensor))
        same = known.shape == tensor.shape and known.stride() == tensor.stride()
        # Fused optimisers, and changes of tensor.data, do not change the version.
        if version != tensor._version or not same or not _equal(found, tensor):
            found = tensor.clone()
            copied[key] = tensor, tensor._version, found
        return found

    def begin(name: str) -> Any:
        def hook(module: Any, given: Any, *rest: Any) -> None:
            if get_ident() == thread:  # in other threads, PyTorch can leave out the keyword arguments
                named: Mapping[str, Any] = rest[0]
                discard(module)  # a call that Ctrl-C has interrupted
                children, _, routing_map, *_ = signature(module.forward).bind(*given, **named).arguments.values()
                same = [known for known in layers if known.name == name and known.routing_map is routing_map]
                if not same or any(equal_parts(same[-1].parents, children)):
                    layers.append(Layer(name, module, routing_map))
                    same = layers[-1:]
                running.append((same[-1], children, len(same[-1].passes)))

        return hook

    def end(module: nn.Module, given: Any, result: Any) -> None:
        if get_ident() != thread:
            return
        if result is None:  # the call has failed, or torch.utils.checkpoint has stopped its second computation
            discard(module)
        elif running and running[-1][0].rule is module:
            layer, children, _ = running.pop()
            parents = result if isinstance(result, Capsules) else result[0]
            layer.runs.append(Run(children, parents, len(layer.passes) - 1))

    def observe(votes: Votes, agreement: Agreement | None, moments: Moments | Means) -> None:
        if get_ident() == thread and running:
            entries = {} if agreement is None else agreement._asdict()  # an entry can be a weight of the rule
            copies: Any = {name: copy(x) for name, x in entries.items() if isinstance(x, Tensor)}
            kept = None if agreement is None else agreement._replace(**copies)
            running[-1][0].passes.append(Pass(votes.kept(copy), kept, moments))

    with RECORDING:
        for name, module in model.named_modules():
            if isinstance(module, Rule):
                handles.append(module.register_forward_pre_hook(begin(name), with_kwargs=True))
                handles.append(module.register_forward_hook(end, always_call=True))
        routing_votes.observers.append(observe)
        try:
            yield layers
        finally:
            routing_votes.observers.remove(observe)
            thread = None  # a copy of the model that was made meanwhile keeps the hooks
            for handle in handles:
                handle.remove()


@torch.no_grad()
def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal; NaN equals NaN."""
    return torch.equal(one.nan_to_num(), other.nan_to_num())


@torch.no_grad()
def equal_parts(one: Capsules, other: Capsules) -> tuple[bool, bool]:
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
