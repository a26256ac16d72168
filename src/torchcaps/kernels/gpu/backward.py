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

import triton
import triton.language as tl

from torchcaps.kernels.gpu.problem import FEW_REGISTERS, MOST_REGISTERS, Problem
from torchcaps.kernels.gpu.votes import (
    child_program,
    children_of,
    combining_program,
    edges_of_site,
    ends_of,
    log_couplings,
    logit_bias_at,
    logit_weights_at,
    offsets,
    own_edges,
    parent_program,
    parents_of,
    places_in_group,
    places_of,
    poses_at,
    program_of,
    repeated,
    scalar_tile,
    scalars,
    softmax_of,
    softmax_program,
    store,
    sum_of_numbers,
    sum_over_samples,
    tiny_of,
    transforms_at,
    transforms_of,
    vector_tile,
    vectors,
    votes_along,
    votes_of,
)
from torchcaps.kernels.record import children_grads, records_of


@triton.jit
def _gradient_scale(a):
    """Return the factor by which the gradients of a child with activation a are multiplied, so that none overflows.

    The factor is √tiny if tiny ≤ a < √tiny, where tiny is the smallest normal number. Otherwise the factor is 1.
    """
    root = 1.0842021724855044e-19 if a.dtype == tl.float32 else 1.4916681462400413e-154
    return tl.where((a >= tiny_of(a.dtype)) & (a < root), root, 1.0).to(a.dtype)


@triton.jit
def _coupling_grads(votes, log_c, record, parents, is_vote):
    """Return share and c u, both multiplied by `_gradient_scale` of the activation, and ḡ_mean + 2 ḡ_variance e.

    `record` comes from `completed`, so its variance is Σ_h ḡ_variance variance.
    """
    a, scale = votes.a, _gradient_scale(votes.a)
    log_share = (log_c - parents.largest) - parents.log_mass
    bounded = tl.where(log_share > 60, 60.0, log_share)  # because the share of a child with activation 0 may overflow
    share = tl.exp(tl.where(a < tiny_of(a.dtype), bounded, log_share + tl.log(scale)))
    share = tl.where(is_vote, share, 0.0)
    e = votes.numbers - parents.mean
    variance_term = parents.variance_grad * e
    mean_grad = parents.mean_grad + variance_term
    c_grad = share * (sum_of_numbers(e * mean_grad) - parents.variance)
    if record.mass_grad is not None:
        c_grad += scale * tl.exp(log_c) * parents.mass_grad
    return share, tl.where(is_vote, c_grad, 0.0), mean_grad + variance_term


@triton.jit
def _logit_grads(log_c, a, c_grad, record, softmax, is_vote):
    """Return ḡ_logit, which is 0 for a child with activation 0, even if c u is infinite."""
    gamma = tl.load(record.coupling_grads + softmax.at)
    scaled = a / _gradient_scale(a) * (c_grad - tl.exp(log_c) * gamma)
    return tl.where((a == 0) | (is_vote == 0), 0.0, scaled)


@triton.jit(do_not_specialize=["samples", "zero"])
def _sum_over_softmax(layer, record, out, samples, zero, z: tl.constexpr):
    """Compute γ of each softmax."""
    site, softmax, program = softmax_program(layer.lists, samples, zero, z)
    child_type = program.own_type
    children = children_of(layer, site, child_type, program, z)
    gamma = scalar_tile(0, z)
    for edge in range(softmax.begin, softmax.end):
        _site, parent_site, kernel = ends_of(layer.lists, edge, z)
        for parent_type in tl.range(0, z.parent_types, loop_unroll_factor=2):
            places = places_of(parent_site, parent_type, z.stride, program, z)
            votes = votes_of(children, transforms_of(layer, kernel, child_type, parent_type, program, z), z)
            parents = parents_of(record, places, z)
            log_c, _ = log_couplings(votes, record, parents, softmax)
            _, c_grad, _ = _coupling_grads(votes, log_c, record, parents, program.is_vote)
            gamma += c_grad
    tl.store(out + softmax.at, gamma, program.is_vote)


