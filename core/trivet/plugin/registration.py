"""From the object that an entry point names to what it brings, one checked phase after the other.

Each plugin object gets a pluggy manager of its own: one that does not fit leaves no half-registered hooks
among the others'.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import pluggy

from trivet.errors import PluginError
from trivet.plugin import hookspecs
from trivet.plugin.groups import GROUPS, Group

Value = TypeVar("Value")

HOOKS = tuple(group.hook for group in GROUPS.values())


def import_target(target: str) -> object:
    """The object behind ``module:attribute``, or the module where there is no attribute.

    Raises what the import raises, or `AttributeError`.
    """
    module, _, attribute = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in attribute.split(".") if attribute else ():
        try:
            found = getattr(found, name)
        except AttributeError:
            raise AttributeError(f"module {module!r} has no {attribute!r}; its entry point names it") from None
    return found


def register(plugin: object, group: Group) -> pluggy.PluginManager:
    """Fit `plugin` to the hooks and require the one that `group` asks for.

    Raises:
        PluginError: it implements no hook, a misspelt one, one with wrong arguments, or not the required one.
    """
    if inspect.isclass(plugin):
        raise PluginError(
            f"the entry point names the class {plugin.__name__}: let it name an instance, as in "
            f"'plugin = {plugin.__name__}()'"
        )
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name=getattr(plugin, "__name__", type(plugin).__name__))
    except pluggy.PluginValidationError as error:
        raise PluginError(f"{_one_line(error)}; {_signatures()}") from error
    implemented = [caller.name for caller in manager.get_hookcallers(plugin) or ()]
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        unknown = [name for name in implemented if name not in HOOKS]
        raise PluginError(f"{_one_line(error)}{_suggestions(unknown)}; {_signatures()}") from error
    if group.hook not in implemented:
        unmarked = _unmarked(plugin, group.hook)
        raise PluginError(
            f"group {group.name} asks for {group.brings} through the hook {group.hook}, which the plugin "
            "does not implement"
            + (f": its {unmarked!r} lacks the mark @hookimpl" if unmarked == group.hook else "")
            + (f": did you mean its {unmarked!r}?" if unmarked and unmarked != group.hook else "")
        )
    return manager


def provided(manager: pluggy.PluginManager, group: Group, kind: type[Value]) -> tuple[Value, ...]:
    """Call the plugin's hook and check that it gives a sequence of at least one `kind`.

    Raises:
        PluginError: it gives something else. Whatever the plugin's own code raises passes through.
    """
    expected = f"a sequence of at least one {kind.__name__}"
    results = getattr(manager.hook, group.hook)()
    found = results[0] if results else None
    if not isinstance(found, Sequence) or isinstance(found, str | bytes) or not found:
        raise PluginError(f"hook {group.hook} returned {found!r}, expected {expected}")
    for value in found:
        if not isinstance(value, kind):
            raise PluginError(
                f"hook {group.hook} returned a sequence with {value!r}, a {type(value).__name__}; expected {expected}"
            )
    return tuple(found)


def _signatures() -> str:
    described = (f"{hook}({', '.join(inspect.signature(getattr(hookspecs, hook)).parameters)})" for hook in HOOKS)
    return f"the hooks are {', '.join(described)}"


def _suggestions(unknown: Sequence[str]) -> str:
    pairs = ((name, get_close_matches(name, HOOKS, n=1)) for name in unknown)
    return "".join(f"; did you mean {close[0]!r} instead of {name!r}?" for name, close in pairs if close)


def _unmarked(plugin: object, hook: str) -> str | None:
    close = get_close_matches(hook, [name for name in dir(plugin) if name.startswith(hookspecs.PROJECT)], n=1)
    return close[0] if close else None


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
