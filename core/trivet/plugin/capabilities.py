"""What a family says it can do. Conformance holds it to each answer, yes or no."""

from __future__ import annotations

from typing import Any

import attrs
from attrs import frozen

from trivet.plugin.checks import wrong_field

_MEANING = "meaning"
_INSTEAD = "instead"


def _capability(meaning: str, instead: str) -> Any:
    return attrs.field(default=True, metadata={_MEANING: meaning, _INSTEAD: instead})


@frozen(kw_only=True)
class Capabilities:
    """What a model family supports; everything, unless it says otherwise.

    What is supported passes conformance; asking for what is not ends in the `ConfigError` of
    `ModelFamily.require`. Each has one meaning, which `meaning` returns.

    Raises:
        PluginError: a value that is neither True nor False.
    """

    prefix_cache: bool = _capability(
        "a prompt that begins like an earlier one may start from what that one left: its full pages and, "
        "where layers are recurrent, a snapshot at the same boundary",
        "load with prefix_cache=False",
    )
    chunked_prefill: bool = _capability(
        "a prompt may be computed over several steps, split anywhere",
        "let max_step_tokens be at least the longest prompt",
    )
    mixed_steps: bool = _capability(
        "one step may hold decode rows and prefill rows together",
        "serve one request at a time: max_requests=1",
    )
    cuda_graphs: bool = _capability(
        "a pure decode step, and a step of one short prompt that is padded, may be captured as a CUDA graph and "
        "replayed: it reads nothing on the host and allocates nothing",
        "load with cuda_graphs=False",
    )
    tied_embeddings: bool = _capability(
        "the embedding matrix may serve as output projection (tie_word_embeddings)",
        "use a checkpoint with an output projection of its own",
    )
    pinned_policy: bool = _capability(
        "under numeric_policy='pinned' the layers compute each token in a way that the rest of "
        "the batch does not change",
        "load with numeric_policy='tuned'",
    )

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                raise wrong_field("Capabilities", field.name, value, "True or False")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all capabilities."""
        return tuple(field.name for field in attrs.fields(cls))

    @classmethod
    def meaning(cls, name: str) -> str:
        """What the capability `name` promises, in a sentence."""
        return str(attrs.fields_dict(cls)[name].metadata[_MEANING])

    @classmethod
    def instead(cls, name: str) -> str:
        """What a user can do where the capability `name` is not supported."""
        return str(attrs.fields_dict(cls)[name].metadata[_INSTEAD])
