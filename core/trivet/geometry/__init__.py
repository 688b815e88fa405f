"""What the model is: per layer, attention or recurrent, and the sizes around them."""

from trivet.geometry.attention import AttentionGeometry
from trivet.geometry.model import LayerGeometry, ModelGeometry
from trivet.geometry.recurrent import RecurrentGeometry

__all__ = ["AttentionGeometry", "LayerGeometry", "ModelGeometry", "RecurrentGeometry"]
