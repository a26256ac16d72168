"""Functions that the Triton kernels share. They assign work to programs, and compute tiles of votes and couplings."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchcaps.kernels.record import Record


class Program(NamedTuple):
    """What a program handles: a block of samples, and a block of child types or of parent types.

    A lane is one sample of one type; it becomes one thread. If a block extends beyond the last sample or type, the last
    one takes the place of the missing ones, so loads need no mask.
    """

    sample: Any  # offset of the sample of each lane, ``[lanes]``
    own_type: Any  # type of each lane, ``[lanes]``
    is_vote: Any  # mask of lanes
    samples: Any  # number of samples in the batch
    zero: Any  # 0 for each lane, but the compiler does not know this; see `offsets`


class Children(NamedTuple):
    """The children of a tile."""

    a: Any  # activation of each child, ``[lanes]``
    columns: Any  # columns of their poses, a tuple of tensors ``[lanes, rows, 1]``


class Transforms(NamedTuple):
    """The transforms from the children of a tile to its parents. Without weights, no logit depends on a pose."""

    rows: Any  # a tuple of tensors ``[lanes, 1, columns]``
    logit_weights: Any  # a tuple with a tensor ``[lanes, rows, 1]`` for each column of a pose
    logit_bias: Any  # ``[lanes]``, or 0 without weights


class Votes(NamedTuple):
    """The votes of a tile's children for its parents."""

    numbers: Any  # ``[lanes, rows, columns]``; masked numbers are 0
    pose_logits: Any  # the part of the logits that depends on the poses only, ``[lanes]``
    a: Any  # activation of each child, ``[lanes]``


class Softmax(NamedTuple):
    """The softmax over the parents of each child of a tile."""

    at: Any  # offset of each softmax in ``[G, C, B]``, ``[lanes]``
    count: Any  # number of softmaxes, ``G · C · B``
    begin: Any  # index of the first edge
    end: Any  # index after the last edge
    competitors: Any  # number of logits in the softmax


class Places(NamedTuple):
    """Where the parents of a tile are in memory."""

    at: Any  # offset of each parent in ``[P, J, B]``, ``[lanes]``
    numbers: Any  # offset of each number of a pose in ``[P, J, R, N, stride]``, ``[lanes, rows, columns]``
    is_number: Any  # mask of the rows and columns of a pose, ``[1, rows, columns]``
    is_own: Any  # mask of the numbers that the program has to store


@triton.jit
def program_of(sample_block, type_block, samples, zero, z: tl.constexpr):
    """Return the program with the given blocks of samples and types."""
    lane = tl.arange(0, z.lanes)
    sample = tl.cast(sample_block, tl.int64) * z.block_samples + lane % z.block_samples
    own_type = type_block * z.block_types + lane // z.block_samples
    is_vote = (sample < samples) & (own_type < z.own_types)
    sample, own_type, zero = tl.minimum(sample, samples - 1), tl.minimum(own_type, z.own_types - 1), lane * zero
    return Program(sample + zero, own_type, is_vote, samples, zero)


@triton.jit
def child_program(count: tl.constexpr, samples, zero, z: tl.constexpr):
    """Return what a child-side program handles: one of `count` sites, softmaxes or edges, and its `Program`."""
    index, sample_block = tl.program_id(0) % (count * z.type_blocks), tl.program_id(0) // (count * z.type_blocks)
    return index // z.type_blocks, program_of(sample_block, index % z.type_blocks, samples, zero, z)


