"""Triton kernels for the moments of votes. `torchcaps.kernels.moments` documents the arguments and results."""

import torch
import triton
import triton.language as tl

from torchcaps.kernels.gaussian import half_precision, log_volume
from torchcaps.kernels.gpu.backward import moments_backward, votes_backward
from torchcaps.kernels.gpu.problem import Problem, record_of
from torchcaps.kernels.gpu.votes import (
    activations,
    edges_of_softmax,
    log_couplings,
    logits_of,
    own_parents,
    own_samples,
    tile_of_edge,
    tile_of_step,
    tiny_of,
    votes_of,
)
from torchcaps.kernels.moments import Record

__all__ = ["couplings", "moments", "moments_backward", "votes_backward"]


@triton.jit
def _logsumexp(layer, agreement, log_sums, samples, z: tl.constexpr):
    """Compute the largest logit of each softmax, and log Σ e^(logit - largest)."""
    dtype: tl.constexpr = log_sums.dtype.element_ty
    softmax, child_type, sample, is_sample = own_samples(samples, z.softmaxes, z)
    site, begin, end = edges_of_softmax(layer.lists, softmax, z)
    top = tl.full([z.block_samples], 0.0 if z.none_of_the_above else -float("inf"), dtype)
    total = tl.full([z.block_samples], 1.0 if z.none_of_the_above else 0.0, dtype)
    for edge in range(begin, end):
        for first_type in range(0, z.parent_types, z.block_types):
            tile = tile_of_edge(layer.lists, edge, site, child_type, sample, is_sample, first_type, z)
            logits, _ = logits_of(votes_of(layer, tile, z, dtype), agreement, tile, z)
            logits = tl.where(tile.parents.is_type[None, :], logits, -float("inf"))
            higher = tl.maximum(top, tl.max(logits, axis=1))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(top - base) + tl.sum(tl.exp(logits - base[:, None]), axis=1)
            top = higher
    empty = (begin == end) & (total == 0)
    to = log_sums + (sample * (2 * z.softmaxes) + softmax) * z.types + child_type
    tl.store(to, tl.where(empty, 0.0, top), is_sample)
    tl.store(to + z.softmaxes * z.types, tl.log(tl.where(empty, 1.0, total)), is_sample)


@triton.jit
def _m_step(layer, agreement, tops, masses, means, variances, group_count, samples, z: tl.constexpr):
    """Compute, for each group of children: the largest log c, Σ a c / (largest c), and mean and variance of the votes.

    Here, the largest c is that of the vote with the largest weight a c. Updating a running mean avoids cancellation.
    """
    dtype: tl.constexpr = tops.dtype.element_ty
    parents, start, from_step, to_step, to = own_parents(layer.lists, samples, group_count, z)
    top = tl.full([z.block_samples, z.block_types], -float("inf"), dtype)
    mass = tl.full([z.block_samples, z.block_types], 0, dtype)
    top_a = tl.zeros_like(mass)
    mean = tl.full([z.block_samples, z.block_types, z.block_numbers], 0, dtype)
    variance = tl.full([z.block_samples, z.block_types, z.block_numbers], 0, dtype)
    for step in range(from_step, to_step):
        tile = tile_of_step(layer.lists, step, start, parents, z)
        a = activations(layer, tile.child, tile.parents.is_sample, z, dtype)
        votes = votes_of(layer, tile, z, dtype)
        log_c, _ = log_couplings(votes, agreement, layer, tile, z)
        used = ((a < tiny_of(dtype)) == 0) & parents.is_parent & (log_c != -float("inf"))
        log_a = tl.zeros_like(log_c) + tl.log(tl.where(a < tiny_of(dtype), 1.0, a))
        rise = (tl.where(used, log_c, 0.0) - top) + (log_a - top_a)  # log_c + log_a would round log_a away
        larger = used & (rise > 0)
        w = tl.where(used, tl.exp(tl.where(larger | (used == 0), 0.0, rise)), 0.0)
        mass = mass * tl.exp(tl.where(larger, -rise, 0.0)) + w
        top, top_a = tl.where(larger, log_c, top), tl.where(larger, log_a, top_a)
        portion = tl.where(w == 0, 0.0, w / tl.where(w == 0, 1.0, mass))
        rest, delta = 1 - portion, votes - mean
        mean += portion[:, :, None] * delta
        if variances is not None:
            variance = rest[:, :, None] * variance + (rest * portion)[:, :, None] * delta * delta
    tl.store(tops + to + parents.at, top, parents.is_parent)
    tl.store(masses + to + parents.at, mass * tl.exp(top_a), parents.is_parent)
    tl.store(means + to * z.numbers + parents.numbers, mean, parents.is_number)
    if variances is not None:
        tl.store(variances + to * z.numbers + parents.numbers, variance, parents.is_number)


