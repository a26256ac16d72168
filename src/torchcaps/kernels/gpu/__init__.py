"""Fused moments of votes in Triton. This package is imported by the first call that needs it.

Each program handles one block of samples and one site, edge or transform. It loops over edges and blocks of parent
types. A tile of votes ``[samples, parent types, numbers]`` stays in registers. Child-side programs compute the sums of
softmaxes and the gradients of children. Parent-side programs compute sums over votes. If a parent has many children,
the children are split into groups, and the sums of the groups are added in a fixed order. No two programs add to the
same number, so results are bitwise reproducible.
"""
