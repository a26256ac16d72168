"""EM routing in Triton; `torchcaps.routing.em` is its specification.

Of every pass and parent a record is kept: mean [H], 1 / 2σ² [H], log data, log activation - Σ log σ, data, activation.
The backward pass keeps one of gradients: of mean [H], variance [H], of data through the cost, and Σ_h variance
gradient · spread.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from torchcaps.kernels.gpu.problem import Problem
from torchcaps.kernels.gpu.votes import (
    add_logits,
    add_pose_grad,
    add_transform_grad,
    child_of_step,
    gammas_of,
    in_own_group,
    log_coupling,
    log_sums_of,
    own_child,
    own_parents,
    own_steps,
    parents_of_block,
    records,
    samples_of_block,
    store_log_sums,
    store_pose,
    store_transform,
    store_vectors,
    tiny_of,
    unit_of,
    units,
    vectors_of,
    vote,
)

FIT_EXTRAS, GRAD_EXTRAS = tl.constexpr(4), tl.constexpr(2)


@triton.jit
def _fits_of(fits, parent, pass_index, z: tl.constexpr):
    """Where the records of parents stand."""
    return records(fits, parent, pass_index, 2 * z.numbers + FIT_EXTRAS, z)


@triton.jit
def _grads_of(grads, parent, pass_index, z: tl.constexpr):
    """Where those of their gradients do."""
    return records(grads, parent, pass_index, 2 * z.numbers + GRAD_EXTRAS, z)


@triton.jit
def _logit(votes, fit, is_parent, z: tl.constexpr):
    """log R + the child's log-sum, -∞ where there is no parent; and votes minus the mean."""
    distance = votes - vectors_of(fit, is_parent, z)
    far = tl.sum(distance * distance * vectors_of(fit + z.numbers, is_parent, z), axis=2)
    return tl.load(fit + (2 * z.numbers + 1), is_parent, -float("inf")) - far, distance


@triton.jit
def _part(a, log_r, bracket, fit, grad, is_parent, z: tl.constexpr):
    """In its units, a vote's share of its parent, R / data, and its part of the gradient of the child's activation."""
    off, unit = a < tiny_of(a.dtype), unit_of(a, a.dtype)
    log_share = log_r - tl.load(fit + 2 * z.numbers, is_parent, 0)
    log_share = tl.where(off, tl.minimum(log_share, 60.0), log_share + tl.log(unit))
    share = tl.where(is_parent, tl.exp(log_share), 0.0)
    through_data = tl.load(grad + 2 * z.numbers, is_parent, 0)
    offset = tl.load(grad + (2 * z.numbers + 1), is_parent, 0)
    return share, tl.where(is_parent, share * (bracket - offset) + unit * tl.exp(log_r) * through_data, 0.0)


@triton.jit
def _logit_grad(a, part, log_r, gamma, is_parent):
    """The gradient of a logit; of a child that is off, nothing, however large its part would be."""
    return tl.where((a == 0) | (is_parent == 0), 0.0, a / unit_of(a, a.dtype) * (part - tl.exp(log_r) * gamma))


@triton.jit
def _bracket(votes, fit, grad, is_parent, z: tl.constexpr):
    """Σ_h of a vote's effect on mean and variance, and its parts: distance, and the two gradients."""
    distance = votes - vectors_of(fit, is_parent, z)
    mean_grad = vectors_of(grad, is_parent, z)
    variance_grad = vectors_of(grad + z.numbers, is_parent, z)
    return tl.sum(distance * (mean_grad + variance_grad * distance), axis=2), distance, mean_grad, variance_grad


