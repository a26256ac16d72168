"""Functions that the Triton kernels share. They assign work to programs, and compute tiles of votes and couplings."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Parents(NamedTuple):
    """The parent capsules at one site, for one block of samples and one block of parent types.

    Arguments:
        sample, is_sample: index of each sample and its mask, ``[samples]``.
        parent_type, is_type: index of each parent type and its mask, ``[parent types]``.
        at, is_parent: offset of each parent in ``[B, P, J]`` and its mask, ``[samples, parent types]``.
        numbers, is_number: offset of each number in ``[B, P, J, R, N]`` and its mask, ``[samples, types, numbers]``.
    """

    sample: Any
    is_sample: Any
    parent_type: Any
    is_type: Any
    at: Any
    is_parent: Any
    numbers: Any
    is_number: Any


class Tile(NamedTuple):
    """The votes of one child type along one edge.

    Arguments:
        softmax: index of the softmax to which the votes belong.
        child_type: index of the child type.
        child: offset of each child in ``[B, S, C]``, ``[samples]``.
        poses, is_pose: offset of the pose row for each number of the vote, and its mask, ``[samples, numbers]``.
        transforms, is_transform: offset of the transform column for each number of the vote, and its mask, ``[parent
            types, numbers]``.
        parents: the parents that receive the votes.
    """

    softmax: Any
    child_type: Any
    child: Any
    poses: Any
    is_pose: Any
    transforms: Any
    is_transform: Any
    parents: Any


@triton.jit
def samples_of_block(block, samples, z: tl.constexpr):
    """Return the indices of the samples in a block, and the mask of these indices."""
    sample = block.to(tl.int64) * z.block_samples + tl.arange(0, z.block_samples)
    return sample, sample < samples


@triton.jit
def own_samples(samples, count: tl.constexpr, z: tl.constexpr):
    """Return what a child-side program handles: one of `count` sites, softmaxes or edges; a child type; and samples."""
    index = tl.program_id(0) % (count * z.types)
    sample, is_sample = samples_of_block(tl.program_id(0) // (count * z.types), samples, z)
    return index // z.types, index % z.types, sample, is_sample


@triton.jit
def edges_of_site(lists, site, z: tl.constexpr):
    """Return the index of a child site's first edge, and the index after the last edge of the site."""
    return tl.load(lists + z.child_begin + site), tl.load(lists + z.child_begin + 1 + site)


@triton.jit
def edges_of_softmax(lists, softmax, z: tl.constexpr):
    """Return the child site of a softmax, the index of its first edge, and the index after its last edge."""
    if z.types_compete:
        site, begin, end = tl.load(lists + softmax), softmax, softmax + 1
    else:
        site = softmax
        begin, end = edges_of_site(lists, site, z)
    return site, begin, end


@triton.jit
def numbers_of_vote(z: tl.constexpr):
    """Return row and column in the vote of each element of a tile, and whether the element is part of the vote."""
    place = tl.arange(0, z.block_numbers)
    row, column = place // z.block_columns, place % z.block_columns
    return row, column, (row < z.rows) & (column < z.columns)


@triton.jit
def parents_at(parent_site, first_type, sample, is_sample, z: tl.constexpr):
    """Return the parents at a site, for the block of parent types that begins with `first_type`."""
    row, column, is_number = numbers_of_vote(z)
    parent_type = first_type + tl.arange(0, z.block_types)
    is_type = parent_type < z.parent_types
    at = ((sample * z.parent_sites + parent_site) * z.parent_types)[:, None] + parent_type[None, :]
    is_parent = is_sample[:, None] & is_type[None, :]
    numbers = at[:, :, None] * z.numbers + (row * z.columns + column)[None, None, :]
    is_number = is_parent[:, :, None] & is_number[None, None, :]
    return Parents(sample, is_sample, parent_type, is_type, at, is_parent, numbers, is_number)


@triton.jit
def transforms_at(kernel, child_type, parent_type, z: tl.constexpr):
    """Return, for each given parent type, the offset of its transform in ``[K, C, J, Q, N]``."""
    return ((kernel.to(tl.int64) * z.types + child_type) * z.parent_types + parent_type) * (z.inner * z.columns)


@triton.jit
def tile_of(edge, site, kernel, child_type, parents, z: tl.constexpr):
    softmax = edge if z.types_compete else site
    row, column, is_number = numbers_of_vote(z)
    child = (parents.sample * z.sites + site) * z.types + child_type
    poses = child[:, None] * (z.rows * z.inner) + (row * z.inner)[None, :]
    is_pose = parents.is_sample[:, None] & is_number[None, :]
    transforms = transforms_at(kernel, child_type, parents.parent_type, z)[:, None] + column[None, :]
    is_transform = parents.is_type[:, None] & is_number[None, :]
    return Tile(softmax, child_type, child, poses, is_pose, transforms, is_transform, parents)


@triton.jit
def tile_of_edge(lists, edge, site, child_type, sample, is_sample, first_type, z: tl.constexpr):
    """Return the tile of an edge for a block of parent types that begins with `first_type`."""
    parent_site, kernel = tl.load(lists + z.edges + edge), tl.load(lists + 2 * z.edges + edge)
    return tile_of(edge, site, kernel, child_type, parents_at(parent_site, first_type, sample, is_sample, z), z)