@triton.jit(do_not_specialize=["group_count", "samples", "zero"])
def _sum_at_parents(layer, record, zeroths, firsts, seconds, group_count, samples, zero, z: tl.constexpr):
    """Compute Σ ḡ_logit, Σ ḡ_logit d and Σ ḡ_logit d² over each group of a parent's children."""
    parent_site, group, program = parent_program(group_count, samples, zero, z)
    is_vote = program.is_vote
    places = places_of(parent_site, program.own_type, z.stride, program, z)
    parents = parents_of(record, places, z)
    begin, end = own_edges(layer.lists + z.parent_begin + parent_site, group, group_count)
    zeroth = scalar_tile(0, z)
    first = vector_tile(z)
    second = vector_tile(z)
    for place in range(begin, end):
        edge = tl.load(layer.lists + z.parent_edge + place)
        site, _parent_site, kernel = ends_of(layer.lists, edge, z)
        for child_type in tl.range(0, z.types, loop_unroll_factor=2):
            votes, softmax = votes_along(layer, edge, site, kernel, child_type, program, z)
            log_c, d = log_couplings(votes, record, parents, softmax)
            _, c_grad, _ = _coupling_grads(votes, log_c, record, parents, is_vote)
            logit_grad = _logit_grads(log_c, votes.a, c_grad, record, softmax, is_vote)
            zeroth += logit_grad
            if firsts is not None:
                first += logit_grad[:, None, None] * d
            if seconds is not None:
                second += logit_grad[:, None, None] * d * d
    to = places_in_group(group, parent_site, program, z)
    store(zeroths, to.at, zeroth, is_vote)
    store(firsts, to.numbers, first, to.is_own)
    store(seconds, to.numbers, second, to.is_own)


@triton.jit
def _vote_grads(passes, count: tl.constexpr, votes, softmax, places, program, z: tl.constexpr):
    """Return ḡ_V, Σ_j c u and ḡ_logit, summed over the `count` passes. Triton 3.5 cannot compile ``len(passes)``."""
    vote_grad, activation_grad, of_logit = vector_tile(z), scalar_tile(0, z), scalar_tile(0, z)
    for t in tl.static_range(count):
        record = passes[t]
        parents = parents_of(record, places, z)
        log_c, d = log_couplings(votes, record, parents, softmax)
        share, c_grad, moments_grad = _coupling_grads(votes, log_c, record, parents, program.is_vote)
        vote_grad += (votes.a / _gradient_scale(votes.a) * share)[:, None, None] * moments_grad
        activation_grad += c_grad
        if record.coupling_grads is not None:
            logit_grad = _logit_grads(log_c, votes.a, c_grad, record, softmax, program.is_vote)
            of_logit += logit_grad
            logit_grad = logit_grad[:, None, None]
            if record.linear is not None:
                vote_grad += logit_grad * parents.linear
            if record.quadratic is not None:
                vote_grad -= 2 * logit_grad * parents.quadratic * d
    return vote_grad, activation_grad, of_logit


