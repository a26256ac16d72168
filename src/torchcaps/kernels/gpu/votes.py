"""What the Triton kernels of every rule share: tiles of votes, records of parents, and the gradients of votes."""

import torch
import triton
import triton.language as tl


@triton.jit
def samples_of_block(block, samples, z: tl.constexpr):
    """Samples of a block, and whether there are such."""
    sample = block.to(tl.int64) * z.block_samples + tl.arange(0, z.block_samples)
    return sample, sample < samples


@triton.jit
def numbers_of_vote(z: tl.constexpr):
    """Row and column of every number of a tile, and whether a vote has it."""
    place = tl.arange(0, z.block_rows * z.block_columns)
    row, column = place // z.block_columns, place % z.block_columns
    return row, column, (row < z.rows) & (column < z.columns)


@triton.jit
def parents_of_block(sample, is_sample, parent_site, first, z: tl.constexpr):
    """Parent types from the first on, the parents ``[samples, parent types]``, and whether there are such."""
    parent_type = first + tl.arange(0, z.block_types)
    parent = ((sample * z.parent_sites + parent_site) * z.parent_types)[:, None] + parent_type[None, :]
    return parent_type, parent, is_sample[:, None] & (parent_type < z.parent_types)[None, :]


@triton.jit
def own_child(samples, z: tl.constexpr):
    """The child site and type of a child-side program, its samples, and the children ``[samples]``."""
    site, child_type = tl.program_id(0) // z.types, tl.program_id(0) % z.types
    sample, is_sample = samples_of_block(tl.program_id(1), samples, z)
    return site, child_type, sample, is_sample, (sample * z.sites + site) * z.types + child_type


@triton.jit
def own_parents(samples, z: tl.constexpr):
    """The parent site of a parent-side program, its samples, and its parents; see `parents_of_block`."""
    blocks: tl.constexpr = (z.parent_types + z.block_types - 1) // z.block_types
    parent_site, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * z.block_types
    sample, is_sample = samples_of_block(tl.program_id(1), samples, z)
    parent_type, parent, is_parent = parents_of_block(sample, is_sample, parent_site, first, z)
    return parent_site, sample, is_sample, parent_type, parent, is_parent


@triton.jit
def own_steps(begin, index, per_edge, group_count):
    """The first edge of a list's index, and from which to which step the program's group goes, so many an edge."""
    start = tl.load(begin + index)
    steps = (tl.load(begin + index + 1) - start).to(tl.int64) * per_edge
    group = tl.program_id(2)
    return start, steps * group // group_count, steps * (group + 1) // group_count


@triton.jit
def in_own_group(parent, samples, z: tl.constexpr):
    """Parents counted on from group to group: ``[group, B, P, J]``."""
    return tl.program_id(2).to(tl.int64) * samples * (z.parent_sites * z.parent_types) + parent


@triton.jit
def child_of_step(step, start, child_site_of, kernel_of, sample, z: tl.constexpr):
    """Child site, place of its transforms, and the children ``[samples]`` of a step along a parent's edges."""
    edge, child_type = start + step // z.types, step % z.types
    site, weights = tl.load(child_site_of + edge), tl.load(kernel_of + edge) * z.types + child_type
    return site, weights, (sample * z.sites + site) * z.types + child_type


@triton.jit
def vote(pose, transform, child, is_sample, weights, parent_type, z: tl.constexpr, dtype: tl.constexpr):
    """Votes ``[samples, parent types, numbers]`` of one child by the transforms of one kernel and child type; zeros
    where there is no such sample, type or number."""
    row, column, is_number = numbers_of_vote(z)
    of_child = pose + child[:, None] * (z.rows * z.inner) + row[None, :] * z.inner
    of_type = transform + (weights.to(tl.int64) * z.parent_types + parent_type[:, None]) * (z.inner * z.columns)
    is_pose = is_sample[:, None] & is_number[None, :]
    is_weight = (parent_type < z.parent_types)[:, None] & is_number[None, :]
    votes = tl.zeros([z.block_samples, z.block_types, z.block_rows * z.block_columns], dtype)
    for q in tl.static_range(tl.constexpr(z.inner)):
        m = tl.load(of_child + q, is_pose, 0).to(dtype)
        w = tl.load(of_type + q * z.columns + column[None, :], is_weight, 0).to(dtype)
        votes += m[:, None, :] * w[None, :, :]
    return votes


@triton.jit
def vectors_of(records, is_parent, z: tl.constexpr):
    """A vote's numbers ``[samples, parent types, numbers]`` at pointers ``[samples, parent types]``; 0 where none."""
    row, column, is_number = numbers_of_vote(z)
    place = row * z.columns + column
    return tl.load(records[:, :, None] + place[None, None, :], is_parent[:, :, None] & is_number[None, None, :], 0)


@triton.jit
def store_vectors(records, values, is_parent, z: tl.constexpr):
    """The other way."""
    row, column, is_number = numbers_of_vote(z)
    place = row * z.columns + column
    tl.store(records[:, :, None] + place[None, None, :], values, is_parent[:, :, None] & is_number[None, None, :])


@triton.jit
def add_pose_grad(pose_grad, votes_grad, transform, weights, parent_type, z: tl.constexpr):
    """Adds Σ_{j, n} gradient of the vote · W to that of the pose ``[samples, rows, inner]``, padded."""
    _, column, is_number = numbers_of_vote(z)
    of_type = transform + (weights.to(tl.int64) * z.parent_types + parent_type[:, None]) * (z.inner * z.columns)
    is_weight = (parent_type < z.parent_types)[:, None] & is_number[None, :]
    at = tl.arange(0, z.block_inner)
    for q in tl.static_range(tl.constexpr(z.inner)):
        w = tl.load(of_type + q * z.columns + column[None, :], is_weight, 0).to(pose_grad.dtype)
        by_number = tl.sum(votes_grad * w[None, :, :], axis=1)
        by_row = tl.sum(tl.reshape(by_number, [z.block_samples, z.block_rows, z.block_columns]), axis=2)
        pose_grad += tl.where(at == q, 1.0, 0.0)[None, None, :].to(pose_grad.dtype) * by_row[:, :, None]
    return pose_grad


