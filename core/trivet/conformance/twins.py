"""The family under test, changed in one respect, and served in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import attrs

from trivet.attention.batch import StepBatch
from trivet.attention.protocol import DecodePath, PathRequest, PlanOwner, Replan, Verdict
from trivet.capacity import PlanCapacity, TileShape
from trivet.geometry import AttentionGeometry
from trivet.layout import BufferLayout, Buffers
from trivet.plugin.capabilities import Capabilities
from trivet.plugin.family import ModelFamily
from trivet.plugin.hookspecs import hookimpl
from trivet.plugin.manager import PluginManager

if TYPE_CHECKING:
    import torch

    from trivet.layers.decoder import DecoderModel


class _Plugin:
    def __init__(self, family: ModelFamily) -> None:
        self._family = family

    @hookimpl
    def trivet_model_families(self) -> Sequence[ModelFamily]:
        return (self._family,)


def manager_of(family: ModelFamily) -> PluginManager:
    """A plugin manager that knows `family` and nothing else."""
    return PluginManager.of(families={name: _Plugin(family) for name in family.model_types})


@contextmanager
def serving(family: ModelFamily) -> Iterator[None]:
    """Let `Runtime.load` and `plan_memory` find `family` instead of what is installed."""
    with mock.patch.object(PluginManager, "discover", lambda *_, **__: manager_of(family)):
        yield


def restricted(family: ModelFamily, *unsupported: str) -> ModelFamily:
    """`family` as it would be if it declared these capabilities unsupported."""
    capabilities = attrs.evolve(family.capabilities, **dict.fromkeys(unsupported, False))
    assert isinstance(capabilities, Capabilities)
    return attrs.evolve(family, capabilities=capabilities)


def with_model(family: ModelFamily, wrap: Callable[[DecoderModel], DecoderModel]) -> ModelFamily:
    """`family` with its model wrapped."""

    def build(*arguments: Any) -> DecoderModel:
        return wrap(family.builder()(*arguments))

    return attrs.evolve(family, build=build)


class ModelWrapper:
    """A model that passes everything on; to be overridden."""

    def __init__(self, model: DecoderModel) -> None:
        self.model = model

    def __call__(self, token_ids: torch.Tensor, step: Any) -> torch.Tensor:
        """Hidden states of the wrapped model."""
        return self.model(token_ids, step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the wrapped model."""
        return self.model.logits(hidden)


@attrs.define
class PathLog:
    """What a runtime asked of its decode paths.

    Attributes:
        capacities: every capacity that a path was given, with the method.
        bound: the buffers and owner of each `bind`, in order.
        attended: calls of `PlanOwner.attend`, by the path's name.
        updates: calls of `PlanOwner.update`, by the path's name.
    """

    capacities: list[tuple[str, PlanCapacity]] = attrs.field(factory=list)
    bound: list[tuple[str, Buffers, PlanOwner]] = attrs.field(factory=list)
    attended: dict[str, int] = attrs.field(factory=dict)
    updates: dict[str, int] = attrs.field(factory=dict)


class WatchedPath:
    """A decode path that notes what is asked of it."""

    def __init__(self, path: DecodePath, log: PathLog) -> None:
        self._path = path
        self._log = log

    @property
    def name(self) -> str:
        """The path's own name."""
        return self._path.name

    @property
    def backend(self) -> str:
        """The path's own backend."""
        return self._path.backend

    def usable(self, need: PathRequest) -> Verdict:
        """The path's own verdict."""
        return self._path.usable(need)

    def tile(self, attention: AttentionGeometry) -> TileShape:
        """The path's own tiles."""
        return self._path.tile(attention)

    def layout(self, capacity: PlanCapacity) -> BufferLayout:
        """The path's own layout."""
        self._log.capacities.append(("layout", capacity))
        return self._path.layout(capacity)

    def scratch_bytes(self, capacity: PlanCapacity, dtype: str) -> int:
        """The path's own bound."""
        self._log.capacities.append(("scratch_bytes", capacity))
        return self._path.scratch_bytes(capacity, dtype)

    def bind(self, capacity: PlanCapacity, buffers: Buffers) -> PlanOwner:
        """The path's own owner, watched."""
        self._log.capacities.append(("bind", capacity))
        owner = self._path.bind(capacity, buffers)
        self._log.bound.append((self.name, buffers, owner))
        return WatchedOwner(owner, self.name, self._log)


class WatchedOwner:
    """A plan owner that counts its calls."""

    def __init__(self, owner: PlanOwner, name: str, log: PathLog) -> None:
        self._owner = owner
        self._name = name
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner, name)

    @property
    def capacity(self) -> PlanCapacity:
        """The owner's own."""
        return self._owner.capacity

    @property
    def buffers(self) -> Buffers:
        """The owner's own."""
        return self._owner.buffers

    @property
    def positions(self) -> torch.Tensor:
        """The owner's own."""
        return self._owner.positions

    def update(self, batch: StepBatch) -> Replan:
        """The owner's own, counted."""
        self._log.updates[self._name] = self._log.updates.get(self._name, 0) + 1
        return self._owner.update(batch)

    def append(self, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The owner's own."""
        self._owner.append(key, value, keys, values)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The owner's own, counted."""
        self._log.attended[self._name] = self._log.attended.get(self._name, 0) + 1
        return self._owner.attend(query, keys, values)

    def close(self) -> None:
        """The owner's own."""
        self._owner.close()


class RefusingPath(WatchedPath):
    """A decode path that says no to everything."""

    REASON = "conformance asks what happens when this path says no"

    @property
    def name(self) -> str:
        """A name of its own."""
        return "conformance-refuses"

    def usable(self, need: PathRequest) -> Verdict:
        """No."""
        return Verdict(False, self.REASON)


def watched(family: ModelFamily, *, refusing_first: bool = False) -> tuple[ModelFamily, PathLog]:
    """`family` with every decode path watched; optionally behind one that says no."""
    log = PathLog()
    paths: list[DecodePath] = [WatchedPath(path, log) for path in family.decode_paths]
    if refusing_first:
        paths.insert(0, RefusingPath(family.decode_paths[0], log))
    return attrs.evolve(family, decode_paths=tuple(paths)), log
