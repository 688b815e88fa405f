"""A checkpoint's chat template: messages to the text of a prompt.

A template is a program that comes with the weights. It runs in Jinja's sandbox, on copies made of plain JSON values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from trivet.config.json_file import read_object
from trivet.errors import CheckpointError, RequestRejected

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
_FILE_LIMIT_BYTES = 2**26


class ChatTemplate:
    """Renders chat messages as the checkpoint's model was trained to read them. Safe to use from several threads.

    Args:
        source: the template, in Jinja with the extensions that Hugging Face's transformers gives it.
        path: the file that it stands in, for errors.
        variables: what the template sees beside messages, such as ``bos_token``.

    Raises:
        CheckpointError: the template is not valid Jinja; names the file and the line.
    """

    def __init__(self, source: str, path: Path, variables: Mapping[str, Any] | None = None) -> None:
        self._path = path
        self._variables = dict(variables or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{path}: chat template, line {error.lineno}: {error.message}") from error
        except Exception as error:  # nested too deeply to be compiled, for one
            raise self._broken(error) from error

    @classmethod
    def load(cls, directory: Path | str) -> ChatTemplate | None:
        """The template of a checkpoint's directory; None if it has none.

        It stands in chat_template.jinja or else under ``chat_template`` of tokenizer_config.json: as a string, or as
        a list of ``{"name", "template"}``, of which the one named "default" is taken. The names of special tokens
        (``bos_token`` and the like) are read from tokenizer_config.json.

        Raises:
            CheckpointError: a file is damaged, or the template is not valid Jinja.
        """
        template_path, config_path = Path(directory) / TEMPLATE_FILE, Path(directory) / CONFIG_FILE
        config = read_object(config_path, CheckpointError, _FILE_LIMIT_BYTES) if os.path.lexists(config_path) else {}
        if os.path.lexists(template_path):  # a link to nothing is a damaged file, not a missing one
            return cls(_read_text(template_path), template_path, _special_tokens(config))
        found = _configured_template(config, config_path)
        return None if found is None else cls(found, config_path, _special_tokens(config))

    def render(
        self, messages: Iterable[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt's text. Encode it with ``add_special_tokens=False``: the template brings its own.

        Args:
            messages: each with a ``role`` and a ``content``, which is text or a list of text parts. Other keys reach
                the template as they are; keys that hold None are left out, since templates print them.
            add_generation_prompt: whether the text ends where the assistant's answer begins.
            **variables: further variables for the template, such as ``tools`` or ``enable_thinking``.

        Raises:
            RequestRejected: the messages are malformed, hold anything but text, or are refused by the template.
            CheckpointError: the template fails, or reaches for what the sandbox forbids; names the file.
        """
        try:
            context = {"tools": None, "documents": None} | self._variables | _plain(variables, "variables")
            context["messages"] = _checked_messages(messages)
        except RecursionError as error:
            raise RequestRejected("messages: nested too deeply, or in themselves") from error
        context["add_generation_prompt"] = bool(add_generation_prompt)
        try:
            return self._template.render(context)
        except _RefusedByTemplate as error:
            raise RequestRejected(f"the chat template of {self._path} refuses these messages: {error}") from error
        except Exception as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: the chat template fails ({type(error).__name__}: {error}); "
            "restore the file from its source, or check that the messages have the shape that it expects"
        )


class _RefusedByTemplate(Exception):
    """What a template raises on purpose."""


def _read_text(path: Path) -> str:
    if not os.path.isfile(path) or path.stat().st_size > _FILE_LIMIT_BYTES:
        raise CheckpointError(f"{path}: expected a regular file of at most {_FILE_LIMIT_BYTES} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """``bos_token`` and the like: strings, or objects with their text in ``content``."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _configured_template(config: Mapping[str, Any], path: Path) -> str | None:
    found = config.get("chat_template")
    if isinstance(found, list):
        if not all(isinstance(entry, dict) for entry in found):
            raise CheckpointError(f"{path}: chat_template: expected a list of objects with name and template")
        found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
    if found is not None and not isinstance(found, str):
        raise CheckpointError(f"{path}: chat_template: found {type(found).__name__}, expected a string or a list")
    return found


def _checked_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise RequestRejected(f"messages: found {type(messages).__name__}, expected a list of messages")
    checked = [_checked_message(message, place) for place, message in enumerate(messages)]
    if not checked:
        raise RequestRejected("messages: found none, expected at least one")
    return checked


def _checked_message(message: object, place: int) -> dict[str, Any]:
    where = f"message {place}"
    if not isinstance(message, Mapping):
        raise RequestRejected(f"{where}: found {type(message).__name__}, expected an object with role and content")
    plain = {name: value for name, value in _plain(message, where).items() if value is not None}
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise RequestRejected(f"{where}: role: found {role!r}, expected a non-empty string")
    if "content" in plain:
        plain["content"] = _text_of(plain["content"], f"{where} ({role})")
    elif "tool_calls" not in plain:
        raise RequestRejected(f"{where} ({role}): has no content")
    return plain


def _text_of(content: object, where: str) -> str:
    """The content as one text, since not every template reads a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRejected(f"{where}: content: found {type(content).__name__}, expected text or text parts")
    return "".join(_text_of_part(part, f"{where}: content part {place}") for place, part in enumerate(content))


def _text_of_part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise RequestRejected(f"{where}: found {type(part).__name__}, expected an object with type and text")
    kind = part.get("type", "text")
    if kind != "text":
        raise RequestRejected(f"{where}: found type {kind!r}: only text is served, no images, video or audio")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestRejected(f"{where}: text: found {type(text).__name__}, expected a string")
    return text


def _plain(value: Any, where: str) -> Any:
    """A copy made of plain JSON values, so that a template meets no object with methods of its own."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # as are enumerations of strings, whose own str() is another text
        return str.__str__(value)
    if isinstance(value, int | float):
        return float(value) if isinstance(value, float) else int(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item, f"{where}: {name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}: {place}") for place, item in enumerate(value)]
    raise RequestRejected(f"{where}: found {type(value).__name__}, expected what JSON can hold")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, where reaching for what is forbidden ends the rendering instead of giving nothing."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Raise what Jinja would raise if the value were used."""
        raise jinja2.exceptions.SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is forbidden")


def _environment() -> _Sandbox:
    """Jinja as transformers runs chat templates, so that a template renders the same text here."""
    # Unoptimised: constants would be worked out while a template is loaded, and may be of any size.
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _new_dict,
        "namespace": _Namespace,
    }
    return environment


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedByTemplate(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _new_dict(*pairs: Any, **items: Any) -> dict[Any, Any]:
    """Stands for ``dict`` without handing out the class."""
    return dict(*pairs, **items)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's escapes for HTML, which a model would have to read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, but for names that Python keeps to itself."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template cannot set {name!r} on a namespace")
        super().__setitem__(name, value)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, which marks the assistant's turns for training, renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Replace the block by its body, in a scope of its own as transformers gives it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)
