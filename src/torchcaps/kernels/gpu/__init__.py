"""Triton kernels that compute the moments of votes. The first call on a GPU imports this package.

Each program handles a block of samples, a block of types, and one site, edge or transform; a program for transforms
loops over all blocks of samples. It keeps a tile of votes ``[lanes, rows, columns]`` in registers. A lane is one sample
of one type. Each warp has one type, each thread of a warp has one sample, and so each thread has whole votes. Sums over
the numbers of a vote need no other thread, and threads next to each other read numbers next to each other, because the
samples are the last dimension in memory.

The types of a child-side program are child types; it computes the softmax sums or the gradients of the children at one
site, in a loop over all of their parents. The types of a parent-side program are parent types; it computes sums over
the votes for the parents at one site. If there are too few programs for a GPU, the edges are split into groups, and the
sums of the groups are added in a fixed order. No two programs add to the same number, so results are bitwise
reproducible.
"""