@triton.jit(do_not_specialize=["samples", "zero"])
def _child_grads(layer, passes, count: tl.constexpr, pose_grads, activation_grads, samples, zero, z: tl.constexpr):
    """Compute the gradients of each child's pose and activation."""
    site, program = child_program(z.sites, samples, zero, z)
    child_type = program.own_type
    children = children_of(layer, site, child_type, program, z)
    pose_grad = repeated(tl.full([z.lanes, z.block_rows, 1], 0, z.dtype), z.inner)
    activation_grad = scalar_tile(0, z)
    begin, end = edges_of_site(layer.lists, site, z)
    for edge in range(begin, end):
        _site, parent_site, kernel = ends_of(layer.lists, edge, z)
        for parent_type in range(z.parent_types):
            places = places_of(parent_site, parent_type, z.stride, program, z)
            transforms = transforms_of(layer, kernel, child_type, parent_type, program, z)
            votes = votes_of(children, transforms, z)
            softmax = softmax_of(layer.lists, site, edge, child_type, program, z)
            vote_grad, added, logit_grad = _vote_grads(passes, count, votes, softmax, places, program, z)
            activation_grad += added
            sums = ()
            for q in tl.static_range(tl.constexpr(z.inner)):
                added_to_pose = tl.sum(vote_grad * transforms.rows[q], axis=2)[:, :, None]
                if z.depth > z.inner:
                    added_to_pose += logit_grad[:, None, None] * transforms.logit_weights[q]
                sums = sums + (pose_grad[q] + added_to_pose,)
            pose_grad = sums
    child = site * z.types + child_type
    poses, is_pose = poses_at(child, samples, program, z)
    for q in tl.static_range(tl.constexpr(z.inner)):
        tl.store(pose_grads + poses + q * samples, pose_grad[q], program.is_vote[:, None, None] & is_pose)
    if activation_grads is not None:
        at = offsets(child, 1, samples, program, z)
        tl.store(activation_grads + at, activation_grad / _gradient_scale(children.a), program.is_vote)


@triton.jit(do_not_specialize=["group_count", "samples", "zero"])
def _transform_grads(layer, passes, count: tl.constexpr, transform_grads, group_count, samples, zero, z: tl.constexpr):
    """Compute each transform's gradient, summed over groups of edges and samples: ``[groups, K, C, J, depth, N]``."""
    index, group = tl.program_id(0) // group_count, tl.program_id(0) % group_count
    kernel, parent_type = index // z.type_blocks // z.parent_types, index // z.type_blocks % z.parent_types
    type_block, sample_blocks = index % z.type_blocks, tl.cdiv(samples, z.block_samples)
    first = program_of(0, type_block, samples, zero, z)
    child_type = first.own_type
    transforms = transforms_of(layer, kernel, child_type, parent_type, first, z)
    transform_grad = repeated(tl.full([z.lanes, z.block_columns], 0, z.dtype), z.inner)
    weight_grad = repeated(tl.full([z.lanes, z.block_rows, 1], 0, z.dtype), z.inner)
    bias_grad = scalar_tile(0, z)
    begin, end = own_edges(layer.lists + z.kernel_begin + kernel, group, group_count)
    for place in range(begin, end):
        edge = tl.load(layer.lists + z.kernel_edge + place)
        site, parent_site, _kernel = ends_of(layer.lists, edge, z)
        for sample_block in range(sample_blocks):
            program = program_of(sample_block, type_block, samples, zero, z)
            children = children_of(layer, site, child_type, program, z)
            places = places_of(parent_site, parent_type, z.stride, program, z)
            votes = votes_of(children, transforms, z)
            softmax = softmax_of(layer.lists, site, edge, child_type, program, z)
            vote_grad, _, logit_grad = _vote_grads(passes, count, votes, softmax, places, program, z)
            vote_grad = tl.where(program.is_vote[:, None, None], vote_grad, 0.0)  # it may be infinite
            sums = ()
            for q in tl.static_range(tl.constexpr(z.inner)):
                sums = sums + (transform_grad[q] + tl.sum(vote_grad * children.columns[q], axis=1),)
            transform_grad = sums
            if z.depth > z.inner:
                bias_grad += logit_grad
                sums = ()
                for q in tl.static_range(tl.constexpr(z.inner)):
                    sums = sums + (weight_grad[q] + logit_grad[:, None, None] * children.columns[q],)
                weight_grad = sums
    types, column = type_block * z.block_types + tl.arange(0, z.block_types), tl.arange(0, z.block_columns)[None, :]
    is_type = (types < z.types)[:, None]
    at = transforms_at(group * z.transforms + kernel, types, parent_type, z)
    to = transform_grads + (at[:, None] + column)
    for q in tl.static_range(tl.constexpr(z.inner)):
        found = sum_over_samples(transform_grad[q], z.block_columns, z)
        tl.store(to + q * z.columns, found, is_type & (column < z.columns))
    if z.depth > z.inner:
        weights_at, is_row = logit_weights_at(at, z)
        for q in tl.static_range(tl.constexpr(z.inner)):
            found = sum_over_samples(weight_grad[q], z.block_rows, z)[:, :, None]
            tl.store(transform_grads + weights_at + q, found, is_type[:, :, None] & is_row)
        tl.store(transform_grads + logit_bias_at(at, z)[:, None], sum_over_samples(bias_grad, 1, z), is_type)


