"""Triton kernels for the moments of votes. `torchcaps.kernels.moments` documents the arguments and results."""

import triton
import triton.language as tl

from torchcaps.kernels.gpu.backward import completed, moments_backward, votes_backward
from torchcaps.kernels.gpu.problem import FEW_REGISTERS, FEWER_REGISTERS, Problem
from torchcaps.kernels.gpu.votes import (
    child_program,
    children_of,
    combining_program,
    ends_of,
    log_couplings,
    logits_of,
    own_edges,
    parent_program,
    parents_of,
    places_in_group,
    places_of,
    scalar_tile,
    scalars,
    softmax_of,
    softmax_program,
    store,
    sum_of_numbers,
    tiny_of,
    transforms_of,
    vector_tile,
    vectors,
    votes_along,
    votes_of,
)
from torchcaps.kernels.memory import constants
from torchcaps.kernels.record import Record

__all__ = ["couplings", "moments", "moments_backward", "votes_backward"]


@triton.jit(do_not_specialize=["samples", "zero"])
def _logsumexp(layer, agreement, log_sums, samples, zero, z: tl.constexpr):
    """Compute the largest logit of each softmax, and log Σ e^(logit - largest)."""
    site, softmax, program = softmax_program(layer.lists, samples, zero, z)
    child_type = program.own_type
    children = children_of(layer, site, child_type, program, z)
    top = scalar_tile(0.0 if z.none_of_the_above else -float("inf"), z)
    total = scalar_tile(1.0 if z.none_of_the_above else 0.0, z)
    for edge in range(softmax.begin, softmax.end):
        _site, parent_site, kernel = ends_of(layer.lists, edge, z)
        for parent_type in tl.range(0, z.parent_types, loop_unroll_factor=2):
            places = places_of(parent_site, parent_type, z.stride, program, z)
            transforms = transforms_of(layer, kernel, child_type, parent_type, program, z)
            logits, _ = logits_of(votes_of(children, transforms, z), agreement, parents_of(agreement, places, z))
            higher = tl.maximum(top, logits)
            base = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(top - base) + tl.exp(logits - base)
            top = higher
    empty = (softmax.begin == softmax.end) & (total == 0)
    tl.store(log_sums + softmax.at, tl.where(empty, 0.0, top), program.is_vote)
    tl.store(log_sums + softmax.count + softmax.at, tl.log(tl.where(empty, 1.0, total)), program.is_vote)


@triton.jit(do_not_specialize=["group_count", "samples", "zero"])
def _m_step(layer, agreement, tops, masses, means, variances, group_count, samples, zero, z: tl.constexpr):
    """Compute, for each group of children: the largest log c, Σ a c / (largest c), and mean and variance of the votes.

    Here, the largest c is that of the vote with the largest weight a c. Updating a running mean avoids cancellation.
    """
    parent_site, group, program = parent_program(group_count, samples, zero, z)
    places = places_of(parent_site, program.own_type, z.stride, program, z)
    parents = parents_of(agreement, places, z)
    begin, end = own_edges(layer.lists + z.parent_begin + parent_site, group, group_count)
    top = scalar_tile(-float("inf"), z)
    mass = scalar_tile(0, z)
    top_a = tl.zeros_like(mass)
    mean = vector_tile(z)
    variance = vector_tile(z)
    for place in range(begin, end):
        edge = tl.load(layer.lists + z.parent_edge + place)
        site, _parent_site, kernel = ends_of(layer.lists, edge, z)
        for child_type in tl.range(0, z.types, loop_unroll_factor=2):
            votes, softmax = votes_along(layer, edge, site, kernel, child_type, program, z)
            log_c, _ = log_couplings(votes, agreement, parents, softmax)
            a = votes.a
            used = ((a < tiny_of(z.dtype)) == 0) & program.is_vote & (log_c != -float("inf"))
            log_a = tl.log(tl.where(a < tiny_of(z.dtype), 1.0, a))
            rise = (tl.where(used, log_c, 0.0) - top) + (log_a - top_a)  # log_c + log_a would round log_a away
            larger = used & (rise > 0)
            unused = tl.where((log_c != log_c) & program.is_vote, log_c, 0.0)  # NaN remains NaN
            w = tl.where(used, tl.exp(tl.where(larger | (used == 0), 0.0, rise)), unused)
            mass = mass * tl.exp(tl.where(larger, -rise, 0.0)) + w
            top, top_a = tl.where(larger, log_c, top), tl.where(larger, log_a, top_a)
            portion = tl.where(w == 0, 0.0, w / tl.where(w == 0, 1.0, mass))
            delta = votes.numbers - mean
            mean += portion[:, None, None] * delta
            if variances is not None:
                rest = 1 - portion
                variance = rest[:, None, None] * variance + (rest * portion)[:, None, None] * delta * delta
    to = places_in_group(group, parent_site, program, z)
    store(tops, to.at, top, program.is_vote)
    store(masses, to.at, mass * tl.exp(top_a), program.is_vote)
    store(means, to.numbers, mean, to.is_own)
    store(variances, to.numbers, variance, to.is_own)