@triton.jit
def _find_log_sums(
    pose, transform, begin, parent_site_of, kernel_of, fits, log_sums, pass_index, samples, z: tl.constexpr
):
    """Of every child its largest logit and the logarithm of Σ e^(logit - largest)."""
    dtype: tl.constexpr = fits.dtype.element_ty
    site, child_type, sample, is_sample, child = own_child(samples, z)
    top = tl.full([z.block_samples], -float("inf"), dtype)
    total = tl.zeros([z.block_samples], dtype)
    for edge in range(tl.load(begin + site), tl.load(begin + site + 1)):
        parent_site, weights = tl.load(parent_site_of + edge), tl.load(kernel_of + edge) * z.types + child_type
        for first in range(0, z.parent_types, z.block_types):
            parent_type, parent, is_parent = parents_of_block(sample, is_sample, parent_site, first, z)
            votes = vote(pose, transform, child, is_sample, weights, parent_type, z, dtype)
            logit, _ = _logit(votes, _fits_of(fits, parent, pass_index - 1, z), is_parent, z)
            logit = tl.where(is_sample[:, None], logit, 0.0)
            top, total = add_logits(top, total, logit)
    store_log_sums(log_sums, child, pass_index, top, total, is_sample, z)


@triton.jit
def _gather_fits(
    pose, activation, transform, begin, child_site_of, kernel_of, log_even, fits, log_sums, tops, sums,
    pass_index, is_first: tl.constexpr, samples, group_count, z: tl.constexpr,
):  # fmt: skip
    """Of a group of every parent's children: the largest log R a; then, of shares w = R a over it, Σ w, the mean of the
    votes and Σ w (V - mean)², each carried along so that nothing cancels."""
    dtype: tl.constexpr = fits.dtype.element_ty
    parent_site, sample, is_sample, parent_type, parent, is_parent = own_parents(samples, z)
    before = _fits_of(fits, parent, pass_index - 1, z)
    top = tl.full([z.block_samples, z.block_types], -float("inf"), dtype)
    weight = tl.zeros([z.block_samples, z.block_types], dtype)
    mean = tl.zeros([z.block_samples, z.block_types, z.block_rows * z.block_columns], dtype)
    moment = tl.zeros([z.block_samples, z.block_types, z.block_rows * z.block_columns], dtype)
    start, from_step, to_step = own_steps(begin, parent_site, z.types, group_count)
    for step in range(from_step, to_step):
        site, weights, child = child_of_step(step, start, child_site_of, kernel_of, sample, z)
        a = tl.load(activation + child, is_sample, 0).to(dtype)[:, None]
        votes = vote(pose, transform, child, is_sample, weights, parent_type, z, dtype)
        if is_first:
            log_r = tl.zeros([z.block_samples, z.block_types], dtype) + tl.load(log_even + site)
        else:
            logit, _ = _logit(votes, before, is_parent, z)
            log_r = log_coupling(logit, log_sums_of(log_sums, child, pass_index, z), is_sample, z)
        on = (a < tiny_of(dtype)) == 0
        log_w = tl.where(on & is_parent, log_r + tl.log(tl.where(on, a, 1.0)), -float("inf"))
        higher = tl.maximum(top, log_w)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        scale = tl.exp(top - base)
        w = tl.exp(log_w - base)
        top = higher
        weight = weight * scale + w
        portion = tl.where(w == 0, 0.0, w / tl.where(w == 0, 1.0, weight))
        delta = tl.where((w == 0)[:, :, None], 0.0, votes - mean)
        mean += portion[:, :, None] * delta
        moment = moment * scale[:, :, None] + (w * (1 - portion))[:, :, None] * delta * delta
    to = in_own_group(parent, samples, z)
    tl.store(tops + to, top, is_parent)
    tl.store(sums + to * (2 * z.numbers + 1), weight, is_parent)
    store_vectors(sums + to * (2 * z.numbers + 1) + 1, mean, is_parent, z)
    store_vectors(sums + to * (2 * z.numbers + 1) + (1 + z.numbers), moment, is_parent, z)


