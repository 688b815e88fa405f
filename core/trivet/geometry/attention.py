"""What one full-attention layer is: heads, head width, rotary embedding."""

from attrs import field, frozen
from attrs.validators import instance_of

from trivet.config.rope import Rope
from trivet.errors import ConfigError


@frozen(cache_hash=True)
class AttentionGeometry:
    """A grouped-query attention layer.

    Layers that share one value of this type share one plan and one owner.

    Attributes:
        query_heads: query heads (``num_attention_heads``).
        kv_heads: key/value heads (``num_key_value_heads``).
        head_dim: width of one head, in elements.
        rope: the rotary embedding that its queries and keys carry.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    rope: Rope = field(validator=instance_of(Rope))

    def __attrs_post_init__(self) -> None:
        for name in ("query_heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"attention geometry: {name} is {getattr(self, name)}, expected at least 1")
        if self.query_heads % self.kv_heads:
            raise ConfigError(
                f"attention geometry: {self.query_heads} query heads are not a multiple of "
                f"{self.kv_heads} KV heads; grouped-query attention needs whole groups"
            )

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    @property
    def query_elements(self) -> int:
        """Elements of all query heads of one token."""
        return self.query_heads * self.head_dim

    @property
    def kv_elements(self) -> int:
        """Elements of the keys (or of the values) of one token."""
        return self.kv_heads * self.head_dim

    @property
    def label(self) -> str:
        """Short name for ledgers and messages, for example ``"40/8x128"``."""
        return f"{self.query_heads}/{self.kv_heads}x{self.head_dim}"
