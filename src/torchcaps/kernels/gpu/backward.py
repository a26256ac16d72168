"""Triton kernels for the gradient of the moments.

The formulas are for one pass, that is, one call of `moments`. ḡ_x is the gradient of x, V a vote, c a coupling and a
the activation of a child. Σ_h is a sum over the numbers of a vote, and Σ_j a sum over the parents in one softmax::

    e = V - mean        d = V - centre        share = c / mass        w = a c
    c u = share (Σ_h e (ḡ_mean + ḡ_variance e) - Σ_h ḡ_variance variance) + c ḡ_mass       u is the gradient of w
    γ = Σ_j c u                                                                             the gradient of a
    ḡ_logit = a (c u - c γ)
    ḡ_V = a share (ḡ_mean + 2 ḡ_variance e) + ḡ_logit (linear - 2 quadratic d)
    ḡ_constant = Σ ḡ_logit        ḡ_linear = Σ ḡ_logit d        ḡ_quadratic = -Σ ḡ_logit d²         (sums over children)
    ḡ_centre = 2 quadratic Σ ḡ_logit d - linear Σ ḡ_logit

With constant couplings, γ is used only as the gradient of a, and ḡ_logit is 0.
"""

import torch
import triton
import triton.language as tl

from torchcaps.kernels.gpu.problem import Problem, record_of
from torchcaps.kernels.gpu.votes import (
    activations,
    edges_of_site,
    edges_of_softmax,
    log_couplings,
    own_parents,
    own_samples,
    own_steps,
    pose_column,
    samples_of_block,
    scalars,
    tile_of_edge,
    tile_of_step,
    tiny_of,
    transform_row,
    transforms_at,
    vectors,
    votes_of,
)
from torchcaps.kernels.moments import Record


@triton.jit
def _gradient_scale(a):
    """Return the factor by which the gradients of a child with activation a are multiplied, so that none overflows.

    The factor is √tiny if tiny ≤ a < √tiny, where tiny is the smallest normal number. Otherwise the factor is 1.
    """
    root = 1.0842021724855044e-19 if a.dtype == tl.float32 else 1.4916681462400413e-154
    return tl.where((a >= tiny_of(a.dtype)) & (a < root), root, 1.0).to(a.dtype)


@triton.jit
def _coupling_grads(votes, log_c, a, record, tile):
    """Return share and c u, both multiplied by `_gradient_scale` of the activation, and ḡ_mean + 2 ḡ_variance e.

    `record` comes from `record_of`, so its variance is Σ_h ḡ_variance variance.
    """
    scale, log_share = _gradient_scale(a), (log_c - scalars(record.largest, tile)) - scalars(record.log_mass, tile)
    bounded = tl.where(log_share > 60, 60.0, log_share)  # because the share of a child with activation 0 may overflow
    share = tl.exp(tl.where(a < tiny_of(a.dtype), bounded, log_share + tl.log(scale)))
    share = tl.where(tile.parents.is_parent, share, 0.0)
    e = votes - vectors(record.mean, tile)
    mean_grad, variance_term = vectors(record.mean_grad, tile), tl.zeros_like(e)
    if record.variance_grad is not None:
        variance_term = vectors(record.variance_grad, tile) * e
    c_grad = share * (tl.sum(e * (mean_grad + variance_term), axis=2) - scalars(record.variance, tile))
    if record.mass_grad is not None:
        c_grad += scale * tl.exp(log_c) * scalars(record.mass_grad, tile)
    return share, tl.where(tile.parents.is_parent, c_grad, 0.0), mean_grad + 2 * variance_term


@triton.jit
def _logit_grads(log_c, a, c_grad, record, tile, z: tl.constexpr):
    """Return ḡ_logit, which is 0 for a child with activation 0, even if c u is infinite."""
    at = (tile.parents.sample * z.softmaxes + tile.softmax) * z.types + tile.child_type
    gamma = tl.load(record.coupling_grads + at, tile.parents.is_sample, 0)[:, None]
    scaled = a / _gradient_scale(a) * (c_grad - tl.exp(log_c) * gamma)
    return tl.where((a == 0) | (tile.parents.is_parent == 0), 0.0, scaled)


@triton.jit
def _sum_over_softmax(layer, record, out, samples, z: tl.constexpr):
    """Compute γ of each softmax."""
    dtype: tl.constexpr = out.dtype.element_ty
    softmax, child_type, sample, is_sample = own_samples(samples, z.softmaxes, z)
    site, begin, end = edges_of_softmax(layer.lists, softmax, z)
    a = activations(layer, (sample * z.sites + site) * z.types + child_type, is_sample, z, dtype)
    gamma = tl.full([z.block_samples], 0, dtype)
    for edge in range(begin, end):
        for first_type in range(0, z.parent_types, z.block_types):
            tile = tile_of_edge(layer.lists, edge, site, child_type, sample, is_sample, first_type, z)
            votes = votes_of(layer, tile, z, dtype)
            log_c, _ = log_couplings(votes, record, layer, tile, z)
            _, c_grad, _ = _coupling_grads(votes, log_c, a, record, tile)
            gamma += tl.sum(c_grad, axis=1)
    tl.store(out + (sample * z.softmaxes + softmax) * z.types + child_type, gamma, is_sample)


