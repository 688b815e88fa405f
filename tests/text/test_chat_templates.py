"""A chat template renders what transformers renders, in a sandbox; bad messages and bad templates are told apart."""

import enum
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from trivet.errors import CheckpointError, RequestRejected
from trivet.text import ChatTemplate

LIKE_QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- "\\n" }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set state = namespace(turns=0, last=none) %}
{%- for message in messages %}
    {%- if message.role == 'comment' %}
        {%- continue %}
    {%- endif %}
    {%- set state.turns = state.turns + 1 %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {% for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' + (call.function.arguments | tojson(indent=2)) + '\\n</tool_call>' }}
        {% endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.content is string %}
        {%- set content = message.content.strip() if message.role == 'user' else message.content %}
        {% generation %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
        {% endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
{{- bos_token if bos_token is defined else 'no bos' }}|{{ eos_token }}|{{ pad_token }}|{{ state.turns }}
"""

CONFIG = {
    "bos_token": None,
    "eos_token": {"content": "<|im_end|>", "lstrip": False, "special": True},
    "pad_token": "<|pad|>",
    "add_bos_token": False,
    "chat_template": LIKE_QWEN,
}

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": '  Hello <b>&"world"</b> 你好 😀  '}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "comment", "content": "not for the model"},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": {"ä": [1, 2.5, None]}}}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Four.", "name": None},
        {"role": "user", "content": "Thanks"},
    ],
]


def write(directory: Path, config: object = None, template: str | None = None) -> Path:
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


def loaded(directory: Path) -> ChatTemplate:
    template = ChatTemplate.load(directory)
    assert template is not None
    return template


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"tools": [{"name": "f<g>", "d": {"é": 1}}]}])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_template_renders_as_transformers_renders_it(
    tmp_path: Path, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: dict[str, Any]
) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(models.BPE()), eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    expected = theirs.apply_chat_template(
        messages,
        chat_template=LIKE_QWEN,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    template = loaded(write(tmp_path, CONFIG))
    assert template.render(messages, add_generation_prompt=add_generation_prompt, **variables) == expected


def test_a_directory_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    assert ChatTemplate.load(write(tmp_path, {"eos_token": "x"})) is None


def test_the_template_s_own_file_comes_before_the_configuration(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template": "from the configuration", "bos_token": "<s>"}, "{{ bos_token }} from the file")
    assert loaded(tmp_path).render([{"role": "user", "content": "x"}]) == "<s> from the file"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert loaded(write(tmp_path, {"chat_template": several})).render([{"role": "user", "content": "x"}]) == "plain"
    assert ChatTemplate.load(write(tmp_path, {"chat_template": several[:1]})) is None


def test_text_parts_are_joined(tmp_path: Path) -> None:
    template = loaded(write(tmp_path, template="{{ messages[0].content }}"))
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]) == "one two"


@pytest.mark.parametrize("kind", ["image", "image_url", "video", "audio", "input_audio", "file"])
def test_what_is_not_text_is_refused(tmp_path: Path, kind: str) -> None:
    template = loaded(write(tmp_path, template="{{ messages[0].content }}"))
    parts = [{"type": "text", "text": "see"}, {"type": kind, kind: "data:"}]
    with pytest.raises(RequestRejected, match=rf"message 0 \(user\).*part 1.*{kind}.*only text is served"):
        template.render([{"role": "user", "content": parts}])


def itself() -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "user", "content": "x"}
    message["again"] = message
    return [message]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "text",
        {"role": "user", "content": "x"},
        None,
        [5],
        ["text"],
        [{"content": "x"}],
        [{"role": "", "content": "x"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": {"text": "x"}}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": "x", "extra": object()}],
        itself(),
    ],
)
def test_malformed_messages_are_refused(tmp_path: Path, messages: Any) -> None:
    with pytest.raises(RequestRejected, match="message"):
        loaded(write(tmp_path, template="{{ messages }}")).render(messages)


def test_what_a_template_raises_refuses_the_messages(tmp_path: Path) -> None:
    source = "{% if messages|length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}"
    template = loaded(write(tmp_path, template=source))
    with pytest.raises(RequestRejected, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}] * 2)


@pytest.mark.parametrize("source", ["{% if %}", "{{ messages", "{% endfor %}", "{% nonesuch %}", "{{ 1 | nonesuch }}"])
def test_a_template_that_is_not_jinja_is_refused_by_file(tmp_path: Path, source: str) -> None:
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        ChatTemplate.load(write(tmp_path, template=source))


@pytest.mark.parametrize(
    "source",
    [
        "{{ nonesuch.attribute }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(x=1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set space = namespace() %}{% set space.__class__ = 1 %}",
        "{{ dict.__subclasses__() }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ messages | tojson(indent=messages) }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_that_fails_or_reaches_out_of_the_sandbox_is_refused_by_file(tmp_path: Path, source: str) -> None:
    template = loaded(write(tmp_path, template=source))
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("content", ["{", "[]", '{"chat_template": 5}', '{"chat_template": ["x"]}'])
def test_a_damaged_configuration_is_refused_by_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)


def test_messages_are_left_as_they_were_and_arrive_as_plain_values(tmp_path: Path) -> None:
    class Role(str, enum.Enum):  # noqa: UP042 (whose str() is not its text, unlike a StrEnum's)
        USER = "user"

    messages = [{"role": Role.USER, "content": "x", "extra": ("a", {"b": None})}]
    template = loaded(write(tmp_path, template="{{ messages[0].role }} {{ messages[0].extra | tojson }}"))
    assert template.render(messages) == 'user ["a", {"b": null}]'
    assert messages == [{"role": Role.USER, "content": "x", "extra": ("a", {"b": None})}]


def test_the_date_can_be_asked_for(tmp_path: Path) -> None:
    template = loaded(write(tmp_path, template="{{ strftime_now('%Y') }}"))
    assert int(template.render([{"role": "user", "content": "x"}])) >= 2026


def test_a_template_is_not_worked_out_while_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ 'x' * 10**12 }}")
    assert ChatTemplate.load(tmp_path) is not None


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_file_that_is_a_link_to_nothing_is_damaged_and_not_missing(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "other"}))
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=name):
        ChatTemplate.load(tmp_path)
