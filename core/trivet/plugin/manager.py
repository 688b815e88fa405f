"""Finds plugins, imports those that are needed, and keeps one that fails from harming the others."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from typing import TYPE_CHECKING

import pluggy
from attrs import evolve

from trivet.errors import PluginError
from trivet.plugin.backend import AttentionBackend
from trivet.plugin.discovery import find_plugins
from trivet.plugin.family import ModelFamily
from trivet.plugin.groups import BACKENDS, FAMILIES, GROUPS, OBSERVERS, Group
from trivet.plugin.record import Phase, PluginRecord
from trivet.plugin.registration import import_target, provided, register
from trivet.plugin.selection import VARIABLE, Selection

if TYPE_CHECKING:
    from trivet import StepReport

logger = logging.getLogger(__name__)

NOT_INSTALLED = "(not installed)"
"""Stands for the distribution of a plugin that was given as an object."""


class PluginManager:
    """The plugins of one runtime. Make one with `discover`; nothing is shared between two of them."""

    def __init__(self, plugins: Sequence[_Plugin], unmatched: Sequence[str] = ()) -> None:
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
        return cls([_Plugin(record) for record in records], unmatched)

    @classmethod
    def of(
        cls,
        families: Mapping[str, object] | None = None,
        backends: Mapping[str, object] | None = None,
        observers: Mapping[str, object] | None = None,
    ) -> PluginManager:
        """A manager of plugin objects that are not installed, by entry-point name; for tests of a plugin."""
        given = ((FAMILIES, families), (BACKENDS, backends), (OBSERVERS, observers))
        return cls([_Plugin.of(group, name, o) for group, named in given for name, o in (named or {}).items()])

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

    def _of(self, group: Group) -> Iterator[_Plugin]:
        return (plugin for plugin in self._plugins if plugin.record.group == group.name)

    def _load(self, group: Group) -> Iterator[_Plugin]:
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


class _Plugin:
    """One plugin as it goes from found to loaded or failed."""

    def __init__(self, record: PluginRecord, source: Callable[[], object] | None = None) -> None:
        self.record = record
        self._source = source or (lambda: import_target(record.target))
        self._failure: PluginError | None = None
        self._hooks: pluggy.PluginManager | None = None
        self.families: tuple[ModelFamily, ...] = ()
        self.backends: tuple[AttentionBackend, ...] = ()

    @classmethod
    def of(cls, group: Group, name: str, plugin: object) -> _Plugin:
        target = f"{type(plugin).__module__}:{type(plugin).__qualname__}"
        record = PluginRecord(name=name, group=group.name, distribution=NOT_INSTALLED, version="", target=target)
        return cls(record, lambda: plugin)

    def load(self) -> None:
        """Import, register and validate, once. Raises the same `PluginError` each time if that failed."""
        if self.record.status == "failed":
            raise self._failure or PluginError(self._described(self.record.error))
        if self.record.status == "loaded":
            return
        group = GROUPS[self.record.group]
        with self._phase("import"):
            plugin = self._source()
        with self._phase("registration", own="registration"):
            hooks = register(plugin, group)
        with self._phase("registration"):
            if group is FAMILIES:
                self.families = self._serving(provided(hooks, group, ModelFamily))
            elif group is BACKENDS:
                self.backends = provided(hooks, group, AttentionBackend)
        self._hooks = hooks
        self.record = evolve(self.record, status="loaded")

    def observe(self, report: StepReport) -> None:
        """Pass `report` to the plugin's observer; contain what that raises."""
        assert self._hooks is not None
        try:
            self._hooks.hook.trivet_observe_step(report=report)
        except Exception as error:
            failure = self._fail("call", error)
            logger.warning("%s; it is not called again", failure, exc_info=error)

    def _serving(self, families: tuple[ModelFamily, ...]) -> tuple[ModelFamily, ...]:
        """The one family that serves the entry point's name."""
        name = self.record.name
        serving = tuple(family for family in families if name in family.model_types)
        if len(serving) != 1:
            listed = "; ".join(f"{family.name!r}: {', '.join(family.model_types)}" for family in families)
            raise PluginError(
                f"{len(serving)} of its families have {name!r} among their model_types ({listed}), expected "
                "one: an entry point's name is the model_type that its plugin serves"
            )
        return serving

    @contextmanager
    def _phase(self, phase: Phase, own: Phase = "validation") -> Iterator[None]:
        """Turn what is raised into a failed record. `own`: the phase where it is a `PluginError`."""
        try:
            yield
        except (Exception, SystemExit) as error:
            raise self._fail(own if isinstance(error, PluginError) else phase, error) from error

    def _fail(self, phase: Phase, error: BaseException) -> PluginError:
        said = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
        text = " ".join(said.split())
        self.record = evolve(self.record, status="failed", phase=phase, error=text)
        self._failure = PluginError(self._described(text))
        return self._failure

    def _described(self, text: str | None) -> str:
        record = self.record
        message = f"plugin {record.name!r} of {record.origin} ({record.group}, {record.target})"
        message += f" failed at {record.phase}: {text}"
        if record.distribution != NOT_INSTALLED:
            message += f"; {VARIABLE}=-{record.distribution} blocks it"
        return message
