"""Fused moments of votes in Triton: what its kernels share. Nothing here is imported before a call needs it.

A program takes a block of samples and one site, edge or transform, and walks along edges and blocks of parent types;
votes are a tile [samples, parent types, numbers] in registers. Child-side programs find the sums of softmaxes and the
gradients of children, parent-side programs sums over votes; where one parent has many children, they are cut into
groups that are added up in their order. No two programs add to the same number: the same bits every time.
"""
