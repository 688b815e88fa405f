# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""What kernels of Gated DeltaNet compute of gates, for use inside them."""

import triton
import triton.language as tl


@triton.jit
def silu(x):
    """``x * sigmoid(x)`` in float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def log_decay(a, a_log, dt_bias):
    """``-exp(a_log) * softplus(a + dt_bias)``, linear beyond 20 as torch's softplus is."""
    x = a + dt_bias
    grown = tl.exp(tl.minimum(x, 20.0))
    # The logarithm of one plus very little loses that little.
    softplus = tl.where(grown < 1e-3, grown * (1.0 - 0.5 * grown), tl.log(1.0 + grown))
    return -tl.exp(a_log) * tl.where(x > 20.0, x, softplus)