@triton.jit
def own_parents(lists, samples, group_count, z: tl.constexpr):
    """Return a parent-side program's parents, its `own_steps`, and the offset of its group in ``[groups, B, P, J]``."""
    count: tl.constexpr = z.parent_sites * z.type_blocks
    index, rest = tl.program_id(0) % count, tl.program_id(0) // count
    parent_site, first_type = index // z.type_blocks, index % z.type_blocks * z.block_types
    sample, is_sample = samples_of_block(rest // group_count, samples, z)
    group = rest % group_count
    start, from_step, to_step = own_steps(lists + z.parent_begin + parent_site, z.types, group, group_count)
    to = group.to(tl.int64) * samples * (z.parent_sites * z.parent_types)
    return parents_at(parent_site, first_type, sample, is_sample, z), start, from_step, to_step, to


@triton.jit
def own_steps(begin, per_edge, group, group_count):
    """Return the first edge of an edge list, and the first and the end (exclusive) of the steps of one group.

    Each edge takes `per_edge` steps. The steps of the list are divided among `group_count` groups.
    """
    start = tl.load(begin)
    steps = (tl.load(begin + 1) - start).to(tl.int64) * per_edge
    return start, steps * group // group_count, steps * (group + 1) // group_count


@triton.jit
def tile_of_step(lists, step, start, parents, z: tl.constexpr):
    """Return the tile for one step of a parent-side program. Each step handles one (edge, child type) pair."""
    edge = tl.load(lists + z.parent_edge + start + step // z.types)
    return tile_of(edge, tl.load(lists + edge), tl.load(lists + 2 * z.edges + edge), step % z.types, parents, z)


@triton.jit
def pose_column(layer, tile, q, dtype: tl.constexpr):
    """Load column `q` of the poses: ``[samples, 1, numbers]``."""
    return tl.load(layer.pose + q + tile.poses, tile.is_pose, 0).to(dtype)[:, None, :]


@triton.jit
def transform_row(layer, tile, q, z: tl.constexpr, dtype: tl.constexpr):
    """Load row `q` of the transforms: ``[1, parent types, numbers]``."""
    return tl.load(layer.transform + q * z.columns + tile.transforms, tile.is_transform, 0).to(dtype)[None, :, :]


@triton.jit
def votes_of(layer, tile, z: tl.constexpr, dtype: tl.constexpr):
    """Compute the votes ``[samples, parent types, numbers]``; masked samples, types and numbers are 0."""
    votes = tl.full([z.block_samples, z.block_types, z.block_numbers], 0, dtype)
    for q in tl.static_range(tl.constexpr(z.inner)):
        votes += pose_column(layer, tile, q, dtype) * transform_row(layer, tile, q, z, dtype)
    return votes


@triton.jit
def activations(layer, child, is_sample, z: tl.constexpr, dtype: tl.constexpr):
    """Load the activations of children: ``[samples, 1]``."""
    a = tl.full([z.block_samples], 1, dtype)
    if layer.activation is not None:
        a = tl.load(layer.activation + child, is_sample, 0).to(dtype)
    return a[:, None]


@triton.jit
def scalars(base, tile):
    """Load a tile's parents from a tensor ``[B, P, J]``; entries of masked parents are 0, and None is 0."""
    return 0.0 if base is None else tl.load(base + tile.parents.at, tile.parents.is_parent, 0)


@triton.jit
def vectors(base, tile):
    """Load a tile's parents from a tensor ``[B, P, J, R, N]``; masked entries are 0, and None is 0."""
    return 0.0 if base is None else tl.load(base + tile.parents.numbers, tile.parents.is_number, 0)


@triton.jit
def logits_of(votes, agreement, tile, z: tl.constexpr):
    """Return the logits ``[samples, parent types]``, and d = V - centre. `agreement` is a `Record`."""
    d = votes - vectors(agreement.centre, tile)
    factor = tl.zeros_like(votes) + vectors(agreement.linear, tile)
    if agreement.quadratic is not None:
        factor -= vectors(agreement.quadratic, tile) * d
    return tl.sum(factor * d, axis=2) + scalars(agreement.constant, tile), d


@triton.jit
def log_couplings(votes, agreement, layer, tile, z: tl.constexpr):
    """Return log c ``[samples, parent types]``, and d = V - centre.

    `agreement` is a `Record`. If it has no log_sums, the couplings are uniform and d is V.
    """
    if agreement.log_sums is None:
        _, begin, end = edges_of_softmax(layer.lists, tile.softmax, z)
        competitors = (end - begin) * z.parent_types + z.none_of_the_above
        log_c, d = -tl.log(tl.full([z.block_samples, z.block_types], 0, votes.dtype) + competitors), votes
    else:
        logits, d = logits_of(votes, agreement, tile, z)
        at = (tile.parents.sample * (2 * z.softmaxes) + tile.softmax) * z.types + tile.child_type
        top = tl.load(agreement.log_sums + at, tile.parents.is_sample, 0)
        log_sum = tl.load(agreement.log_sums + z.softmaxes * z.types + at, tile.parents.is_sample, 0)
        log_c = (logits - top[:, None]) - log_sum[:, None]
        log_c = tl.where(log_c > 0, 0.0, log_c)  # unlike tl.where, tl.minimum would replace NaN with 0
    return log_c, d


@triton.jit
def tiny_of(dtype: tl.constexpr):
    """Return the smallest normal number. A smaller activation counts as 0."""
    return 1.1754943508222875e-38 if dtype == tl.float32 else 2.2250738585072014e-308
