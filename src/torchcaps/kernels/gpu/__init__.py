"""Fused routing in Triton: what its kernels share. Nothing here is imported before a call needs it.

A program takes one site and a block of samples, and walks along the site's edges and blocks of parent types; votes are
a tile [samples, parent types, numbers] in registers. Child-side programs find log-sums and the gradients of children,
parent-side programs sums over votes; where one parent has many children, they are cut into groups that are added up in
their order. No two programs add to the same number: the same bits every time.
"""