@triton.jit
def _find_gammas(
    pose, activation, transform, begin, parent_site_of, kernel_of, log_even, fits, log_sums, grads, gammas,
    pass_index, is_first: tl.constexpr, samples, z: tl.constexpr,
):  # fmt: skip
    """Of every child the gradient of its activation through one pass, ``[B, T, S, C]``."""
    dtype: tl.constexpr = fits.dtype.element_ty
    site, child_type, sample, is_sample, child = own_child(samples, z)
    a = tl.load(activation + child, is_sample, 0).to(dtype)
    gamma = tl.zeros([z.block_samples], dtype)
    for edge in range(tl.load(begin + site), tl.load(begin + site + 1)):
        parent_site, weights = tl.load(parent_site_of + edge), tl.load(kernel_of + edge) * z.types + child_type
        for first in range(0, z.parent_types, z.block_types):
            parent_type, parent, is_parent = parents_of_block(sample, is_sample, parent_site, first, z)
            votes = vote(pose, transform, child, is_sample, weights, parent_type, z, dtype)
            if is_first:
                log_r = tl.zeros([z.block_samples, z.block_types], dtype) + tl.load(log_even + site)
            else:
                before = _fits_of(fits, parent, pass_index - 1, z)
                logit, _ = _logit(votes, before, is_parent, z)
                log_r = log_coupling(logit, log_sums_of(log_sums, child, pass_index, z), is_sample, z)
            fit = _fits_of(fits, parent, pass_index, z)
            grad = _grads_of(grads, parent, pass_index, z)
            bracket, _, _, _ = _bracket(votes, fit, grad, is_parent, z)
            _, part = _part(a[:, None], log_r, bracket, fit, grad, is_parent, z)
            gamma += tl.sum(part, axis=1)
    tl.store(gammas_of(gammas, child, pass_index, z), gamma, is_sample)


@triton.jit
def _gather_logit_grads(
    pose, activation, transform, begin, child_site_of, kernel_of, fits, log_sums, grads, gammas, sums,
    pass_index, samples, group_count, z: tl.constexpr,
):  # fmt: skip
    """Of a group of every parent's children, g the gradient of the logit: Σ g, Σ g d and Σ g d²; d around the mean of
    the pass before."""
    dtype: tl.constexpr = fits.dtype.element_ty
    parent_site, sample, is_sample, parent_type, parent, is_parent = own_parents(samples, z)
    before = _fits_of(fits, parent, pass_index - 1, z)
    fit = _fits_of(fits, parent, pass_index, z)
    grad = _grads_of(grads, parent, pass_index, z)
    zeroth = tl.zeros([z.block_samples, z.block_types], dtype)
    first_moment = tl.zeros([z.block_samples, z.block_types, z.block_rows * z.block_columns], dtype)
    second_moment = tl.zeros([z.block_samples, z.block_types, z.block_rows * z.block_columns], dtype)
    start, from_step, to_step = own_steps(begin, parent_site, z.types, group_count)
    for step in range(from_step, to_step):
        _, weights, child = child_of_step(step, start, child_site_of, kernel_of, sample, z)
        a = tl.load(activation + child, is_sample, 0).to(dtype)
        votes = vote(pose, transform, child, is_sample, weights, parent_type, z, dtype)
        logit, distance = _logit(votes, before, is_parent, z)
        log_r = log_coupling(logit, log_sums_of(log_sums, child, pass_index, z), is_sample, z)
        bracket, _, _, _ = _bracket(votes, fit, grad, is_parent, z)
        _, part = _part(a[:, None], log_r, bracket, fit, grad, is_parent, z)
        gamma = tl.load(gammas_of(gammas, child, pass_index, z), is_sample, 0)
        logit_grad = _logit_grad(a[:, None], part, log_r, gamma[:, None], is_parent)
        zeroth += logit_grad
        first_moment += logit_grad[:, :, None] * distance
        second_moment += logit_grad[:, :, None] * distance * distance
    to = sums + in_own_group(parent, samples, z) * (2 * z.numbers + 1)
    tl.store(to, zeroth, is_parent)
    store_vectors(to + 1, first_moment, is_parent, z)
    store_vectors(to + (1 + z.numbers), second_moment, is_parent, z)