@triton.jit
def add_transform_grad(transform_grad, votes_grad, pose, child, is_sample, z: tl.constexpr):
    """Adds Σ_{b, r} M · gradient of the vote to that of the transforms ``[parent types, inner, columns]``, padded."""
    row, _, is_number = numbers_of_vote(z)
    of_child = pose + child[:, None] * (z.rows * z.inner) + row[None, :] * z.inner
    is_pose = is_sample[:, None] & is_number[None, :]
    at = tl.arange(0, z.block_inner)
    for q in tl.static_range(tl.constexpr(z.inner)):
        m = tl.load(of_child + q, is_pose, 0).to(transform_grad.dtype)
        by_number = tl.sum(votes_grad * m[:, None, :], axis=0)
        by_column = tl.sum(tl.reshape(by_number, [z.block_types, z.block_rows, z.block_columns]), axis=1)
        chosen = tl.where(at == q, 1.0, 0.0)[None, :, None].to(transform_grad.dtype)
        transform_grad += chosen * by_column[:, None, :]
    return transform_grad


@triton.jit
def store_pose(out, pose_grad, child, is_sample, z: tl.constexpr):
    """The gradients of poses ``[samples, rows, inner]``."""
    row, inner = tl.arange(0, z.block_rows)[:, None], tl.arange(0, z.block_inner)[None, :]
    there = is_sample[:, None, None] & ((row < z.rows) & (inner < z.inner))[None, :, :]
    tl.store(out + child[:, None, None] * (z.rows * z.inner) + (row * z.inner + inner)[None, :, :], pose_grad, there)


@triton.jit
def store_transform(out, transform_grad, group, weights, first, z: tl.constexpr):
    """A group's gradients of transforms ``[parent types, inner, columns]``: ``[group, K, C, J, Q, N]``."""
    parent_type = first + tl.arange(0, z.block_types)[:, None, None]
    inner = tl.arange(0, z.block_inner)[None, :, None]
    column = tl.arange(0, z.block_columns)[None, None, :]
    there = (parent_type < z.parent_types) & (inner < z.inner) & (column < z.columns)
    row = (group.to(tl.int64) * tl.num_programs(0) + weights) * z.parent_types + parent_type
    tl.store(out + (row * z.inner + inner) * z.columns + column, transform_grad, there)


@triton.jit
def records(base, parent, pass_index, size: tl.constexpr, z: tl.constexpr):
    """Where the records of parents stand: ``[B, T, P, J, size]``."""
    whole: tl.constexpr = z.parent_sites * z.parent_types
    sample, rest = parent // whole, parent % whole
    return base + ((sample * z.passes + pass_index) * whole + rest) * size


@triton.jit
def log_sums_of(log_sums, child, pass_index, z: tl.constexpr):
    """Where the largest logits of children for a pass, from 1 on, stand: ``[B, T - 1, 2, S, C]``."""
    whole: tl.constexpr = z.sites * z.types
    sample, rest = child // whole, child % whole
    return log_sums + (sample * (z.passes - 1) + pass_index - 1) * (2 * whole) + rest


@triton.jit
def log_coupling(logit, log_sums, is_sample, z: tl.constexpr):
    top = tl.load(log_sums, is_sample, 0)
    log_sum = tl.load(log_sums + z.sites * z.types, is_sample, 0)
    return tl.minimum((logit - top[:, None]) - log_sum[:, None], 0.0)


@triton.jit
def gammas_of(gammas, child, pass_index, z: tl.constexpr):
    """Where a number of every child and pass stands: ``[B, T, S, C]``."""
    whole: tl.constexpr = z.sites * z.types
    sample, rest = child // whole, child % whole
    return gammas + (sample * z.passes + pass_index) * whole + rest


@triton.jit
def add_logits(top, total, logit):
    """Goes on with each child's largest logit and Σ e^(logit - largest) by logits ``[samples, parent types]``."""
    higher = tl.maximum(top, tl.max(logit, axis=1))
    return higher, total * tl.exp(top - higher) + tl.sum(tl.exp(logit - higher[:, None]), axis=1)


@triton.jit
def store_log_sums(log_sums, child, pass_index, top, total, is_sample, z: tl.constexpr):
    """The largest logits and the logarithms of the sums; zeros of children that reach no parent."""
    childless = total == 0
    to = log_sums_of(log_sums, child, pass_index, z)
    tl.store(to, tl.where(childless, 0.0, top), is_sample)
    tl.store(to + z.sites * z.types, tl.log(tl.where(childless, 1.0, total)), is_sample)


@triton.jit
def tiny_of(dtype: tl.constexpr):
    """The smallest normal number; a child below it is off."""
    return 1.1754943508222875e-38 if dtype == tl.float32 else 2.2250738585072014e-308


@triton.jit
def unit_of(a, dtype: tl.constexpr):
    """The gradient of a faint child's activation is in units of 1 / √tiny: it may be larger than any number."""
    root = 1.0842021724855044e-19 if dtype == tl.float32 else 1.4916681462400413e-154
    return tl.where((a >= tiny_of(dtype)) & (a < root), root, 1.0).to(dtype)


def units(activation, dtype):
    """As `unit_of`."""
    a, tiny = activation.to(dtype), torch.finfo(dtype).tiny
    return torch.where((a >= tiny) & (a < tiny**0.5), tiny**0.5, 1.0)
