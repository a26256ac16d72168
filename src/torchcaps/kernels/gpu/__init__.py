"""Triton kernels that compute the moments of votes. The first call on a GPU imports this package.

Each program handles one block of samples and one site, edge or transform. The program loops over edges and blocks of
parent types, and keeps a tile of votes ``[samples, parent types, numbers]`` in registers. A child-side program handles
one child site or edge. It computes the sums of softmaxes or the gradients of children. A parent-side program handles
one parent site. It computes sums over votes. If a parent has many children, the children are split into groups, and
the sums of the groups are added in a fixed order. No two programs add to the same number, so results are bitwise
reproducible.
"""