@triton.jit
def _votes_grad(
    votes, a, site, child, gammas, is_sample, parent, is_parent, log_even, fits, log_sums, grads, z: tl.constexpr
):  # fmt: skip
    """The gradient of one child's votes, over all passes."""
    votes_grad = tl.zeros([z.block_samples, z.block_types, z.block_rows * z.block_columns], votes.dtype)
    logit = tl.zeros([z.block_samples, z.block_types], votes.dtype)
    fit_before, distance_before = fits + parent, votes
    for t in tl.static_range(tl.constexpr(z.passes)):
        fit, grad = _fits_of(fits, parent, t, z), _grads_of(grads, parent, t, z)
        bracket, distance, mean_grad, variance_grad = _bracket(votes, fit, grad, is_parent, z)
        if t == 0:
            log_r = logit + tl.load(log_even + site)
        else:
            log_r = log_coupling(logit, log_sums_of(log_sums, child, t, z), is_sample, z)
        share, part = _part(a[:, None], log_r, bracket, fit, grad, is_parent, z)
        votes_grad += (a[:, None] / unit_of(a, a.dtype)[:, None] * share)[:, :, None] * (
            mean_grad + 2 * variance_grad * distance
        )
        if t > 0:
            gamma_now = tl.load(gammas_of(gammas, child, t, z), is_sample, 0)
            slope = _logit_grad(a[:, None], part, log_r, gamma_now[:, None], is_parent)
            half_before = vectors_of(fit_before + z.numbers, is_parent, z)
            votes_grad -= 2 * slope[:, :, None] * distance_before * half_before
        if t + 1 < z.passes:
            logit, _ = _logit(votes, fit, is_parent, z)
        fit_before, distance_before = fit, distance
    return votes_grad


@triton.jit
def _undo_poses(
    pose, activation, transform, begin, parent_site_of, kernel_of, log_even, fits, log_sums, grads, gammas, out,
    samples, z: tl.constexpr,
):  # fmt: skip
    """The gradients of the children's poses."""
    dtype: tl.constexpr = fits.dtype.element_ty
    site, child_type, sample, is_sample, child = own_child(samples, z)
    a = tl.load(activation + child, is_sample, 0).to(dtype)
    pose_grad = tl.zeros([z.block_samples, z.block_rows, z.block_inner], dtype)
    for edge in range(tl.load(begin + site), tl.load(begin + site + 1)):
        parent_site, weights = tl.load(parent_site_of + edge), tl.load(kernel_of + edge) * z.types + child_type
        for first in range(0, z.parent_types, z.block_types):
            parent_type, parent, is_parent = parents_of_block(sample, is_sample, parent_site, first, z)
            votes = vote(pose, transform, child, is_sample, weights, parent_type, z, dtype)
            votes_grad = _votes_grad(
                votes, a, site, child, gammas, is_sample, parent, is_parent, log_even, fits, log_sums, grads, z
            )
            pose_grad = add_pose_grad(pose_grad, votes_grad, transform, weights, parent_type, z)
    store_pose(out, pose_grad, child, is_sample, z)


@triton.jit
def _undo_transforms(
    pose, activation, transform, begin, child_site_of, parent_site_of, log_even, fits, log_sums, grads, gammas, out,
    samples, group_count, z: tl.constexpr,
):  # fmt: skip
    """Of a group of the edges and samples that use a transform: its gradient."""
    dtype: tl.constexpr = fits.dtype.element_ty
    weights, child_type, kernel = tl.program_id(0), tl.program_id(0) % z.types, tl.program_id(0) // z.types
    first, group = tl.program_id(1) * z.block_types, tl.program_id(2)
    sample_blocks = tl.cdiv(samples, z.block_samples)
    start, from_step, to_step = own_steps(begin, kernel, sample_blocks, group_count)
    transform_grad = tl.zeros([z.block_types, z.block_inner, z.block_columns], dtype)
    for step in range(from_step, to_step):
        edge = start + step // sample_blocks
        site, parent_site = tl.load(child_site_of + edge), tl.load(parent_site_of + edge)
        sample, is_sample = samples_of_block(step % sample_blocks, samples, z)
        child = (sample * z.sites + site) * z.types + child_type
        a = tl.load(activation + child, is_sample, 0).to(dtype)
        parent_type, parent, is_parent = parents_of_block(sample, is_sample, parent_site, first, z)
        votes = vote(pose, transform, child, is_sample, weights, parent_type, z, dtype)
        votes_grad = _votes_grad(
            votes, a, site, child, gammas, is_sample, parent, is_parent, log_even, fits, log_sums, grads, z
        )
        transform_grad = add_transform_grad(transform_grad, votes_grad, pose, child, is_sample, z)
    store_transform(out, transform_grad, group, weights, first, z)


