"""What one recurrent (Gated DeltaNet) layer is: heads, widths and the state that it carries."""

from attrs import frozen

from trivet.errors import ConfigError


@frozen
class RecurrentGeometry:
    """A gated-delta-rule layer with a causal depthwise convolution before it.

    Attributes:
        key_heads: query/key heads (``linear_num_key_heads``).
        value_heads: value heads (``linear_num_value_heads``), a multiple of `key_heads`.
        key_dim: width of one query/key head.
        value_dim: width of one value head.
        conv_kernel: taps of the convolution (``linear_conv_kernel_dim``).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    def __attrs_post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "conv_kernel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"recurrent geometry: {name} is {getattr(self, name)}, expected at least 1")
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"recurrent geometry: {self.value_heads} value heads are not a multiple of {self.key_heads} key heads"
            )

    @property
    def key_elements(self) -> int:
        """Elements of all keys (or all queries) of one token."""
        return self.key_heads * self.key_dim

    @property
    def value_elements(self) -> int:
        """Elements of all values of one token."""
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries, keys and values side by side."""
        return 2 * self.key_elements + self.value_elements

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Recurrent state of one request: ``[value_heads, key_dim, value_dim]``, float32."""
        return (self.value_heads, self.key_dim, self.value_dim)

    @property
    def tail_shape(self) -> tuple[int, int]:
        """Convolution state of one request: ``[conv_channels, conv_kernel - 1]``, the served dtype."""
        return (self.conv_channels, self.conv_kernel - 1)
