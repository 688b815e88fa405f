"""What a model family plugin provides: one frozen value."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import field, frozen

from trivet.attention.paths import standard_paths
from trivet.attention.protocol import DecodePath
from trivet.config.document import ConfigDocument
from trivet.errors import ConfigError, PluginError, TrivetError
from trivet.geometry import ModelGeometry
from trivet.plugin.capabilities import Capabilities
from trivet.plugin.checks import as_tuple, check_name, check_paths, wrong_field
from trivet.plugin.evidence import (
    ExpectedFailure,
    Oracle,
    StoredOracle,
    TransformersOracle,
    check_configs,
    check_expected_failures,
    own_configs,
)
from trivet.weights.map import WeightMap

if TYPE_CHECKING:
    from trivet.layers.decoder import DecoderModel

Builder: TypeAlias = "Callable[..., DecoderModel]"
"""Takes the geometry and the loaded parameters (`trivet.plugin.layers.Parameters`)."""

_TARGET = re.compile(r"\w+(\.\w+)*:\w+(\.\w+)*")


@frozen(kw_only=True)
class ModelFamily:
    """Everything that the runtime must know of an architecture. Importing it must not import torch.

    Attributes:
        name: name in messages and reports.
        model_types: values of config.json's ``model_type`` that the family serves. Each needs an entry point
            of that name in group ``trivet.plugins.v1`` to be found.
        read_geometry: config.json to geometry; raises `ConfigError` for what is not served.
        weight_map: geometry to parameters, with the tensors on disk that fill each.
        build: geometry and loaded parameters to the decoder. A callable, or ``"module:attribute"``, which is
            imported when a model is built and not before, so that memory can be planned without torch.
        decode_paths: the decode paths that serve the family's attention, best first.
        capabilities: what the family supports.
        fused_recurrence: whether its recurrent layers, if it has any, take their rows through
            `StepContext.delta_rule_projected` and through torch operations only where that gives None. On a CUDA device
            snapshots are then kept inside a prompt's one step, short prompts are captured, temporaries are bounded by
            those of the fused kernels, and the pinned policy is served.
        tiny_configs: config.json objects of a few small models by name, of which conformance makes checkpoints with
            random weights. Between them they turn every knob that the family reads.
        oracle: what conformance holds the family's log-probabilities against; None leaves its numerics untested.
        expected_failures: conformance checks that the family is known to fail.

    Raises:
        PluginError: a field is wrong; names the field, what was found and what was expected.
    """

    name: str
    model_types: tuple[str, ...] = field(converter=as_tuple)
    read_geometry: Callable[[ConfigDocument], ModelGeometry]
    # A family reads a geometry of its own type, so that the argument is typed by each family for itself.
    weight_map: Callable[[Any], WeightMap]
    build: Builder | str
    decode_paths: tuple[DecodePath, ...] = field(factory=standard_paths, converter=as_tuple)
    capabilities: Capabilities = field(factory=Capabilities)
    fused_recurrence: bool = False
    tiny_configs: Mapping[str, Mapping[str, object]] = field(
        factory=dict, converter=own_configs, hash=False, repr=False
    )
    oracle: Oracle | None = None
    expected_failures: tuple[ExpectedFailure, ...] = field(default=(), converter=as_tuple)

    def __attrs_post_init__(self) -> None:
        check_name("ModelFamily", self.name)
        where = f"ModelFamily {self.name!r}"
        types = self.model_types
        if not isinstance(types, tuple) or not types or not all(isinstance(t, str) and t for t in types):
            raise wrong_field(where, "model_types", types, f"a tuple of at least one string, as in ({self.name!r},)")
        if len(set(types)) < len(types):
            raise wrong_field(where, "model_types", types, "each model_type once")
        for name in ("read_geometry", "weight_map"):
            if not callable(getattr(self, name)):
                raise wrong_field(where, name, getattr(self, name), "a callable of one argument")
        if not callable(self.build) and not (isinstance(self.build, str) and _TARGET.fullmatch(self.build)):
            raise wrong_field(where, "build", self.build, "a callable or a string 'module:attribute'")
        check_paths(where, self.decode_paths)
        if not isinstance(self.capabilities, Capabilities):
            raise wrong_field(where, "capabilities", self.capabilities, "a Capabilities value")
        if not isinstance(self.fused_recurrence, bool):
            raise wrong_field(where, "fused_recurrence", self.fused_recurrence, "True or False")
        check_configs(where, self.tiny_configs)
        if self.oracle is not None and not isinstance(self.oracle, StoredOracle | TransformersOracle):
            raise wrong_field(where, "oracle", self.oracle, "a StoredOracle, a TransformersOracle or None")
        check_expected_failures(where, self.expected_failures)

    def builder(self) -> Builder:
        """The callable behind `build`, imported now if it was given as a string.

        Raises:
            PluginError: the module cannot be imported, or has no such callable.
        """
        if not isinstance(self.build, str):
            return self.build
        where = f"ModelFamily {self.name!r}: field 'build' is {self.build!r}"
        module, _, attribute = self.build.partition(":")
        try:
            found: Any = importlib.import_module(module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise PluginError(
                f"{where}, and importing {module} failed: {type(error).__name__}: {error}; "
                "install what it needs, or correct the field"
            ) from error
        for name in attribute.split("."):
            if not hasattr(found, name):
                raise PluginError(f"{where}, but {module} has no {attribute!r}: correct the field")
            found = getattr(found, name)
        if not callable(found):
            raise PluginError(f"{where}, which is {found!r}: expected a callable that builds the decoder")
        builder: Builder = found
        return builder

    @contextmanager
    def blamed(self, what: str, *others: type[Exception]) -> Iterator[None]:
        """Turn whatever the family's own code raises in `what` into a `PluginError` that names both.

        Trivet's own errors pass as they are, and so do `others`.
        """
        passing: tuple[type[BaseException], ...] = (TrivetError, KeyboardInterrupt, *others)
        try:
            yield
        except passing:
            raise
        except BaseException as error:
            raise PluginError(
                f"model family {self.name!r} failed in {what}: {type(error).__name__}: {error}; tell its author, or "
                "install a version that serves this checkpoint"
            ) from error

    def require(self, capability: str) -> None:
        """Raise `ConfigError` unless the family supports `capability`, saying what to do instead."""
        if not getattr(self.capabilities, capability):
            raise ConfigError(
                f"model family {self.name!r} does not support {capability} "
                f"({Capabilities.meaning(capability)}): {Capabilities.instead(capability)}"
            )