def forward(
    pose, activation, transform, beta_u, beta_a, edges, parent_sites, heats, variance_floor, mean_data, mixing
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `torchcaps.kernels.em.em_routing`."""
    passes = len(heats)
    problem = Problem(pose, transform, edges, parent_sites, passes, leaky=False)
    z = problem.z
    pose, activation, transform = (x.contiguous() for x in (pose, activation, transform))
    fits = problem.records(2 * z.numbers + FIT_EXTRAS.value)
    log_sums = problem.child_sums(passes - 1, 2)
    tops, sums = problem.group_sums(), problem.group_sums(2 * z.numbers + 1)
    for t, heat in enumerate(heats):
        if t > 0:
            problem.per_child(_find_log_sums, pose, transform, *problem.by_child, fits, log_sums, t)
        inputs = (pose, activation, transform, *problem.by_parent, problem.log_even, fits, log_sums)
        problem.per_parent(_gather_fits, *inputs, tops, sums, t, t == 0)
        _settle(fits[:, t], tops, sums, beta_u, beta_a, heat, variance_floor, mean_data, mixing)
    last = fits[:, -1]
    mean = last[..., : z.numbers].unflatten(-1, (z.rows, z.columns))
    return mean.to(pose.dtype, copy=True), last[..., -1].to(pose.dtype, copy=True), fits.flatten(1), log_sums


def _settle(fit, tops, sums, beta_u, beta_a, heat, variance_floor, mean_data, mixing):
    """Parents from the sums of all groups of their children; see the reference."""
    numbers = (fit.shape[-1] - FIT_EXTRAS.value) // 2
    top = tops.amax(dim=0)
    scale = (tops - top.masked_fill(top == -torch.inf, 0)).exp()
    weights = sums[..., 0] * scale
    weight = weights.sum(dim=0)
    dead = weight == 0
    inverse = 1 / weight.masked_fill(dead, 1)
    means, moments = sums[..., 1:].split(numbers, dim=-1)
    mean = ((weights * inverse).unsqueeze(-1) * means).sum(dim=0)
    moment = (scale.unsqueeze(-1) * moments + weights.unsqueeze(-1) * (means - mean).square()).sum(dim=0)
    gone = dead.unsqueeze(-1)
    variance = (moment * inverse.unsqueeze(-1)).masked_fill(gone, 0) + variance_floor
    data = weight * top.exp()
    half_logs, _, x = _weigh(variance, data, beta_u, beta_a, heat, mean_data)
    log_data = (weight.log() + top).masked_fill(dead, torch.inf)
    log_activation = _proportions(data)[0].log() if mixing else functional.logsigmoid(x)
    extras = torch.stack([log_data, log_activation - half_logs, data, log_activation.exp()], dim=-1)
    fit.copy_(torch.cat([mean.masked_fill(gone, 0), 0.5 / variance, extras], dim=-1))


def _proportions(data):
    """Parts of all data of a sample, and whether they are more than nothing."""
    tiny, total = torch.finfo(data.dtype).tiny, data.sum(dim=(1, 2), keepdim=True)
    proportions = (data / total).masked_fill(total < tiny, 0).clamp_min(tiny)
    return proportions, proportions > tiny


def _weigh(variance, data, beta_u, beta_a, heat, mean_data):
    """Σ log σ; Σ (β_u + log σ), the cost of one datum; and what the activation is the logistic function of."""
    half_logs = 0.5 * variance.log().sum(dim=-1)
    described = variance.shape[-1] * beta_u.to(variance.dtype) + half_logs
    return half_logs, described, heat * (beta_a.to(variance.dtype) - described * data / mean_data)


def backward(
    pose, activation, transform, beta_u, beta_a, edges, kept, log_sums, mean_grad, activation_grad, *options
) -> tuple[Tensor, ...]:
    """Gradients of pose, activation, transform and betas."""
    heats, variance_floor, mean_data, mixing = options
    passes = len(heats)
    problem = Problem(pose, transform, edges, mean_grad.shape[1], passes, leaky=False)
    z, dtype = problem.z, problem.dtype
    inputs = pose, activation, transform = tuple(x.contiguous() for x in (pose, activation, transform))
    grads = problem.records(2 * z.numbers + GRAD_EXTRAS.value)
    fits, gammas = kept.view(*grads.shape[:-1], 2 * z.numbers + FIT_EXTRAS.value), problem.child_sums(passes)
    sums = problem.group_sums(2 * z.numbers + 1)
    beta_u_grad, beta_a_grad = problem.log_even.new_zeros(2, z.parent_types)
    to_mean = mean_grad.flatten(3).to(dtype)
    to_variance = torch.zeros_like(to_mean)
    to_log_activation = activation_grad.to(dtype) * fits[:, -1, ..., -1]
    for t in reversed(range(passes)):
        half, data = fits[:, t, ..., z.numbers : 2 * z.numbers], fits[:, t, ..., -2]
        _, described, x = _weigh(0.5 / half, data, beta_u, beta_a, heats[t], mean_data)
        to_x = heats[t] * to_log_activation * (0 if mixing else (-x).sigmoid())
        to_cost = -to_x / mean_data
        to_data = to_cost * described
        if mixing:
            part, counts = _proportions(data)
            there = to_log_activation.masked_fill(~counts, 0)
            to_data = ((there - part * there.sum(dim=(1, 2), keepdim=True)) / data).masked_fill(~counts, 0)
        beta_a_grad += to_x.sum(dim=(0, 1))
        beta_u_grad += z.numbers * (to_cost * data).sum(dim=(0, 1))
        to_variance = to_variance + (to_cost * data).unsqueeze(-1) * half
        offset = (to_variance * (0.5 / half - variance_floor)).sum(dim=-1)
        extras = torch.stack([to_data, offset], dim=-1)
        grads[:, t] = torch.cat([to_mean, to_variance, extras], dim=-1)
        known = (problem.log_even, fits, log_sums, grads, gammas)
        problem.per_child(_find_gammas, *inputs, *problem.by_child, *known, t, t == 0)
        if t > 0:
            problem.per_parent(_gather_logit_grads, *inputs, *problem.by_parent, *known[1:], sums, t)
            total, half = sums.sum(dim=0), fits[:, t - 1, ..., z.numbers : 2 * z.numbers]
            to_log_activation = total[..., 0]
            to_mean = 2 * half * total[..., 1 : 1 + z.numbers]
            to_variance = half * (2 * half * total[..., 1 + z.numbers :] - total[..., :1])
    pose_grad = torch.empty_like(pose)
    problem.per_child(_undo_poses, *inputs, *problem.by_child, *known, pose_grad)
    transform_grad = problem.transforms_grad(_undo_transforms, *inputs, *problem.by_kernel, *known)
    every = (pose_grad, gammas.sum(dim=1) / units(activation, dtype), transform_grad, beta_u_grad, beta_a_grad)
    return tuple(grad.to(x.dtype) for grad, x in zip(every, (*inputs, beta_u, beta_a), strict=True))
