"""Fused moments of votes in Triton. This package is imported by the first call that needs it.

A program handles a block of samples and one site, edge or transform, and loops over edges and blocks of parent types. A
tile of votes ``[samples, parent types, numbers]`` stays in registers. Child-side programs compute the sums of softmaxes
and the gradients of children. Parent-side programs compute sums over votes. If a parent has many children, they are
split into groups, whose sums are added in a fixed order. No two programs add to the same number, so results are bitwise
reproducible.
"""