@triton.jit
def _write_couplings(layer, agreement, out, samples, z: tl.constexpr):
    """Compute the couplings ``[B, J, E, C]``."""
    edge, child_type, sample, is_sample = own_samples(samples, z.edges, z)
    site = tl.load(layer.lists + edge)
    for first_type in range(0, z.parent_types, z.block_types):
        tile = tile_of_edge(layer.lists, edge, site, child_type, sample, is_sample, first_type, z)
        log_c, _ = log_couplings(votes_of(layer, tile, z, out.dtype.element_ty), agreement, layer, tile, z)
        to = (sample[:, None] * z.parent_types + tile.parents.parent_type[None, :]) * z.edges + edge
        tl.store(out + to * z.types + child_type, tl.exp(log_c), tile.parents.is_parent)


def moments(
    tokens, pose, activation, transform, edge_lists, parent_sites, constant, linear, quadratic, centre, variance_floor,
    inverse_temperature, uniform, types, none_of_the_above, by_sample, with_variance, constant_couplings, floor,
):  # fmt: skip
    """Run `torchcaps.kernels.moments.moments` on a GPU."""
    problem = Problem(pose, activation, transform, edge_lists, parent_sites, types, none_of_the_above)
    z = problem.z
    numbers = variance_floor, inverse_temperature
    agreement = Record() if uniform else _with_log_sums(problem, constant, linear, quadratic, centre, *numbers)
    tops, masses = problem.parent_sums(), problem.parent_sums()
    means = problem.parent_sums(z.rows, z.columns)
    variances = problem.parent_sums(z.rows, z.columns) if with_variance else None
    problem.per_parent(_m_step, agreement, tops, masses, means, variances)
    mass, mean, variance, largest, log_mass = _over_groups(tops, masses, means, variances)
    log_sums = problem.empty(0) if uniform else agreement.log_sums
    volume = problem.empty(0) if floor is None else log_volume(variance, floor)
    return mass, mean, problem.empty(0) if variance is None else variance, largest, log_mass, log_sums, volume


def couplings(
    pose, transform, edge_lists, parent_sites, constant, linear, quadratic, centre, variance_floor, inverse_temperature,
    types, none_of_the_above, by_sample,
):  # fmt: skip
    """Run `torchcaps.kernels.moments.couplings` on a GPU."""
    problem = Problem(pose, None, transform, edge_lists, parent_sites, types, none_of_the_above)
    out = problem.empty(problem.samples, problem.z.parent_types, problem.z.edges, problem.z.types)
    agreement = _with_log_sums(problem, constant, linear, quadratic, centre, variance_floor, inverse_temperature)
    problem.per_child(_write_couplings, problem.z.edges, agreement, out)
    return out


def _with_log_sums(problem, constant, linear, quadratic, centre, variance_floor, inverse_temperature):
    if inverse_temperature:
        quadratic = half_precision(quadratic, variance_floor, inverse_temperature)
    found = record_of(constant, linear, quadratic, centre, dtype=problem.dtype)
    log_sums = problem.per_softmax(2)
    problem.per_child(_logsumexp, problem.z.softmaxes, found, log_sums)
    return found._replace(log_sums=log_sums)


def _over_groups(tops, masses, means, variances):
    """Combine the results of `_m_step` for all groups into mass, mean, variance, largest and log_mass of parents."""
    top = tops.amax(dim=0).clamp_min(torch.finfo(tops.dtype).min)  # not -∞, because -∞ - -∞ is NaN
    masses = masses * (tops - top).exp()
    off = (mass := masses.sum(dim=0)) == 0
    shares = (masses / mass.masked_fill(off, 1))[..., None, None]
    mean = (shares * means).sum(dim=0)
    variance = None if variances is None else (shares * (variances + (means - mean).square())).sum(dim=0)
    return mass * top.exp(), mean, variance, top, mass.log().masked_fill(off, torch.inf)
