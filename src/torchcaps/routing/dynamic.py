"""Dynamic routing: Sabour, Frosst & Hinton 2017, and its reading as clustering by Su 2018."""

import inspect
from typing import Any, Literal, cast, get_args, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.capsules import Capsules, SquashForm, check_capsules, lengths, squash
from torchcaps.checks import check_choice, check_iterations
from torchcaps.kernels import Backend
from torchcaps.routing.rule import LayerShape
from torchcaps.routing.votes import Agreement, Votes
from torchcaps.routing_map import RoutingMap

Logits = Literal["cumulative", "latest"]
GradientPasses = Literal["all", "last"]


@overload
def dynamic_routing(
    pose: Tensor,
    transform: Tensor,
    routing_map: RoutingMap,
    *,
    iterations: int = ...,
    logits: Logits = ...,
    squash_form: SquashForm = ...,
    inner_squash_form: SquashForm | None = ...,
    gradient_passes: GradientPasses = ...,
    leaky: bool = ...,
    return_couplings: Literal[False] = ...,
    backend: Backend = ...,
) -> Capsules: ...
@overload
def dynamic_routing(
    pose: Tensor,
    transform: Tensor,
    routing_map: RoutingMap,
    *,
    iterations: int = ...,
    logits: Logits = ...,
    squash_form: SquashForm = ...,
    inner_squash_form: SquashForm | None = ...,
    gradient_passes: GradientPasses = ...,
    leaky: bool = ...,
    return_couplings: Literal[True],
    backend: Backend = ...,
) -> tuple[Capsules, Tensor]: ...
def dynamic_routing(
    pose: Float[Tensor, "B S C R Q"],
    transform: Float[Tensor, "K C J Q N"],
    routing_map: RoutingMap,
    *,
    iterations: int = 3,
    logits: Logits = "cumulative",
    squash_form: SquashForm = "sabour",
    inner_squash_form: SquashForm | None = None,
    gradient_passes: GradientPasses = "all",
    leaky: bool = False,
    return_couplings: bool = False,
    backend: Backend = "auto",
) -> Capsules | tuple[Capsules, Float[Tensor, "B J E C"]]:
    """Route votes to parents by agreement: Sabour, Frosst & Hinton 2017 (arXiv 1710.09829), procedure 1.

    ::

        û_ij = u_i W_ij            b_ij = 0
        repeat `iterations` times:
            c_i = softmax over every parent that child i reaches (b_i)
            v_j = squash(Σ_i c_ij û_ij)
            b_ij = b_ij + û_ij · v_j      (cumulative)   or   û_ij · v_j      (latest; Su 2018)

    A child's activation is the length of its pose, so a child of zero length counts for nothing. Computed in the
    wider of the two dtypes, never in reduced precision, whatever autocast says.

    Arguments:
        pose: ``[B, S, C, R, Q]``, poses of the children.
        transform: ``[K, C, J, Q, N]``, the map's transforms.
        routing_map: which child site feeds which parent site.
        iterations: T, from 1 to 1,000. With 1 the couplings are uniform.
        logits: ``cumulative`` (the paper), or ``latest`` pass only: then more passes are simply better.
        squash_form: applied to the parents in the last pass; see `squash`.
        inner_squash_form: applied in all passes before the last; None means the same. Su's code is
            ``logits="latest", squash_form="su", inner_squash_form="unit"``.
        gradient_passes: ``all``, or ``last``: the couplings of the last pass are constants to the gradient.
        leaky: a "none of the above" parent with logit 0 takes part in the softmax, as in the paper's CIFAR-10 net.
        return_couplings: also return the couplings of the last pass, ``[B, J, E, C]``, in the order of the map's edges.
        backend: ``fused`` never writes a vote to memory and is not differentiated twice; ``reference`` writes all of
            them; ``auto`` is fused where it can be.

    Returns:
        Capsules with pose ``[B, P, J, R, N]`` and activation = length of pose; with the couplings where asked for.

    Raises:
        ValueError: pose or transform does not fit the map, iterations are out of range, an option is unknown, or the
            backend cannot.

    Example:
        >>> pose, transform = torch.randn(2, 6, 4, 1, 8), torch.randn(6, 4, 10, 8, 16)
        >>> dynamic_routing(pose, transform, RoutingMap.dense(6)).pose.shape
        torch.Size([2, 1, 10, 1, 16])
    """
    _check_options(iterations, logits, gradient_passes, squash_form, inner_squash_form)
    routing_map.check(pose, transform)
    dtype = torch.promote_types(pose.dtype, transform.dtype)
    inner_form = squash_form if inner_squash_form is None else inner_squash_form
    with torch.autocast(pose.device.type, enabled=False):
        constant = gradient_passes == "last"
        votes = Votes(
            pose.to(dtype),
            None,
            transform.to(dtype),
            routing_map,
            none_of_the_above=leaky,
            passes=1 if constant else iterations,
            backend=backend,
        )
        earlier = votes.detach() if constant else votes
        agreement = None
        for _ in range(iterations - 1):
            fitted = earlier.moments(agreement, variance=False)
            parents = squash(fitted.mass[..., None, None] * fitted.mean, inner_form)
            if agreement is not None and logits == "cumulative":
                parents = parents + cast(Tensor, agreement.linear)
            agreement = Agreement(linear=parents)
        fitted = votes.moments(agreement, variance=False, constant_couplings=constant)
        parents = squash(fitted.mass[..., None, None] * fitted.mean, squash_form).to(dtype)
        capsules = Capsules(parents, lengths(parents))
        return (capsules, earlier.couplings(agreement)) if return_couplings else capsules


