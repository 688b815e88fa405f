"""Finds plugins, imports those that are needed, and keeps one that fails from harming the others."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import TYPE_CHECKING

from trivet.errors import PluginError
from trivet.plugin.backend import AttentionBackend
from trivet.plugin.discovery import find_plugins
from trivet.plugin.family import ModelFamily
from trivet.plugin.groups import BACKENDS, FAMILIES, GROUPS, OBSERVERS, Group
from trivet.plugin.lifecycle import Plugin
from trivet.plugin.record import PluginRecord
from trivet.plugin.selection import VARIABLE, Selection

if TYPE_CHECKING:
    from trivet import StepReport

logger = logging.getLogger(__name__)


class PluginManager:
    """The plugins of one runtime. Make one with `discover`; nothing is shared between two of them."""

    def __init__(self, plugins: Sequence[Plugin], unmatched: Sequence[str] = ()) -> None:
        self._plugins = tuple(plugins)
        self.unmatched = tuple(unmatched)
        """Selectors in ``TRIVET_PLUGINS`` that name no plugin: probably misspelt."""

    @classmethod
    def discover(cls, selection: str | None = None, path: Sequence[str] | None = None) -> PluginManager:
        """Find every installed plugin from metadata alone; none is imported.

        Args:
            selection: comma-separated names to allow, or to block with ``-`` before them; a name is an entry
                point's, a distribution's, or ``distribution:name``. None reads ``TRIVET_PLUGINS``.
            path: directories to look for distributions in; None: ``sys.path``.
        """
        selected = Selection.parse(os.environ.get(VARIABLE, "") if selection is None else selection)
        records = find_plugins(selected, path)
        unmatched = selected.unmatched((record.name, record.distribution) for record in records)
        return cls([Plugin(record) for record in records], unmatched)

    @classmethod
    def of(
        cls,
        families: Mapping[str, object] | None = None,
        backends: Mapping[str, object] | None = None,
        observers: Mapping[str, object] | None = None,
    ) -> PluginManager:
        """A manager of plugin objects that are not installed, by entry-point name; for tests of a plugin."""
        given = ((FAMILIES, families), (BACKENDS, backends), (OBSERVERS, observers))
        return cls([Plugin.of(group, name, o) for group, named in given for name, o in (named or {}).items()])

    def observed_by(self, observers: Sequence[object]) -> PluginManager:
        """The same plugins and, behind them, objects that observe the steps of one runtime.

        Raises:
            PluginError: one of them does not implement the hook of step observers.
        """
        named = [Plugin.of(OBSERVERS, type(observer).__name__, observer) for observer in observers]
        for plugin in named:
            plugin.load()
        return PluginManager((*self._plugins, *named), self.unmatched)

    @property
    def failed_observers(self) -> int:
        """Step observers that failed, and are not called again."""
        return sum(plugin.record.status == "failed" for plugin in self._of(OBSERVERS))

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """What is known of each plugin now, ordered by group, name and distribution."""
        return tuple(plugin.record for plugin in self._plugins)

    @property
    def model_types(self) -> tuple[str, ...]:
        """Every ``model_type`` with a family that may serve it, imported or not."""
        usable = (p.record.name for p in self._of(FAMILIES) if p.record.status in ("ready", "loaded"))
        return tuple(dict.fromkeys(usable))

    def family_for(self, model_type: str) -> ModelFamily:
        """The family that serves `model_type`. Imports the plugin that brings it and no other.

        Raises:
            PluginError: no plugin serves it, the one that does is blocked or failed, or two claim it.
        """
        named = [plugin for plugin in self._of(FAMILIES) if plugin.record.name == model_type]
        usable = [plugin for plugin in named if plugin.record.status != "blocked"]
        if not usable:
            raise PluginError(self._unserved(model_type, [plugin.record for plugin in named]))
        # A rival that is damaged beyond loading does not stand in the way of one that is not.
        plugin = min(usable, key=lambda plugin: plugin.record.status == "failed")
        plugin.load()
        return plugin.families[0]

    def attention_backends(self) -> tuple[AttentionBackend, ...]:
        """The attention backends of all plugins that bring one and do not fail. Provisional."""
        return tuple(backend for plugin in self._load(BACKENDS) for backend in plugin.backends)

    def observe_step(self, report: StepReport) -> None:
        """Tell every step observer of a finished step. One that raises is logged and not called again."""
        for plugin in self._load(OBSERVERS):
            plugin.observe(report)

    def load_all(self) -> tuple[PluginRecord, ...]:
        """Import every plugin that is ready, so that the records tell which of them fail; returns those."""
        for plugin in self._plugins:
            if plugin.record.status == "ready":
                with suppress(PluginError):
                    plugin.load()
        return self.records

    def _of(self, group: Group) -> Iterator[Plugin]:
        return (plugin for plugin in self._plugins if plugin.record.group == group.name)

    def _load(self, group: Group) -> Iterator[Plugin]:
        for plugin in self._of(group):
            if plugin.record.status == "ready":
                try:
                    plugin.load()
                except PluginError as error:
                    logger.warning("%s", error)
            if plugin.record.status == "loaded":
                yield plugin

    def _unserved(self, model_type: str, blocked: Sequence[PluginRecord]) -> str:
        message = f"no plugin serves model_type {model_type!r}"
        hints = [f"that of {record.origin} is {record.error}" for record in blocked]
        served = self.model_types
        if not hints:
            hints += [
                f"that of {record.origin} cannot be used: {record.error}"
                for record in self.records
                if record.name == model_type and record.group not in GROUPS
            ]
        if close := get_close_matches(model_type, served, n=1):
            hints.append(f"did you mean {close[0]!r}?")
        hints.append(f"served are: {', '.join(served) or 'none'}")
        hints.append(f"a family is found by its entry point of that name in group {FAMILIES.name}")
        return "; ".join((message, *hints))
