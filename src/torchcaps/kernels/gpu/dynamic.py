"""Dynamic routing in Triton; `torchcaps.routing.dynamic` is its specification.

Of every pass and parent a record is kept: the sum of its votes, weighted by the couplings. A logit is the scalar
product of a vote with what its parent has been so far, found again from these sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcaps.capsules import SquashForm, squash
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
    vectors_of,
    vote,
)


@triton.jit
def _product(votes, vectors, parent, is_parent, pass_index, z: tl.constexpr):
    """Of votes with what is recorded of their parents, ``[samples, parent types]``."""
    return tl.sum(votes * vectors_of(records(vectors, parent, pass_index, z.numbers, z), is_parent, z), axis=2)


@triton.jit
def _coupling(votes, seen, log_sums, site, child, is_sample, parent, is_parent, log_even, pass_index, z: tl.constexpr):
    """c ``[samples, parent types]`` in a pass; 0 where there is no parent."""
    if pass_index == 0:
        log_c = tl.sum(votes, axis=2) * 0 + tl.load(log_even + site)
    else:
        logit = _product(votes, seen, parent, is_parent, pass_index, z)
        log_c = log_coupling(logit, log_sums_of(log_sums, child, pass_index, z), is_sample, z)
    return tl.where(is_parent, tl.exp(log_c), 0.0)


@triton.jit
def _find_log_sums(
    pose, transform, begin, parent_site_of, kernel_of, seen, log_sums, pass_index, is_leaky: tl.constexpr,
    samples, z: tl.constexpr,
):  # fmt: skip
    """Of every child its largest logit and the logarithm of Σ e^(logit - largest)."""
    dtype: tl.constexpr = seen.dtype.element_ty
    site, child_type, sample, is_sample, child = own_child(samples, z)
    top = tl.full([z.block_samples], 0.0 if is_leaky else -float("inf"), dtype)
    total = tl.full([z.block_samples], 1.0 if is_leaky else 0.0, dtype)
    for edge in range(tl.load(begin + site), tl.load(begin + site + 1)):
        parent_site, weights = tl.load(parent_site_of + edge), tl.load(kernel_of + edge) * z.types + child_type
        for first in range(0, z.parent_types, z.block_types):
            parent_type, parent, is_parent = parents_of_block(sample, is_sample, parent_site, first, z)
            votes = vote(pose, transform, child, is_sample, weights, parent_type, z, dtype)
            logit = _product(votes, seen, parent, is_parent, pass_index, z)
            logit = tl.where((parent_type < z.parent_types)[None, :], logit, -float("inf"))
            top, total = add_logits(top, total, logit)
    store_log_sums(log_sums, child, pass_index, top, total, is_sample, z)


@triton.jit
def _gather_sums(
    pose, transform, begin, child_site_of, kernel_of, log_even, seen, log_sums, sums,
    pass_index: tl.constexpr, samples, group_count, z: tl.constexpr,
):  # fmt: skip
    """Of a group of every parent's children: Σ c û."""
    dtype: tl.constexpr = seen.dtype.element_ty
    parent_site, sample, is_sample, parent_type, parent, is_parent = own_parents(samples, z)
    total = tl.zeros([z.block_samples, z.block_types, z.block_rows * z.block_columns], dtype)
    start, from_step, to_step = own_steps(begin, parent_site, z.types, group_count)
    for step in range(from_step, to_step):
        site, weights, child = child_of_step(step, start, child_site_of, kernel_of, sample, z)
        votes = vote(pose, transform, child, is_sample, weights, parent_type, z, dtype)
        coupling = _coupling(votes, seen, log_sums, site, child, is_sample, parent, is_parent, log_even, pass_index, z)
        total += coupling[:, :, None] * votes
    to = sums + in_own_group(parent, samples, z) * z.numbers
    store_vectors(to, total, is_parent, z)


@triton.jit
def _find_gammas(
    pose, transform, begin, parent_site_of, kernel_of, log_even, seen, log_sums, grads, gammas,
    pass_index: tl.constexpr, samples, z: tl.constexpr,
):  # fmt: skip
    """Of every child Σ c · gradient of c in a pass, ``[B, T, S, C]``."""
    dtype: tl.constexpr = seen.dtype.element_ty
    site, child_type, sample, is_sample, child = own_child(samples, z)
    gamma = tl.zeros([z.block_samples], dtype)
    for edge in range(tl.load(begin + site), tl.load(begin + site + 1)):
        parent_site, weights = tl.load(parent_site_of + edge), tl.load(kernel_of + edge) * z.types + child_type
        for first in range(0, z.parent_types, z.block_types):
            parent_type, parent, is_parent = parents_of_block(sample, is_sample, parent_site, first, z)
            votes = vote(pose, transform, child, is_sample, weights, parent_type, z, dtype)
            coupling = _coupling(
                votes, seen, log_sums, site, child, is_sample, parent, is_parent, log_even, pass_index, z
            )
            gamma += tl.sum(coupling * _product(votes, grads, parent, is_parent, pass_index, z), axis=1)
    tl.store(gammas_of(gammas, child, pass_index, z), gamma, is_sample)


