"""The public face for plugin authors. Free of torch; `trivet.plugin.layers` is not.

A family needs from here: `hookimpl` and `ModelFamily` to present itself; `ConfigDocument`, `Rope` and the
geometries to read a config; `WeightMap` and `standard_weights` to name its parameters; `standard_paths` to
attend.
"""

from trivet.attention.batch import StepBatch, check_batch
from trivet.attention.paths import standard_paths
from trivet.attention.places import TokenPlaces
from trivet.attention.protocol import DecodePath, PathRequest, PlanOwner, Replan, Verdict
from trivet.capacity import DeviceProfile, Limits, PlanCapacity, TileShape
from trivet.config.document import ConfigDocument, refuse_unserved_features, text_first
from trivet.config.dtype import read_dtype
from trivet.config.generation import tied_embeddings
from trivet.config.rope import Rope
from trivet.errors import (
    CapacityExceeded,
    CheckpointError,
    ConfigError,
    MemoryBudgetError,
    PluginError,
    RequestRejected,
    RuntimeDown,
    TrivetError,
)
from trivet.geometry import AttentionGeometry, LayerGeometry, ModelGeometry, RecurrentGeometry
from trivet.layout import BufferLayout, Buffers, BufferSpec
from trivet.plugin.backend import AttentionBackend
from trivet.plugin.capabilities import Capabilities
from trivet.plugin.evidence import ExpectedFailure, StoredOracle, TransformersOracle
from trivet.plugin.family import ModelFamily
from trivet.plugin.hookspecs import hookimpl
from trivet.plugin.manager import PluginManager
from trivet.plugin.record import PluginRecord
from trivet.weights import standard as standard_weights
from trivet.weights.map import Initial, ParameterSpec, Part, WeightMap

__all__ = [
    # presenting a plugin
    "AttentionBackend",
    "Capabilities",
    "ModelFamily",
    "PluginManager",
    "PluginRecord",
    "hookimpl",
    # showing that it conforms
    "ExpectedFailure",
    "StoredOracle",
    "TransformersOracle",
    # reading a config
    "AttentionGeometry",
    "ConfigDocument",
    "LayerGeometry",
    "ModelGeometry",
    "RecurrentGeometry",
    "Rope",
    "read_dtype",
    "refuse_unserved_features",
    "text_first",
    "tied_embeddings",
    # naming parameters
    "Initial",
    "ParameterSpec",
    "Part",
    "WeightMap",
    "standard_weights",
    # decode paths and plan owners
    "BufferLayout",
    "BufferSpec",
    "Buffers",
    "DecodePath",
    "DeviceProfile",
    "Limits",
    "PathRequest",
    "PlanCapacity",
    "PlanOwner",
    "Replan",
    "StepBatch",
    "TileShape",
    "TokenPlaces",
    "Verdict",
    "check_batch",
    "standard_paths",
    # errors
    "CapacityExceeded",
    "CheckpointError",
    "ConfigError",
    "MemoryBudgetError",
    "PluginError",
    "RequestRejected",
    "RuntimeDown",
    "TrivetError",
]
