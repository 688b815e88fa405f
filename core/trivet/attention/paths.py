"""The standard decode paths, in order of preference. An ordinary family registers them in one line."""

from trivet.attention.protocol import DecodePath
from trivet.attention.reference.path import ReferencePath


def standard_paths() -> tuple[DecodePath, ...]:
    """The paths that the SDK brings, best first. The first whose predicate says yes serves."""
    return (ReferencePath(),)