@triton.jit
def _gather_seen_grads(
    pose, transform, begin, child_site_of, kernel_of, log_even, seen, log_sums, grads, gammas, sums,
    pass_index: tl.constexpr, samples, group_count, z: tl.constexpr,
):  # fmt: skip
    """Of a group of every parent's children: Σ gradient of the logit · û, the gradient of what they agreed with."""
    dtype: tl.constexpr = seen.dtype.element_ty
    parent_site, sample, is_sample, parent_type, parent, is_parent = own_parents(samples, z)
    total = tl.zeros([z.block_samples, z.block_types, z.block_rows * z.block_columns], dtype)
    start, from_step, to_step = own_steps(begin, parent_site, z.types, group_count)
    for step in range(from_step, to_step):
        site, weights, child = child_of_step(step, start, child_site_of, kernel_of, sample, z)
        votes = vote(pose, transform, child, is_sample, weights, parent_type, z, dtype)
        coupling = _coupling(votes, seen, log_sums, site, child, is_sample, parent, is_parent, log_even, pass_index, z)
        gamma = tl.load(gammas_of(gammas, child, pass_index, z), is_sample, 0)
        agreed = _product(votes, grads, parent, is_parent, pass_index, z)
        total += (coupling * (agreed - gamma[:, None]))[:, :, None] * votes
    to = sums + in_own_group(parent, samples, z) * z.numbers
    store_vectors(to, total, is_parent, z)


@triton.jit
def _votes_grad(
    votes, site, child, gammas, is_sample, parent, is_parent, log_even, seen, log_sums, grads,
    all_passes: tl.constexpr, z: tl.constexpr,
):  # fmt: skip
    """The gradient of one child's votes, over all passes or the last."""
    votes_grad = tl.zeros([z.block_samples, z.block_types, z.block_rows * z.block_columns], votes.dtype)
    for t in tl.static_range(tl.constexpr(0 if all_passes else z.passes - 1), tl.constexpr(z.passes)):
        coupling = _coupling(votes, seen, log_sums, site, child, is_sample, parent, is_parent, log_even, t, z)
        grad = vectors_of(records(grads, parent, t, z.numbers, z), is_parent, z)
        votes_grad += coupling[:, :, None] * grad
        if t > 0 and all_passes:
            gamma_now = tl.load(gammas_of(gammas, child, t, z), is_sample, 0)
            logit_grad = coupling * (tl.sum(votes * grad, axis=2) - gamma_now[:, None])
            votes_grad += logit_grad[:, :, None] * vectors_of(records(seen, parent, t, z.numbers, z), is_parent, z)
    return votes_grad


@triton.jit
def _undo_poses(
    pose, transform, begin, parent_site_of, kernel_of, log_even, seen, log_sums, grads, gammas, out,
    all_passes: tl.constexpr, samples, z: tl.constexpr,
):  # fmt: skip
    """The gradients of the children's poses."""
    dtype: tl.constexpr = seen.dtype.element_ty
    site, child_type, sample, is_sample, child = own_child(samples, z)
    pose_grad = tl.zeros([z.block_samples, z.block_rows, z.block_inner], dtype)
    for edge in range(tl.load(begin + site), tl.load(begin + site + 1)):
        parent_site, weights = tl.load(parent_site_of + edge), tl.load(kernel_of + edge) * z.types + child_type
        for first in range(0, z.parent_types, z.block_types):
            parent_type, parent, is_parent = parents_of_block(sample, is_sample, parent_site, first, z)
            votes = vote(pose, transform, child, is_sample, weights, parent_type, z, dtype)
            votes_grad = _votes_grad(
                votes, site, child, gammas, is_sample, parent, is_parent, log_even, seen, log_sums, grads, all_passes, z
            )
            pose_grad = add_pose_grad(pose_grad, votes_grad, transform, weights, parent_type, z)
    store_pose(out, pose_grad, child, is_sample, z)


@triton.jit
def _undo_transforms(
    pose, transform, begin, child_site_of, parent_site_of, log_even, seen, log_sums, grads, gammas,
    all_passes: tl.constexpr, out, samples, group_count, z: tl.constexpr,
):  # fmt: skip
    """Of a group of the edges and samples that use a transform: its gradient."""
    dtype: tl.constexpr = seen.dtype.element_ty
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
        parent_type, parent, is_parent = parents_of_block(sample, is_sample, parent_site, first, z)
        votes = vote(pose, transform, child, is_sample, weights, parent_type, z, dtype)
        votes_grad = _votes_grad(
            votes, site, child, gammas, is_sample, parent, is_parent, log_even, seen, log_sums, grads, all_passes, z
        )
        transform_grad = add_transform_grad(transform_grad, votes_grad, pose, child, is_sample, z)
    store_transform(out, transform_grad, group, weights, first, z)


