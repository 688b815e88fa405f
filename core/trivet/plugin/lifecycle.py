"""One plugin as it goes from found to loaded or failed. Whatever its code raises ends in its record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pluggy
from attrs import evolve

from trivet.errors import PluginError
from trivet.plugin.backend import AttentionBackend
from trivet.plugin.family import ModelFamily
from trivet.plugin.groups import BACKENDS, FAMILIES, GROUPS, Group
from trivet.plugin.record import Phase, PluginRecord
from trivet.plugin.registration import import_target, provided, register
from trivet.plugin.selection import VARIABLE

if TYPE_CHECKING:
    from trivet import StepReport

logger = logging.getLogger(__name__)

NOT_INSTALLED = "(not installed)"
"""Stands for the distribution of a plugin that was given as an object."""


class Plugin:
    """One plugin: its record, and what it brings once it is loaded.

    Attributes:
        record: what is known of it now.
        families: the one family that serves the entry point's name, where its group is that of families.
        backends: the attention backends that it brings, where its group is theirs.
    """

    def __init__(self, record: PluginRecord, source: Callable[[], object] | None = None) -> None:
        self.record = record
        self._source = source or (lambda: import_target(record.target))
        self._failure: PluginError | None = None
        self._hooks: pluggy.PluginManager | None = None
        self.families: tuple[ModelFamily, ...] = ()
        self.backends: tuple[AttentionBackend, ...] = ()

    @classmethod
    def of(cls, group: Group, name: str, plugin: object) -> Plugin:
        """A plugin that is given as an object instead of an entry point."""
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
        except KeyboardInterrupt:
            raise
        except BaseException as error:
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
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also what exits the process or panics in an extension
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
            message += f"; {VARIABLE}=-{record.distribution}:{record.name} blocks it"
        return message