@triton.jit(do_not_specialize=["group_count", "samples", "zero"])
def _agreement_grads(record, sums, grads, group_count, samples, zero, z: tl.constexpr):
    """Add the sums of all groups from `_sum_at_parents`, and compute the gradients of the agreement."""
    zeroths, firsts, seconds = sums
    constant_grad, linear_grad, quadratic_grad, centre_grad = grads
    parent_site, program, places, out = combining_program(samples, zero, z)
    zeroth = scalar_tile(0, z)
    first = vector_tile(z)
    second = vector_tile(z)
    for group in range(group_count):
        own = places_in_group(group, parent_site, program, z)
        zeroth += scalars(zeroths, own)
        if firsts is not None:
            first += vectors(firsts, own, z)
        if seconds is not None:
            second += vectors(seconds, own, z)
    agreement = parents_of(record, places, z)
    store(constant_grad, places.at, zeroth, program.is_vote)
    store(linear_grad, out.numbers, first, out.is_own)
    if centre_grad is not None:
        grad = 2 * agreement.quadratic * first - agreement.linear * zeroth[:, None, None]
        store(centre_grad, out.numbers, grad, out.is_own)
    if quadratic_grad is not None:
        grad = -second
        if record.numbers is not None:
            inverse_temperature = tl.load(record.numbers + 2)
            factor = -2 / tl.where(inverse_temperature == 0, 1.0, inverse_temperature)
            of_variance = grad * agreement.quadratic * (factor * agreement.quadratic)
            grad = tl.where(inverse_temperature == 0, grad, of_variance)
        store(quadratic_grad, out.numbers, grad, out.is_own)


@triton.jit(do_not_specialize=["group_count", "samples", "zero"])
def _complete(record, quadratic, variance, variance_grad, group_count, samples, zero, z: tl.constexpr):
    """Compute three entries of a record; see `completed`."""
    _, program, places, _ = combining_program(samples, zero, z)
    if quadratic is not None:
        given, inverse_temperature = vectors(record.quadratic, places, z), tl.load(record.numbers + 2)
        used = tl.where(places.is_number, inverse_temperature, 0.0) != 0
        square = tl.where(used, given + tl.load(record.numbers + 1), 1.0)
        found = tl.where(used, 0.5 * inverse_temperature / square, given)
        store(quadratic, places.numbers, found, places.is_own)
    if variance_grad is not None:
        found_variance, grad = vectors(record.variance, places, z), vectors(record.variance_grad, places, z)
        if record.log_volume_grad is not None:
            square = found_variance + tl.load(record.numbers)
            constant = square < tiny_of(square.dtype)
            share = scalars(record.log_volume_grad, places)[:, None, None] / tl.where(constant, 1.0, 2 * square)
            grad += tl.where(constant, 0.0, share)
        grad = tl.where(places.is_number, grad, 0.0)
        store(variance_grad, places.numbers, grad, places.is_own)
        store(variance, places.at, sum_of_numbers(grad * found_variance), program.is_vote)


