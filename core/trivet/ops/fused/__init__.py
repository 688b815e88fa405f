"""Triton kernels for CUDA devices, fewer and fatter than the torch operations that they stand in for.

Nothing here is imported before `trivet.ops.dispatch` is asked about a CUDA tensor, so that CPU runs need no Triton.
"""
