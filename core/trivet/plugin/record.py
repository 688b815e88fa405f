"""What is known of one plugin, for people and for machines."""

from __future__ import annotations

from typing import Literal, TypeAlias

from attrs import frozen

Status: TypeAlias = Literal["ready", "loaded", "blocked", "incompatible", "failed"]
Phase: TypeAlias = Literal["metadata", "import", "registration", "validation", "call"]


@frozen
class PluginRecord:
    """One entry point that has to do with Trivet.

    Attributes:
        name: the entry point's name; for a family the ``model_type`` that it serves.
        group: its group, which carries the API's version.
        distribution: the distribution that brings it.
        version: of that distribution; empty when its metadata does not say.
        target: ``module:attribute`` that the entry point names.
        status: ``ready`` (not imported yet), ``loaded``, ``blocked`` (by ``TRIVET_PLUGINS``),
            ``incompatible`` (made for another API version, or in a group that Trivet does not read) or
            ``failed``.
        phase: where it failed: ``metadata``, ``import``, ``registration`` (its hooks do not fit),
            ``validation`` (what the hooks gave is wrong) or ``call`` (an observer raised).
        error: one line: what is wrong and what to do; None unless blocked, incompatible or failed.
    """

    name: str
    group: str
    distribution: str
    version: str
    target: str
    status: Status = "ready"
    phase: Phase | None = None
    error: str | None = None

    @property
    def origin(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}".strip()