@triton.jit(do_not_specialize=["group_count", "samples", "zero"])
def _over_groups(groups, found, numbers, group_count, samples, zero, z: tl.constexpr):
    """Combine the results of `_m_step` for all groups into mass, mean, variance, largest, log_mass and Σ log σ."""
    tops, masses, means, variances = groups
    mass_out, mean_out, variance_out, largest_out, log_mass_out, volume_out = found
    parent_site, program, places, out = combining_program(samples, zero, z)
    lowest = -3.4028234663852886e38 if z.dtype == tl.float32 else -1.7976931348623157e308  # -∞ - -∞ is NaN
    top = scalar_tile(lowest, z)
    for group in range(group_count):
        top = tl.maximum(top, scalars(tops, places_in_group(group, parent_site, program, z)))
    mass = scalar_tile(0, z)
    mean = vector_tile(z)
    variance = vector_tile(z)
    for group in range(group_count):
        own = places_in_group(group, parent_site, program, z)
        weight = scalars(masses, own) * tl.exp(scalars(tops, own) - top)
        before = mass
        mass += weight
        portion = tl.where(weight == 0, 0.0, weight / tl.where(weight == 0, 1.0, mass))[:, None, None]
        # A GPU rounds weight / mass: 1 - portion might not be 0 for the first group.
        rest = tl.where(mass == 0, 0.0, before / tl.where(mass == 0, 1.0, mass))[:, None, None]
        delta = vectors(means, own, z) - mean
        mean += portion * delta
        if variances is not None:
            variance += portion * (vectors(variances, own, z) - variance + rest * delta * delta)
    log_mass = tl.where(mass == 0, float("inf"), tl.log(tl.where(mass == 0, 1.0, mass)))
    store(mass_out, places.at, mass * tl.exp(top), program.is_vote)
    store(largest_out, places.at, top, program.is_vote)
    store(log_mass_out, places.at, log_mass, program.is_vote)
    store(mean_out, out.numbers, mean, out.is_own)
    store(variance_out, out.numbers, variance, out.is_own)
    if volume_out is not None:
        square = variance + tl.load(numbers)
        square = tl.where(square < tiny_of(z.dtype), tiny_of(z.dtype), square)
        log_deviation = tl.where(places.is_number, 0.5 * tl.log(square), 0.0)
        store(volume_out, places.at, sum_of_numbers(log_deviation), program.is_vote)


@triton.jit(do_not_specialize=["samples", "zero"])
def _write_couplings(layer, agreement, out, samples, zero, z: tl.constexpr):
    """Compute the couplings ``[B, J, E, C]``."""
    edge, program = child_program(z.edges, samples, zero, z)
    site, parent_site, kernel = ends_of(layer.lists, edge, z)
    child_type = program.own_type
    children = children_of(layer, site, child_type, program, z)
    softmax = softmax_of(layer.lists, site, edge, child_type, program, z)
    for parent_type in range(z.parent_types):
        places = places_of(parent_site, parent_type, z.stride, program, z)
        votes = votes_of(children, transforms_of(layer, kernel, child_type, parent_type, program, z), z)
        log_c, _ = log_couplings(votes, agreement, parents_of(agreement, places, z), softmax)
        to = (program.sample * z.parent_types + parent_type) * z.edges + edge
        tl.store(out + to * z.types + child_type, tl.exp(log_c), program.is_vote)


def moments(
    tokens, pose, activation, transform, edge_lists, parent_sites, constant, linear, quadratic, centre, variance_floor,
    inverse_temperature, uniform, types, none_of_the_above, by_sample, with_variance, constant_couplings, floor,
    keep=False,
):  # fmt: skip
    """Run `torchcaps.kernels.moments.moments` on a GPU. `keep` is that of `constants`."""
    problem = Problem(pose, activation, transform, edge_lists, parent_sites, types, none_of_the_above)
    numbers = None
    if floor is not None or inverse_temperature:
        numbers = constants((floor or 0.0, variance_floor, inverse_temperature), problem.empty((0,)), keep)
    agreement, plan = Record(), problem.plan
    if not uniform:
        given = constant, linear, quadratic, centre
        agreement = _with_log_sums(problem, given, numbers if inverse_temperature else None)
    tops, masses = problem.empty(plan.group_scalars), problem.empty(plan.group_scalars)
    means = problem.empty(plan.group_vectors)
    variances = problem.empty(plan.group_vectors) if with_variance else None
    registers = FEWER_REGISTERS if with_variance else FEW_REGISTERS
    problem.per_group(_m_step, agreement, tops, masses, means, variances, registers=registers)
    mass, largest, log_mass = (problem.strided(plan.scalar) for _ in range(3))
    mean = problem.strided(plan.vector)
    variance = problem.strided(plan.vector) if with_variance else None
    volume = None if floor is None else problem.strided(plan.scalar)
    found = (mass, mean, variance, largest, log_mass, volume)
    problem.per_parent(_over_groups, (tops, masses, means, variances), found, numbers)
    found = (mass, mean, variance, largest, log_mass, agreement.log_sums, volume)
    return tuple(problem.empty((0,)) if x is None else x for x in found)


def couplings(
    pose, transform, edge_lists, parent_sites, constant, linear, quadratic, centre, variance_floor, inverse_temperature,
    types, none_of_the_above, by_sample, keep=False,
):  # fmt: skip
    """Run `torchcaps.kernels.moments.couplings` on a GPU. `keep` is that of `constants`."""
    problem = Problem(pose, None, transform, edge_lists, parent_sites, types, none_of_the_above)
    z = problem.plan.children
    out = problem.empty((problem.samples, z.parent_types, z.edges, z.types))
    numbers = None
    if inverse_temperature:
        numbers = constants((0.0, variance_floor, inverse_temperature), problem.empty((0,)), keep)
    agreement = _with_log_sums(problem, (constant, linear, quadratic, centre), numbers)
    problem.per_child(_write_couplings, z.edges, agreement, out)
    return out


def _with_log_sums(problem, agreement, numbers):
    """Return the `Record` of an agreement for the kernels, with its log_sums."""
    log_sums = problem.of_softmaxes(2)
    record = completed(problem, Record(*agreement, log_sums, numbers=numbers))
    problem.per_child(_logsumexp, problem.plan.children.softmaxes, record, log_sums, registers=FEW_REGISTERS)
    return record
