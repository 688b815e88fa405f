"""Every hook that a plugin may implement: three, all in this file.

Each entry-point group asks for one of them (`trivet.plugin.groups`). An implementation is marked with
`hookimpl` and may leave out arguments that it does not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from trivet import StepReport
    from trivet.plugin.backend import AttentionBackend
    from trivet.plugin.family import ModelFamily

PROJECT = "trivet"
"""pluggy's project name: marks of other projects are not seen."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function or method as the implementation of the hook that has its name."""


@hookspec
def trivet_model_families() -> Sequence[ModelFamily]:  # type: ignore[empty-body]
    """The model families that a plugin brings. Asked of plugins in group ``trivet.plugins.v1``.

    Called once, when a checkpoint's ``model_type`` is the name of the plugin's entry point; one of the
    families must list that ``model_type``. Must not import torch: give `ModelFamily.build` as a string.

    >>> from trivet.plugin import ModelFamily, PluginManager, WeightMap, hookimpl
    >>> class Plugin:
    ...     @hookimpl
    ...     def trivet_model_families(self):
    ...         family = ModelFamily(
    ...             name="toy",
    ...             model_types=("toy",),
    ...             read_geometry=lambda document: ...,
    ...             weight_map=lambda geometry: WeightMap(()),
    ...             build="toy.model:build",
    ...         )
    ...         return [family]
    >>> PluginManager.of(families={"toy": Plugin()}).family_for("toy").name
    'toy'
    """


@hookspec
def trivet_attention_backends() -> Sequence[AttentionBackend]:  # type: ignore[empty-body]
    """The attention backends that a plugin brings. Asked of plugins in group ``trivet.backends.v1``.

    Provisional: the backend protocol may still change within v1 of the plugin API. Their decode paths are
    tried after those that the family registered, in order.

    >>> from trivet.plugin import AttentionBackend, PluginManager, hookimpl, standard_paths
    >>> class Plugin:
    ...     @hookimpl
    ...     def trivet_attention_backends(self):
    ...         path = standard_paths()[-1]
    ...         return [AttentionBackend(name=path.backend, decode_paths=(path,))]
    >>> [backend.name for backend in PluginManager.of(backends={"mine": Plugin()}).attention_backends()]
    ['reference']
    """


@hookspec
def trivet_observe_step(report: StepReport) -> None:
    """Be told of a finished step. Asked of plugins in group ``trivet.observers.v1``.

    Called after every step, on the thread that made it: return quickly, and keep no reference to a tensor.
    An observer that raises is logged, listed as failed and not called again; the step stands.

    Args:
        report: what the step did: ``prefill_tokens``, ``decode_tokens``, ``path``, ...

    >>> from types import SimpleNamespace
    >>> from trivet.plugin import PluginManager, hookimpl
    >>> class DecodeCounter:
    ...     tokens = 0
    ...     @hookimpl
    ...     def trivet_observe_step(self, report):
    ...         self.tokens += report.decode_tokens
    >>> counter = DecodeCounter()
    >>> manager = PluginManager.of(observers={"counter": counter})
    >>> manager.observe_step(SimpleNamespace(prefill_tokens=0, decode_tokens=3, path="reference"))
    >>> counter.tokens
    3
    """