@triton.jit
def _sum_at_parents(layer, record, zeroths, firsts, seconds, group_count, samples, z: tl.constexpr):
    """Compute Σ ḡ_logit, Σ ḡ_logit d and Σ ḡ_logit d² over each group of a parent's children."""
    dtype: tl.constexpr = zeroths.dtype.element_ty
    parents, start, from_step, to_step, to = own_parents(layer.lists, samples, group_count, z)
    zeroth = tl.full([z.block_samples, z.block_types], 0, dtype)
    first = tl.full([z.block_samples, z.block_types, z.block_numbers], 0, dtype)
    second = tl.full([z.block_samples, z.block_types, z.block_numbers], 0, dtype)
    for step in range(from_step, to_step):
        tile = tile_of_step(layer.lists, step, start, parents, z)
        a = activations(layer, tile.child, tile.parents.is_sample, z, dtype)
        votes = votes_of(layer, tile, z, dtype)
        log_c, d = log_couplings(votes, record, layer, tile, z)
        _, c_grad, _ = _coupling_grads(votes, log_c, a, record, tile)
        logit_grad = _logit_grads(log_c, a, c_grad, record, tile, z)
        zeroth += logit_grad
        if firsts is not None:
            first += logit_grad[:, :, None] * d
        if seconds is not None:
            second += logit_grad[:, :, None] * d * d
    tl.store(zeroths + to + parents.at, zeroth, parents.is_parent)
    if firsts is not None:
        tl.store(firsts + to * z.numbers + parents.numbers, first, parents.is_number)
    if seconds is not None:
        tl.store(seconds + to * z.numbers + parents.numbers, second, parents.is_number)


@triton.jit
def _vote_grads(layer, passes, count: tl.constexpr, a, activation_grad, tile, z: tl.constexpr):
    """Return ḡ_V summed over the `count` passes, and ``activation_grad`` plus Σ_j c u of these passes."""
    votes = votes_of(layer, tile, z, a.dtype)
    vote_grad = tl.zeros_like(votes)
    for t in tl.static_range(count):
        record = passes[t]
        log_c, d = log_couplings(votes, record, layer, tile, z)
        share, c_grad, moments_grad = _coupling_grads(votes, log_c, a, record, tile)
        vote_grad += (a / _gradient_scale(a) * share)[:, :, None] * moments_grad
        if layer.activation is not None:
            activation_grad += tl.sum(c_grad, axis=1)
        if record.coupling_grads is not None:
            logit_grad = _logit_grads(log_c, a, c_grad, record, tile, z)[:, :, None]
            if record.linear is not None:
                vote_grad += logit_grad * vectors(record.linear, tile)
            if record.quadratic is not None:
                vote_grad -= 2 * logit_grad * vectors(record.quadratic, tile) * d
    return vote_grad, activation_grad


@triton.jit
def _child_grads(layer, passes, count: tl.constexpr, pose_grads, activation_grads, samples, z: tl.constexpr):
    """Compute the gradients of each child's pose and activation."""
    dtype: tl.constexpr = passes[0].mean.dtype.element_ty
    site, child_type, sample, is_sample = own_samples(samples, z.sites, z)
    child = (sample * z.sites + site) * z.types + child_type
    a = activations(layer, child, is_sample, z, dtype)
    pose_grad = tl.full([z.block_samples, z.block_rows, z.block_inner], 0, dtype)
    activation_grad = tl.full([z.block_samples], 0, dtype)
    row, inner = tl.arange(0, z.block_rows)[None, :, None], tl.arange(0, z.block_inner)[None, None, :]
    begin, end = edges_of_site(layer.lists, site, z)
    for edge in range(begin, end):
        for first_type in range(0, z.parent_types, z.block_types):
            tile = tile_of_edge(layer.lists, edge, site, child_type, sample, is_sample, first_type, z)
            vote_grad, activation_grad = _vote_grads(layer, passes, count, a, activation_grad, tile, z)
            for q in tl.static_range(tl.constexpr(z.inner)):
                column_grad = tl.sum(vote_grad * transform_row(layer, tile, q, z, dtype), axis=1)
                column_grad = tl.reshape(column_grad, [z.block_samples, z.block_rows, z.block_columns])
                pose_grad += tl.where(inner == q, tl.sum(column_grad, axis=2)[:, :, None], 0.0)
    in_pose = is_sample[:, None, None] & (row < z.rows) & (inner < z.inner)
    tl.store(pose_grads + (child[:, None, None] * z.rows + row) * z.inner + inner, pose_grad, in_pose)
    if activation_grads is not None:
        scale = tl.reshape(_gradient_scale(a), [z.block_samples])
        tl.store(activation_grads + child, activation_grad / scale, is_sample)