@triton.jit
def parent_program(group_count, samples, zero, z: tl.constexpr):
    """Return what a parent-side program handles: a site, a group of its children, and its `Program`."""
    count: tl.constexpr = z.parent_sites * z.type_blocks
    index, rest = tl.program_id(0) % count, tl.program_id(0) // count
    program = program_of(rest // group_count, index % z.type_blocks, samples, zero, z)
    return index // z.type_blocks, rest % group_count, program


@triton.jit
def combining_program(samples, zero, z: tl.constexpr):
    """Return what a parent-side program for all groups of children handles: a site, its `Program`, and two `Places`.

    The second `Places` are those in the outputs of the operators, which have no room for `stride` samples.
    """
    site, _, program = parent_program(1, samples, zero, z)
    places = places_of(site, program.own_type, z.stride, program, z)
    return site, program, places, places_of(site, program.own_type, samples, program, z)


@triton.jit
def own_edges(begin, group, group_count):
    """Return the first and the end (exclusive) of the part of an edge list that belongs to one of the groups."""
    start = tl.load(begin)
    edges = (tl.load(begin + 1) - start).to(tl.int64)
    return start + edges * group // group_count, start + edges * (group + 1) // group_count


@triton.jit
def ends_of(lists, edge, z: tl.constexpr):
    """Return child site, parent site and transform of an edge."""
    return tl.load(lists + edge), tl.load(lists + z.edges + edge), tl.load(lists + 2 * z.edges + edge)


@triton.jit
def edges_of_site(lists, site, z: tl.constexpr):
    """Return the index of a child site's first edge, and the index after the last edge of the site."""
    return tl.load(lists + z.child_begin + site), tl.load(lists + z.child_begin + 1 + site)


@triton.jit
def offsets(index, size, stride, program, z: tl.constexpr):
    """Return the offset of each lane's sample after ``index · size · stride`` numbers; the index may be ``[lanes]``.

    The compiler is told that samples are contiguous in memory. So it lays out tiles with samples along a warp and with
    whole votes in a thread. Offsets are not contiguous where the last sample is repeated and in `laid_out_like_votes`.
    This does no harm as long as each thread has one lane. The compiler has no reason to give a thread several lanes,
    because `zero` hides the alignment: every kernel has `zero` in `do_not_specialize`. tests/test_gpu_build.py checks
    the layouts.
    """
    return tl.max_contiguous(program.sample + index.to(tl.int64) * size * stride, tl.constexpr(z.block_samples))


@triton.jit
def laid_out_like_votes(at, program, z: tl.constexpr):
    """Return offsets ``[lanes, …, …]`` of numbers that all samples share, so that each thread has its own numbers.

    The compiler is told the same as in `offsets`, although the offsets of all samples are equal.
    """
    return tl.max_contiguous(at + program.zero[:, None, None], (tl.constexpr(z.block_samples), 1, 1))


@triton.jit
def softmax_of(lists, site, edge, child_type, program, z: tl.constexpr):
    """Return the `Softmax` to which the votes along an edge belong."""
    if z.types_compete:
        index, begin, end = edge, edge, edge + 1
    else:
        index = site
        begin, end = edges_of_site(lists, site, z)
    at = offsets(index * z.types + child_type, 1, program.samples, program, z)
    count = program.samples.to(tl.int64) * (z.softmaxes * z.types)
    return Softmax(at, count, begin, end, (end - begin) * z.parent_types + z.none_of_the_above)


@triton.jit
def softmax_program(lists, samples, zero, z: tl.constexpr):
    """Return what a child-side program for one softmax per lane handles: a site, a `Softmax`, and its `Program`."""
    index, program = child_program(z.softmaxes, samples, zero, z)
    site = tl.load(lists + index) if z.types_compete else index
    return site, softmax_of(lists, site, index, program.own_type, program, z), program


@triton.jit
def places_of(site, parent_type, stride, program, z: tl.constexpr):
    """Return the `Places` of parents, if `stride` is the distance between two numbers of a pose."""
    row, column = tl.arange(0, z.block_rows)[None, :, None], tl.arange(0, z.block_columns)[None, None, :]
    parent, is_number = site * z.parent_types + parent_type, (row < z.rows) & (column < z.columns)
    first = offsets(parent, z.rows * z.columns, stride, program, z)
    return Places(
        offsets(parent, 1, program.samples, program, z),
        first[:, None, None] + (row * z.columns + column).to(tl.int64) * stride,
        is_number,
        program.is_vote[:, None, None] & is_number,
    )


@triton.jit
def places_in_group(group, site, program, z: tl.constexpr):
    """Return the `Places` of a program's parents in tensors ``[groups, P, J, …]`` of the results for each group."""
    return places_of(group * z.parent_sites + site, program.own_type, z.stride, program, z)


@triton.jit
def poses_at(child, stride, program, z: tl.constexpr):
    """Return the offset of each row of the children's poses in ``[S, C, R, Q, stride]``, and the mask of rows."""
    row = tl.arange(0, z.block_rows)[None, :, None]
    first = offsets(child, z.rows * z.inner, stride, program, z)
    return first[:, None, None] + row.to(tl.int64) * (z.inner * stride), row < z.rows


@triton.jit
def children_of(layer, site, child_type, program, z: tl.constexpr):
    """Load the `Children` at a site."""
    child = site * z.types + child_type
    poses, is_pose = poses_at(child, z.stride, program, z)
    columns = ()
    for q in tl.static_range(tl.constexpr(z.inner)):
        column = load(layer.pose + poses + q * z.stride, is_pose, z.block_rows != z.rows)
        columns = columns + (column.to(z.dtype),)
    if layer.activation is None:
        a = scalar_tile(1, z)
    else:
        a = tl.load(layer.activation + offsets(child, 1, program.samples, program, z)).to(z.dtype)
    return Children(a, columns)


@triton.jit
def transforms_at(kernel, child_type, parent_type, z: tl.constexpr):
    """Return the offset of transforms in ``[K, C, J, depth, N]``."""
    index = (kernel.to(tl.int64) * z.types + child_type) * z.parent_types + parent_type
    return index * (z.depth * z.columns)


@triton.jit
def logit_weights_at(transforms, z: tl.constexpr):
    """Return the offset of the weights of logits for the first number of each row of a pose, and the mask of rows."""
    row = tl.arange(0, z.block_rows)[None, :, None]
    return (transforms + z.inner * z.columns)[:, None, None] + row * z.inner, row < z.rows


@triton.jit
def logit_bias_at(transforms, z: tl.constexpr):
    """Return the offset of the weight of a logit that does not depend on the pose."""
    return transforms + z.inner * (z.columns + z.rows)


@triton.jit
def transforms_of(layer, kernel, child_type, parent_type, program, z: tl.constexpr):
    """Load `Transforms`. A row of 1, 2 or 4 numbers that fit into 16 bytes is loaded with one instruction."""
    bits: tl.constexpr = z.columns * layer.transform.dtype.element_ty.primitive_bitwidth
    transforms, column = transforms_at(kernel, child_type, parent_type, z), tl.arange(0, z.block_columns)[None, None, :]
    at = transforms[:, None, None] + column
    at = at if 4 % z.columns == 0 and bits <= 128 else laid_out_like_votes(at, program, z)
    rows = ()
    for q in tl.static_range(tl.constexpr(z.inner)):
        row = load(layer.transform + at + q * z.columns, column < z.columns, z.block_columns != z.columns)
        rows = rows + (row.to(z.dtype),)
    weights, bias = (), 0.0
    if z.depth > z.inner:
        weights_at, is_row = logit_weights_at(transforms, z)
        at = laid_out_like_votes(weights_at, program, z)
        for q in tl.static_range(tl.constexpr(z.inner)):
            weights = weights + (tl.load(layer.transform + at + q, is_row, 0).to(z.dtype),)
        bias = tl.load(layer.transform + logit_bias_at(transforms, z)).to(z.dtype)
    return Transforms(rows, weights, bias)


@triton.jit
def votes_of(children, transforms, z: tl.constexpr):
    """Compute the `Votes` of `Children`."""
    votes, pose_logits = children.columns[0] * transforms.rows[0], scalar_tile(0, z)
    for q in tl.static_range(1, tl.constexpr(z.inner)):
        votes += children.columns[q] * transforms.rows[q]
    if z.depth > z.inner:
        for q in tl.static_range(tl.constexpr(z.inner)):
            pose_logits += sum_of_numbers(children.columns[q] * transforms.logit_weights[q])
        pose_logits += transforms.logit_bias
    return Votes(votes, pose_logits, children.a)


@triton.jit
def votes_along(layer, edge, site, kernel, child_type, program, z: tl.constexpr):
    """Return the `Votes` of a child type for the program's own parents along an edge, and their `Softmax`."""
    children = children_of(layer, site, child_type, program, z)
    transforms = transforms_of(layer, kernel, child_type, program.own_type, program, z)
    return votes_of(children, transforms, z), softmax_of(layer.lists, site, edge, child_type, program, z)


@triton.jit
def scalar_tile(value, z: tl.constexpr):
    """Return a tile ``[lanes]`` in which every number is the same."""
    return tl.full([z.lanes], value, z.dtype)


@triton.jit
def vector_tile(z: tl.constexpr):
    """Return a tile ``[lanes, rows, columns]`` of zeros."""
    return tl.full([z.lanes, z.block_rows, z.block_columns], 0, z.dtype)


@triton.jit
def load(pointer, mask, masked: tl.constexpr):
    """Load numbers; if `masked` is True, numbers outside the mask are 0."""
    return tl.load(pointer, mask, 0) if masked else tl.load(pointer)


@triton.jit
def store(base, at, numbers, mask):
    """Store numbers, unless the tensor is None."""
    if base is not None:
        tl.store(base + at, numbers, mask)


@triton.jit
def scalars(base, places):
    """Load parents from a tensor ``[P, J, B]``; None is 0."""
    return 0.0 if base is None else tl.load(base + places.at)


@triton.jit
def vectors(base, places, z: tl.constexpr):
    """Load parents from a tensor ``[P, J, R, N, stride]``; None is 0, and so are rows and columns beyond the pose."""
    padded: tl.constexpr = z.block_rows * z.block_columns != z.rows * z.columns
    return 0.0 if base is None else load(base + places.numbers, places.is_number, padded)


@triton.jit
def parents_of(record, places, z: tl.constexpr):
    """Load the entries of a `Record` for the parents of a tile. A missing entry is 0."""
    return Record(
        scalars(record.constant, places),
        vectors(record.linear, places, z),
        vectors(record.quadratic, places, z),
        vectors(record.centre, places, z),
        0.0,
        0.0,
        vectors(record.mean, places, z),
        scalars(record.largest, places),
        scalars(record.log_mass, places),
        scalars(record.variance, places),
        scalars(record.mass_grad, places),
        vectors(record.mean_grad, places, z),
        vectors(record.variance_grad, places, z),
        0.0,
        0.0,
    )


@triton.jit
def repeated(x, count: tl.constexpr):
    """Return a tuple that contains x `count` times."""
    found = ()
    for _one in tl.static_range(tl.constexpr(count)):
        found = found + (x,)
    return found


@triton.jit
def sum_over_samples(x, size: tl.constexpr, z: tl.constexpr):
    """Sum `size` numbers per lane over the samples: ``[types, size]``."""
    return tl.sum(tl.reshape(x, (z.block_types, z.block_samples, size)), axis=1)


@triton.jit
def sum_of_numbers(x):
    """Sum over the rows and columns of a tile."""
    return tl.sum(tl.sum(x, axis=2), axis=1)


@triton.jit
def logits_of(votes, record, parents):
    """Return the logits ``[lanes]``, and d = V - centre."""
    d = votes.numbers - parents.centre
    logits = votes.pose_logits + parents.constant
    if record.linear is not None or record.quadratic is not None:
        factor = tl.zeros_like(d) + parents.linear
        if record.quadratic is not None:
            factor -= parents.quadratic * d
        logits += sum_of_numbers(factor * d)
    return logits, d


@triton.jit
def log_couplings(votes, record, parents, softmax):
    """Return log c ``[lanes]``, and d = V - centre.

    If the record has no log_sums, the couplings are uniform and d is V.
    """
    if record.log_sums is None:
        log_c = -tl.log(tl.zeros_like(votes.pose_logits) + softmax.competitors)
        d = votes.numbers
    else:
        logits, d = logits_of(votes, record, parents)
        top = tl.load(record.log_sums + softmax.at)
        log_sum = tl.load(record.log_sums + softmax.count + softmax.at)
        log_c = (logits - top) - log_sum
        log_c = tl.where(log_c > 0, 0.0, log_c)  # unlike tl.where, tl.minimum would replace NaN with 0
    return log_c, d


@triton.jit
def tiny_of(dtype: tl.constexpr):
    """Return the smallest normal number. A smaller activation counts as 0."""
    return 1.1754943508222875e-38 if dtype == tl.float32 else 2.2250738585072014e-308