def _check_options(
    iterations: int, logits: str, gradient_passes: str, squash_form: str, inner_squash_form: str | None
) -> None:
    check_iterations(iterations)
    for name, value, allowed in (
        ("logits", logits, get_args(Logits)),
        ("gradient_passes", gradient_passes, get_args(GradientPasses)),
        ("squash form", squash_form, get_args(SquashForm)),
        ("squash form", inner_squash_form or squash_form, get_args(SquashForm)),
    ):
        check_choice(name, value, allowed)


class DynamicRouting(nn.Module):
    """`dynamic_routing` with its options fixed, as the rule of a capsule layer.

    Arguments: those of `dynamic_routing`.

    Raises:
        ValueError: an option is out of range or unknown.

    Example:
        >>> rule = DynamicRouting(iterations=3)
        >>> children = Capsules(torch.randn(2, 6, 4, 1, 8), torch.rand(2, 6, 4))
        >>> rule(children, torch.randn(6, 4, 10, 8, 16), RoutingMap.dense(6)).activation.shape
        torch.Size([2, 1, 10])
    """

    weighs_activations = False

    def __init__(
        self,
        iterations: int = 3,
        logits: Logits = "cumulative",
        squash_form: SquashForm = "sabour",
        inner_squash_form: SquashForm | None = None,
        gradient_passes: GradientPasses = "all",
        leaky: bool = False,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        _check_options(iterations, logits, gradient_passes, squash_form, inner_squash_form)
        check_choice("backend", backend, get_args(Backend))
        self.iterations = iterations
        self.logits: Logits = logits
        self.squash_form: SquashForm = squash_form
        self.inner_squash_form: SquashForm | None = inner_squash_form
        self.gradient_passes: GradientPasses = gradient_passes
        self.leaky = leaky
        self.backend: Backend = backend

    @classmethod
    def for_layer(cls, layer: LayerShape, **options: Any) -> "DynamicRouting":
        """The rule for a layer; it has no parameters."""
        return cls(**options)

    @overload
    def forward(
        self, children: Capsules, transform: Tensor, routing_map: RoutingMap, return_couplings: Literal[False] = False
    ) -> Capsules: ...
    @overload
    def forward(
        self, children: Capsules, transform: Tensor, routing_map: RoutingMap, return_couplings: Literal[True]
    ) -> tuple[Capsules, Tensor]: ...
    def forward(self, children, transform, routing_map, return_couplings=False):
        """Parents' capsules, and the couplings where asked for; see `dynamic_routing`."""
        check_capsules(children)
        return dynamic_routing(
            children.pose,
            transform,
            routing_map,
            iterations=self.iterations,
            logits=self.logits,
            squash_form=self.squash_form,
            inner_squash_form=self.inner_squash_form,
            gradient_passes=self.gradient_passes,
            leaky=self.leaky,
            return_couplings=return_couplings,
            backend=self.backend,
        )

    @property
    def saved_options(self) -> dict[str, Any]:
        """What the rule is made with."""
        return {name: getattr(self, name) for name in inspect.signature(DynamicRouting).parameters}

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}, logits={self.logits!r}, squash_form={self.squash_form!r}"