def completed(problem, record):
    """Convert a `Record` for the kernels.

    `quadratic` becomes the factor of d² in the logits, and `variance_grad` includes the gradient through Σ log σ. The
    kernels do not need the variance itself: `variance` becomes Σ variance · variance_grad, ``[B, P, J]``.
    """
    record = problem.ordered_record(record)
    with_numbers = record.numbers is not None and record.quadratic is not None
    second = record.variance_grad is not None or record.log_volume_grad is not None
    one_group = (1, *problem.plan.group_vectors[1:])
    quadratic = problem.empty(one_group) if with_numbers else None
    variance, variance_grad = (
        (problem.strided(problem.plan.scalar), problem.empty(one_group)) if second else (None, None)
    )
    if with_numbers or second:
        problem.per_parent(_complete, record, quadratic, variance, variance_grad)
    quadratic = quadratic if with_numbers else record.quadratic
    return record._replace(quadratic=quadratic, variance=variance, variance_grad=variance_grad)


def completed_once(problem, record, keep):
    """Return the result of `completed`; with `keep`, that of `moments_backward`, if it exists."""
    kept = getattr(record.coupling_grads, "completed", None) if keep else None
    return completed(problem, record) if kept is None else kept._replace(coupling_grads=record.coupling_grads)


def moments_backward(
    pose, activation, transform, edge_lists, parent_sites, record, types, none_of_the_above, by_sample, agreement_grads,
    keep=False,
):  # fmt: skip
    """Run `torchcaps.kernels.moments.moments_backward` on a GPU.

    With `keep`, `votes_backward` uses the completed record again. Do not use `keep` in compiled functions: the compiler
    may copy the tensors of a record for `votes_backward`, and overwrite the memory of the originals.
    """
    problem = Problem(pose, activation, transform, edge_lists, parent_sites, types, none_of_the_above)
    record = completed(problem, *records_of(record))
    coupling_grads = problem.of_softmaxes()
    if keep:
        coupling_grads.completed = record
    softmaxes = problem.plan.children.softmaxes
    problem.per_child(_sum_over_softmax, softmaxes, record, coupling_grads, registers=FEW_REGISTERS)
    grads = [None] * 4
    if agreement_grads:
        plan = problem.plan
        layouts = (plan.scalar, *3 * (plan.vector,))
        grads = [None if x is None else problem.strided(one) for x, one in zip(record[:4], layouts, strict=True)]
        _, linear_grad, quadratic_grad, _ = grads
        zeroths = problem.empty(plan.group_scalars)
        firsts = None if linear_grad is None and quadratic_grad is None else problem.empty(plan.group_vectors)
        seconds = None if quadratic_grad is None else problem.empty(plan.group_vectors)
        sums = zeroths, firsts, seconds
        record = record._replace(coupling_grads=coupling_grads)
        registers = FEW_REGISTERS if quadratic_grad is None else MOST_REGISTERS
        problem.per_group(_sum_at_parents, record, *sums, registers=registers)
        problem.per_parent(_agreement_grads, record, sums, tuple(grads))
    return coupling_grads, *(problem.empty((0,)) if grad is None else grad for grad in grads)


def votes_backward(
    pose, activation, transform, edge_lists, parent_sites, records, types, none_of_the_above, by_sample, keep=False
):  # fmt: skip
    """Run `torchcaps.kernels.moments.votes_backward` on a GPU. `keep` is that of `moments_backward`."""
    problem = Problem(pose, activation, transform, edge_lists, parent_sites, types, none_of_the_above)
    passes = tuple(completed_once(problem, record, keep) for record in records_of(records) if record.mean is not None)
    pose_grad, activation_grad, transform_grad = children_grads(pose, activation, transform, samples_last=True)
    if passes:
        given = None if activation is None else activation_grad
        problem.per_child(_child_grads, problem.plan.children.sites, passes, len(passes), pose_grad, given)
        groups = problem.empty((problem.plan.transform_groups, *transform.shape))
        if transform.shape[3] > pose.shape[4]:
            groups.zero_()  # the kernel does not write the padding after the weights of the logits
        problem.per_transform(_transform_grads, passes, len(passes), groups)
        transform_grad = groups.sum(dim=0).to(transform.dtype)
    else:
        for grad in (pose_grad, activation_grad, transform_grad):
            grad.zero_()
    return pose_grad, activation_grad, transform_grad
