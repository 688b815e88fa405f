"""Where an exception was raised, as a plugin's author looks for it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from traceback import walk_tb

from attrs import frozen

from trivet.conformance.coupling import packages_of
from trivet.plugin.family import ModelFamily

KIT = "trivet.conformance"


@frozen
class Frame:
    """One frame of a traceback: the module that it runs, and the line."""

    module: str
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        path = Path(self.file)
        return f"{path.parent.name}/{path.name}:{self.line} in {self.function}"

    @property
    def of_kit(self) -> bool:
        """Whether it is conformance's own."""
        return self.module == KIT or self.module.startswith(KIT + ".")


def frames(error: BaseException) -> list[list[Frame]]:
    """The frames of `error` and of what it was raised from: first the outermost error's, innermost frames last."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__
    return [list(_frames_of(link)) for link in chain]


def origin(error: BaseException, packages: Collection[str] = ()) -> str:
    """The place in `packages` that led to `error`, and the line that raised; elsewhere the last two lines.

    Args:
        packages: top-level packages of the plugin.
    """
    chain = frames(error)
    raised = next((link for link in reversed(chain) if link), [])
    raised = [frame for frame in raised if not frame.of_kit] or raised
    own = (frame for link in reversed(chain) for frame in reversed(link) if frame.module.partition(".")[0] in packages)
    nearest = next(own, None)
    shown = raised[-2:] if nearest is None else [nearest, *(frame for frame in raised[-1:] if frame != nearest)]
    return ", ".join(map(str, shown)) or "an unknown place"


def told(error: BaseException, family: ModelFamily, target: str) -> str:
    """`error` in a sentence: its type, what it says, and where in the plugin behind entry point `target` it arose."""
    try:
        packages = packages_of(family, target)
    except AttributeError:  # a function of the family has no module: a partial, a callable object
        packages = ()
    return f"{type(error).__name__}: {str(error) or 'no message'}, raised at {origin(error, packages)}"


def _frames_of(error: BaseException) -> Iterator[Frame]:
    for frame, line in walk_tb(error.__traceback__):
        code = frame.f_code
        yield Frame(str(frame.f_globals.get("__name__", "")), code.co_filename, line, code.co_name)
