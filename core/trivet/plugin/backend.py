"""What an attention backend plugin provides. Provisional: it may change within v1 of the plugin API."""

from __future__ import annotations

from attrs import field, frozen

from trivet.attention.protocol import DecodePath
from trivet.plugin.checks import as_tuple, check_name, check_paths, wrong_field


@frozen(kw_only=True)
class AttentionBackend:
    """Decode paths over one kernel library.

    Attributes:
        name: what ``Runtime.load(attention=...)`` calls it.
        decode_paths: its paths, best first; the `backend` of each is `name`.

    Raises:
        PluginError: a field is wrong; names the field, what was found and what was expected.
    """

    name: str
    decode_paths: tuple[DecodePath, ...] = field(converter=as_tuple)

    def __attrs_post_init__(self) -> None:
        check_name("AttentionBackend", self.name)
        where = f"AttentionBackend {self.name!r}"
        check_paths(where, self.decode_paths)
        for path in self.decode_paths:
            if path.backend != self.name:
                raise wrong_field(
                    where,
                    "decode_paths",
                    path.backend,
                    f"paths of backend {self.name!r}; {path.name!r} is of another",
                )
