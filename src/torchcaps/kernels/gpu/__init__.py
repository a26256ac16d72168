"""Triton kernels that compute the moments of votes. The first call on a GPU imports this package.

Each program handles one block of samples and one site, edge or transform. The program loops over edges and blocks of
parent types, and keeps a tile of votes ``[samples, parent types, numbers]`` in registers. A child-side program computes
the softmax sums or the gradients of one child site or edge. A parent-side program computes sums over the votes for one
parent site. If a parent has many children, the children are split into groups, and the sums of the groups are added in
a fixed order. No two programs add to the same number, so results are bitwise reproducible.
"""