def forward(
    pose: Tensor,
    transform: Tensor,
    edges: Tensor,
    parent_sites: int,
    iterations: int,
    cumulative: bool,
    squash_form: SquashForm,
    inner_squash_form: SquashForm,
    all_passes: bool,
    leaky: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `torchcaps.kernels.dynamic.dynamic_routing`."""
    problem = Problem(pose, transform, edges, parent_sites, iterations, leaky)
    z = problem.z
    pose, transform = pose.contiguous(), transform.contiguous()
    sums, seen, groups = problem.records(z.numbers), problem.records(z.numbers), problem.group_sums(z.numbers)
    log_sums = problem.child_sums(iterations - 1, 2)
    for t in range(iterations):
        if t > 0:
            seen[:, t] = _see(seen, sums, t, cumulative, inner_squash_form)
            problem.per_child(_find_log_sums, pose, transform, *problem.by_child, seen, log_sums, t, leaky)
        problem.per_parent(
            _gather_sums, pose, transform, *problem.by_parent, problem.log_even, seen, log_sums, groups, t
        )
        sums[:, t] = groups.sum(dim=0)
    parents = squash(sums[:, -1].unflatten(-1, (z.rows, z.columns)), squash_form)
    return parents.to(pose.dtype, copy=True), sums.flatten(1), log_sums


def _see(seen: Tensor, sums: Tensor, t: int, cumulative: bool, form: SquashForm) -> Tensor:
    """What a pass, from 1 on, agrees with: the parents of the pass before, or of all of them."""
    parents = squash(sums[:, t - 1].unsqueeze(-2), form).squeeze(-2)
    return parents + seen[:, t - 1] if cumulative and t > 1 else parents


def backward(
    pose: Tensor,
    transform: Tensor,
    edges: Tensor,
    kept: Tensor,
    log_sums: Tensor,
    parents_grad: Tensor,
    iterations: int,
    cumulative: bool,
    squash_form: SquashForm,
    inner_squash_form: SquashForm,
    all_passes: bool,
    leaky: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of pose and transform."""
    problem = Problem(pose, transform, edges, parents_grad.shape[1], iterations, leaky)
    z = problem.z
    inputs = pose, transform = pose.contiguous(), transform.contiguous()
    grads, seen = problem.records(z.numbers), problem.records(z.numbers)
    sums, groups, gammas = kept.view(grads.shape), problem.group_sums(z.numbers), problem.child_sums(iterations)
    known = (problem.log_even, seen, log_sums, grads, gammas)
    for t in range(1, iterations):
        seen[:, t] = _see(seen, sums, t, cumulative, inner_squash_form)
    grads[:, -1] = _undo_squash(squash_form, sums[:, -1], parents_grad.flatten(3).to(problem.dtype))
    agreed_grad = torch.zeros_like(grads[:, 0])
    for t in range(iterations - 1, 0, -1) if all_passes else ():
        problem.per_child(_find_gammas, *inputs, *problem.by_child, *known, t)
        problem.per_parent(_gather_seen_grads, *inputs, *problem.by_parent, *known, groups, t)
        agreed_grad = groups.sum(dim=0) + (agreed_grad if cumulative else 0)
        grads[:, t - 1] = _undo_squash(inner_squash_form, sums[:, t - 1], agreed_grad)
    pose_grad = torch.empty_like(pose)
    problem.per_child(_undo_poses, *inputs, *problem.by_child, *known, pose_grad, all_passes)
    transform_grad = problem.transforms_grad(_undo_transforms, *inputs, *problem.by_kernel, *known, all_passes)
    return pose_grad, transform_grad.to(transform.dtype)


def _undo_squash(form: SquashForm, sums: Tensor, grad: Tensor) -> Tensor:
    """The gradient of what was squashed: f · (g + q u (u · g)) of v = f(|s|) s, u = s / |s|, q = |s| f' / f."""
    if form == "none":
        return grad
    length = sums.norm(dim=-1, keepdim=True)
    direction = sums / length.clamp_min(torch.finfo(sums.dtype).tiny)
    along = direction * (direction * grad).sum(dim=-1, keepdim=True)
    if form == "unit":
        return (grad - along) / length.clamp_min(1e-12)
    constant = 1.0 if form == "sabour" else 0.5
    return 1 / (length + constant / length) * (grad + (2 / (1 + length.square() / constant) - 1) * along)
