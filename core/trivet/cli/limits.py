"""The limits that a command serves or plans with: those that were named, and otherwise the device's and the model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import asdict

from trivet.capacity.limits import KINDS, Limits
from trivet.cli.sizing import partial_arguments


def loading_arguments(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `Runtime.load` for the options that were given, and no others.

    Where a limit was given, the others are those of the device that the runtime will be on.

    Raises:
        ConfigError, CapacityExceeded, PluginError: as `Runtime.load`.
    """
    arguments = partial_arguments(dict(given))
    if "limits" not in arguments:
        return arguments
    from trivet.runtime.device import resolve_device

    _, profile = resolve_device(arguments.get("device"))
    return {**arguments, "limits": filled_limits(model, profile.kind, arguments["limits"])}


def filled_limits(model: str, kind: str, named: Mapping[str, int]) -> Limits:
    """`named`, and for the others what a runtime takes by default.

    Args:
        model: whose positions bound the context: a directory, or the name of a shipped model or geometry.
        kind: of device, ``"cpu"`` or ``"cuda"``.

    Raises:
        ConfigError, CapacityExceeded, PluginError: as `Runtime.load`.
    """
    from trivet.config.document import ConfigDocument
    from trivet.plugin.manager import PluginManager
    from trivet.runtime.locate import locate_checkpoint

    document = ConfigDocument.read(locate_checkpoint(model))
    family = PluginManager.discover().family_for(document.model_type)
    with family.blamed("read_geometry"):
        max_positions = family.read_geometry(document).max_positions
    return Limits.for_device(kind, max_positions, **named)


def arguments_elsewhere(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """As `loading_arguments`, for a process that resolves the device itself, and as JSON has them.

    Where a limit was given, limits are a mapping of all of them for each kind of device. Nothing here touches a device:
    one that this process held would be less cold for the other.

    Raises:
        ConfigError, CapacityExceeded, PluginError: as `Runtime.load`.
    """
    arguments = partial_arguments(dict(given))
    if "limits" not in arguments:
        return arguments
    limits = {kind: asdict(filled_limits(model, kind, arguments["limits"])) for kind in KINDS}
    return {**arguments, "limits": limits}


def limits_text(limits: Limits) -> str:
    """For people."""
    return (
        f"{limits.max_requests} requests, {limits.max_step_tokens} tokens a step, a context of {limits.max_context} "
        f"tokens, pages of {limits.page_size} tokens"
    )
