"""Gradients of the operators in `torchcaps.kernels.moments`.

`direct_open_votes` and `direct_moments` do the same as the operators `open_votes` and `moments`, but without PyTorch's
dispatcher (see `torchcaps.kernels.operator`). Their tokens are empty, one per pass, and the gradient
of a token carries the `Record` of the pass as an attribute. Handling a tensor for each field of the record would take
longer than the kernels need for one image.
"""

from typing import Any

import torch
from torch import Tensor

from torchcaps.kernels import once
from torchcaps.kernels.memory import constants, laid_out, statistics_dtype
from torchcaps.kernels.moments import couplings, moments, moments_backward, open_votes, votes_backward
from torchcaps.kernels.operator import differentiate, refuse_batched
from torchcaps.kernels.record import Record

__all__ = ["couplings", "direct_moments", "direct_open_votes", "moments", "open_votes", "recomputed_moments"]


def _keep_children(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4], *inputs[6:]
    ctx.set_materialize_grads(False)


def _sweep_over_votes(ctx, records):
    pose, activation, transform, edge_lists = ctx.saved_tensors
    parent_sites, *options = ctx.options
    if all(record is None for record in records):
        children = (pose, activation, transform) if not pose.shape[0] else (None,) * 3
        return *(None if x is None else torch.zeros_like(x) for x in children), *(None,) * 6
    nothing = pose.new_empty(0)
    given = [nothing if record is None else record for record in records]
    pose_grad, activation_grad, transform_grad = votes_backward(
        pose, activation, transform, edge_lists, parent_sites, given, *options
    )
    return pose_grad, None if activation is None else activation_grad, transform_grad, *(None,) * 6


def _keep_pass(ctx, inputs, output, given=None) -> None:
    """Store what the backward pass needs. ``given``: tensors that are stored instead of the agreement."""
    tokens, pose, activation, transform, edge_lists, ctx.parent_sites, *rest = inputs
    *agreement, variance_floor, inverse_temperature, uniform, types, none_of_the_above, by_sample = rest[:10]
    ctx.with_variance, constant_couplings, ctx.floor = rest[10:]
    _, *found, _ = output
    ctx.save_for_backward(pose, activation, transform, edge_lists, *found, *(agreement if given is None else given))
    ctx.tokens, ctx.gaussian, ctx.direct = bool(tokens), (variance_floor, inverse_temperature), False
    ctx.couplings = (not uniform, not uniform and not constant_couplings, types, none_of_the_above, by_sample)
    ctx.wanted = [x is not None and x.requires_grad for x in agreement]
    ctx.set_materialize_grads(False)


def _differentiate_couplings(ctx, *gradients):
    saved = ctx.saved_tensors
    return _differentiate(ctx, saved[:9], saved[9:], *gradients)


def _differentiate(ctx, saved, agreement, mass_grad, mean_grad, variance_grad, _, __, ___, log_volume_grad):
    *children, mean, variance, largest, log_mass, log_sums = saved
    constant, linear, quadratic, centre = agreement
    routed, differentiated, *options = ctx.couplings
    variance_grad = variance_grad if ctx.with_variance else None
    log_volume_grad = None if ctx.floor is None else log_volume_grad
    second = variance_grad is not None or log_volume_grad is not None
    mean_grad, variance_grad = (None if x is None else laid_out(x, mean.stride()) for x in (mean_grad, variance_grad))
    numbers = None
    if log_volume_grad is not None or ctx.gaussian[1]:
        numbers = constants((ctx.floor or 0.0, *ctx.gaussian), mean, keep=ctx.direct)
    record = Record(
        constant, linear, quadratic, centre, log_sums if routed else None, None, mean, largest,
        log_mass, variance if second else None, mass_grad, mean_grad, variance_grad, log_volume_grad, numbers,
    )  # fmt: skip
    agreement_grads = [None] * 4
    if differentiated:
        nothing = mean.new_empty(0)
        entries, wanted = [nothing if entry is None else entry for entry in record], any(ctx.wanted)
        coupling_grads, *found = moments_backward(*children, ctx.parent_sites, entries, *options, wanted)
        record = record._replace(coupling_grads=coupling_grads)
        agreement_grads = [
            grad if asked and grad.numel() else None for grad, asked in zip(found, ctx.wanted, strict=True)
        ]
    record = [None if entry is None or not entry.numel() else entry for entry in record]
    return record if ctx.tokens else [], *(None,) * 5, *agreement_grads, *(None,) * 9