@triton.jit
def _transform_grads(layer, passes, count: tl.constexpr, transform_grads, group_count, samples, z: tl.constexpr):
    """Compute each transform's gradient, summed over each group of edges and samples: ``[groups, K, C, J, Q, N]``."""
    dtype: tl.constexpr = passes[0].mean.dtype.element_ty
    index, group = tl.program_id(0) // group_count, tl.program_id(0) % group_count
    kernel, child_type = index // z.type_blocks // z.types, index // z.type_blocks % z.types
    first_type = index % z.type_blocks * z.block_types
    sample_blocks = tl.cdiv(samples, z.block_samples)
    transform_grad = tl.full([z.block_types, z.block_inner, z.block_columns], 0, dtype)
    parent_type = first_type + tl.arange(0, z.block_types)[:, None, None]
    inner, column = tl.arange(0, z.block_inner)[None, :, None], tl.arange(0, z.block_columns)[None, None, :]
    start, from_step, to_step = own_steps(layer.lists + z.kernel_begin + kernel, sample_blocks, group, group_count)
    for step in range(from_step, to_step):
        edge = tl.load(layer.lists + z.kernel_edge + start + step // sample_blocks)
        site = tl.load(layer.lists + edge)
        sample, is_sample = samples_of_block(step % sample_blocks, samples, z)
        tile = tile_of_edge(layer.lists, edge, site, child_type, sample, is_sample, first_type, z)
        a = activations(layer, tile.child, is_sample, z, dtype)
        vote_grad, _ = _vote_grads(layer, passes, count, a, tl.full([z.block_samples], 0, dtype), tile, z)
        for q in tl.static_range(tl.constexpr(z.inner)):
            row_grad = tl.sum(vote_grad * pose_column(layer, tile, q, dtype), axis=0)
            row_grad = tl.reshape(row_grad, [z.block_types, z.block_rows, z.block_columns])
            transform_grad += tl.where(inner == q, tl.sum(row_grad, axis=1)[:, None, :], 0.0)
    in_transform = (parent_type < z.parent_types) & (inner < z.inner) & (column < z.columns)
    to = transform_grads + transforms_at(group * z.transforms + kernel, child_type, parent_type, z)
    tl.store(to + inner * z.columns + column, transform_grad, in_transform)


def moments_backward(
    pose, activation, transform, edge_lists, parent_sites, record, types, none_of_the_above, by_sample, agreement_grads
):  # fmt: skip
    """Run `torchcaps.kernels.moments.moments_backward` on a GPU."""
    problem = Problem(pose, activation, transform, edge_lists, parent_sites, types, none_of_the_above)
    z, record = problem.z, record_of(*record, dtype=problem.dtype)
    coupling_grads = problem.per_softmax()
    problem.per_child(_sum_over_softmax, z.softmaxes, record, coupling_grads)
    constant_grad, linear_grad, quadratic_grad, centre_grad = (problem.empty(0) for _ in range(4))
    if agreement_grads:
        record = record._replace(coupling_grads=coupling_grads)
        constant, linear, quadratic, centre, *_ = record
        zeroths = problem.parent_sums()
        firsts = None if linear is None and quadratic is None else problem.parent_sums(z.rows, z.columns)
        seconds = None if quadratic is None else problem.parent_sums(z.rows, z.columns)
        problem.per_parent(_sum_at_parents, record, zeroths, firsts, seconds)
        zeroth, first, second = (None if sums is None else sums.sum(dim=0) for sums in (zeroths, firsts, seconds))
        if centre is not None:
            by_quadratic = 0 if quadratic is None else 2 * quadratic * first
            by_linear = 0 if linear is None else linear * zeroth[..., None, None]
            centre_grad = torch.zeros_like(record.mean) + by_quadratic - by_linear
        constant_grad = constant_grad if constant is None else zeroth
        linear_grad = linear_grad if linear is None else first
        if quadratic is not None:
            quadratic_grad = -second
            if record.numbers is not None:
                inverse_temperature = record.numbers[2]
                of_variance = quadratic_grad * quadratic * (-2 / inverse_temperature * quadratic)
                quadratic_grad = torch.where(inverse_temperature == 0, quadratic_grad, of_variance)
    return coupling_grads, constant_grad, linear_grad, quadratic_grad, centre_grad


def votes_backward(pose, activation, transform, edge_lists, parent_sites, records, types, none_of_the_above, by_sample):
    """Run `torchcaps.kernels.moments.votes_backward` on a GPU."""
    problem = Problem(pose, activation, transform, edge_lists, parent_sites, types, none_of_the_above)
    size = len(Record._fields)
    passes = (record_of(*records[at : at + size], dtype=problem.dtype) for at in range(0, len(records), size))
    passes = tuple(one for one in passes if one.mean is not None)
    create = torch.empty_like if passes else torch.zeros_like
    pose_grad, activation_grad, transform_grad = (None if x is None else create(x) for x in problem.layer[:3])
    if passes:
        problem.per_child(_child_grads, problem.z.sites, passes, len(passes), pose_grad, activation_grad)
        groups = problem.empty(problem.transform_groups, *transform.shape)
        problem.per_transform(_transform_grads, passes, len(passes), groups)
        transform_grad = groups.sum(dim=0).to(transform.dtype)
    return pose_grad, pose.new_empty(0) if activation is None else activation_grad, transform_grad