class _OpenVotes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pose: Tensor, activation: Tensor | None, transform: Tensor, *others: Any) -> Any:
        _keep_children(ctx, (pose, activation, transform, *others), None)
        passes = others[2]
        # A token has the dtype of the gradients. Otherwise autograd would convert its gradient, and lose the record.
        dtype = statistics_dtype(pose.dtype)
        return tuple([pose.new_empty(0, dtype=dtype) for _ in range(passes)])

    @staticmethod
    def backward(ctx: Any, *token_grads: Any) -> Any:
        return _sweep_over_votes(ctx, [entry for grad in token_grads for entry in _record_of(grad)])


def _record_of(token_grad: Tensor | None) -> Any:
    if token_grad is None:
        return (None,) * len(Record._fields)
    if not hasattr(token_grad, "record"):
        raise RuntimeError(
            "a hook has replaced the gradient between two operations of fused routing: let the hook return None for "
            'empty gradients, or use backend="reference"'
        )
    return token_grad.record


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], agreement_of: Any, token: Tensor, *given: Tensor | None) -> Any:
        output = moments.direct(*arguments)
        _keep_pass(ctx, arguments, output, given)
        ctx.agreement_of, ctx.direct = agreement_of, True
        ctx.kind = {"dtype": output[0].dtype, "device": output[0].device}
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_batched(gradients)
        if ctx.agreement_of is None:
            record, *found = _differentiate_couplings(ctx, *gradients)
            grads = found[5:9]
        else:
            record, grads = _differentiate_again(ctx, gradients)
        token_grad = torch.empty(0, **ctx.kind)
        token_grad.record = record  # type: ignore[attr-defined]
        return None, None, token_grad, *grads


def _differentiate_again(ctx: Any, gradients: Any) -> Any:
    """Compute the agreement of a pass again. Return the record, and the gradients of the tensors that determine it."""
    saved, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
    tensors = [x.detach().requires_grad_(need) for x, need in zip(saved[9:], needed, strict=True)]
    with torch.enable_grad():
        agreement = ctx.agreement_of(*tensors)
    ctx.wanted = [x is not None and x.requires_grad for x in agreement]
    constants = [None if x is None else x.detach() for x in agreement]
    record, *found = _differentiate(ctx, saved[:9], constants, *gradients)
    reached = [(x, grad) for x, grad in zip(agreement, found[5:9], strict=True) if grad is not None]
    leaves = [x for x in tensors if x.requires_grad]
    grads: Any = (None,) * len(leaves)
    if reached and leaves:
        outputs, output_grads = zip(*reached, strict=True)
        grads = torch.autograd.grad(
            outputs, leaves, output_grads, create_graph=torch.is_grad_enabled(), allow_unused=True
        )
    given = iter(grads)
    return record, [next(given) if need else None for need in needed]


direct_open_votes = _OpenVotes.apply


def direct_moments(tokens: list[Tensor], *arguments: Any) -> Any:
    """Compute a pass with the token from `direct_open_votes`. The arguments are those of the operator `moments`."""
    return _Moments.apply((tokens, *arguments), None, *tokens, *arguments[5:9])


def recomputed_moments(agreement_of: Any, tensors: Any, tokens: list[Tensor], *arguments: Any) -> Any:
    """Do the same as `direct_moments`, but store ``tensors`` instead of the agreement ``agreement_of(*tensors)``."""
    return _Moments.apply((tokens, *arguments), agreement_of, *tokens, *tensors)


differentiate("open_votes", _sweep_over_votes, _keep_children)
differentiate("moments", _differentiate_couplings, _keep_pass)
differentiate("moments_backward", once)
differentiate("votes_backward", once)
