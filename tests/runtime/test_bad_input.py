"""Bad settings, configs, checkpoints and requests end in a clear error, quickly, with nothing allocated."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.support.checkpoints import make_qwen3

import trivet

LIMITS = trivet.Limits(max_requests=2, max_step_tokens=16, max_context=64, page_size=4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    make_qwen3(directory)
    return directory


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            config.pop(key)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


@contextmanager
def quick_and_small() -> Iterator[None]:
    """Fails if the block takes ten seconds, 1 GiB resident or 4 GiB mapped."""
    process = psutil.Process()
    before, started = process.memory_info(), time.monotonic()
    yield
    after = process.memory_info()
    assert time.monotonic() - started < 10
    assert after.rss - before.rss < 2**30
    assert after.vms - before.vms < 2**32


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_attention_heads": 5}, "KV heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"use_sliding_window": True, "sliding_window": 16}, "use_sliding_window"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_a_bad_config_is_an_error_that_names_the_key(changes: dict[str, Any], where: str, checkpoint: Path) -> None:
    edit_config(checkpoint, **changes)
    with quick_and_small(), pytest.raises(trivet.ConfigError, match=where):
        trivet.Runtime.load(checkpoint, device="cpu", limits=LIMITS)


def test_an_unknown_model_type_says_what_is_served(checkpoint: Path) -> None:
    edit_config(checkpoint, model_type="qwen33")
    with pytest.raises(trivet.PluginError, match="qwen3"):
        trivet.Runtime.load(checkpoint, device="cpu")


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size", "head_dim", "num_attention_heads"])
@pytest.mark.parametrize("size", [2**40, 2**31 - 1, 2**29])
def test_an_absurd_size_is_refused_before_anything_is_allocated(key: str, size: int, checkpoint: Path) -> None:
    edit_config(checkpoint, **{key: size})
    with quick_and_small(), pytest.raises(trivet.TrivetError):
        trivet.Runtime.load(checkpoint, device="cpu", limits=LIMITS)


@pytest.mark.parametrize("field", ["max_requests", "max_step_tokens", "max_context", "page_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", 2**31, 2**40, 2**63, 2**31 - 1, 10**9])
def test_bad_and_absurd_limits_are_refused(field: str, value: Any, checkpoint: Path) -> None:
    expected = (trivet.ConfigError, trivet.CapacityExceeded, trivet.MemoryBudgetError)
    settings = {"max_requests": 2, "max_step_tokens": 16, "max_context": 2**24, "page_size": 1} | {field: value}
    with quick_and_small(), pytest.raises(expected):
        trivet.Runtime.load(checkpoint, device="cpu", limits=trivet.Limits(**settings))


@pytest.mark.parametrize("pages", [0, -1, 1.5, True, 2**31, 2**40, 2**62, 2**31 - 1])
def test_bad_and_absurd_pages_are_refused(pages: Any, checkpoint: Path) -> None:
    expected = (trivet.ConfigError, trivet.CapacityExceeded, trivet.MemoryBudgetError)
    with quick_and_small(), pytest.raises(expected):
        trivet.Runtime.load(checkpoint, device="cpu", limits=LIMITS, kv_pages=pages)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("device", "tpu"),
        ("device", "cuda:99"),
        ("dtype", "int8"),
        ("memory_fraction", 0.0),
        ("memory_fraction", float("nan")),
        ("numeric_policy", "loose"),
        ("weights", "zeros"),
        ("attention", "nothing"),
        ("snapshot_bytes", -1),
        ("seed", "x"),
        ("limits", {"max_requests": 1}),
        ("numeric_policy", "pinned"),
    ],
)
def test_a_bad_argument_of_load_is_named(argument: str, value: Any, checkpoint: Path) -> None:
    settings = {"device": "cpu", "limits": LIMITS} | {argument: value}
    with pytest.raises(trivet.ConfigError, match="cuda" if value == "cuda:99" else f"(?i){argument}|{value}"):
        trivet.Runtime.load(checkpoint, **settings)


@pytest.mark.parametrize("device", [None, 5, "cuda", "h2OO"])
def test_a_device_that_cannot_be_planned_for_is_named(device: Any, saved: Path) -> None:
    with pytest.raises(trivet.ConfigError, match="h200"):
        trivet.plan_memory(saved, device=device, limits=LIMITS)


def test_a_missing_checkpoint_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(trivet.ConfigError, match="tiny-qwen3"):
        trivet.Runtime.load(tmp_path / "nowhere")
    with pytest.raises(trivet.ConfigError, match=r"config\.json"):
        trivet.Runtime.load(tmp_path)


def test_untied_without_an_output_projection_on_disk_is_a_checkpoint_error(tmp_path: Path) -> None:
    make_qwen3(tmp_path, tie_word_embeddings=True)
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(trivet.CheckpointError, match=r"lm_head\.weight"):
        trivet.Runtime.load(tmp_path, device="cpu", limits=LIMITS)


def test_a_truncated_shard_is_a_checkpoint_error_that_names_the_file(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with quick_and_small(), pytest.raises(trivet.CheckpointError, match=r"model\.safetensors"):
        trivet.Runtime.load(checkpoint, device="cpu", limits=LIMITS)


def test_a_failed_load_releases_what_it_had_allocated(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trivet.layout import BufferLayout
    from trivet.runtime import load

    allocated = []
    allocate = BufferLayout.allocate

    def recorded(layout: BufferLayout, *args: Any) -> Any:
        allocated.append(allocate(layout, *args))
        return allocated[-1]

    def broken(*args: Any) -> None:
        raise trivet.PluginError("broken on purpose")

    monkeypatch.setattr(BufferLayout, "allocate", recorded)
    monkeypatch.setattr(load, "run_profile", broken)
    with pytest.raises(trivet.PluginError, match="on purpose"):
        trivet.Runtime.load(checkpoint, device="cpu", limits=LIMITS)
    assert allocated and all(buffers.storage_bytes == 0 for buffers in allocated)


@pytest.fixture(scope="module")
def runtime(saved: Path) -> Iterator[trivet.Runtime]:
    with trivet.Runtime.load(saved, device="cpu", limits=LIMITS, kv_pages=8, autostart=False) as runtime:
        yield runtime


@pytest.mark.parametrize(
    ("prompt", "sampling", "text"),
    [
        ([], {}, "empty"),
        ("hello", {}, "tokenizer"),
        ([97], {}, "vocabulary"),
        ([-1], {}, "vocabulary"),
        ([2**40], {}, "vocabulary"),
        ([1.5], {}, "prompt token 0"),
        ([True], {}, "prompt token 0"),
        (None, {}, "prompt"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"temperature": -0.1}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_p": 1.1}, "top_p"),
        ([1] * 60, {"max_new_tokens": 5}, "max_context"),
        ([1] * 30, {"max_new_tokens": 20}, "pool"),
        ([1], {"stop": "x"}, "tokenizer"),
    ],
)
def test_a_bad_request_is_refused_at_the_call_and_changes_nothing(
    prompt: Any, sampling: dict[str, Any], text: str, runtime: trivet.Runtime
) -> None:
    before = runtime.stats()
    for call in (
        lambda: runtime.submit(prompt, trivet.Sampling(**sampling)),
        lambda: runtime.stream(prompt, trivet.Sampling(**sampling)),
        lambda: runtime.generate([[1, 2], prompt], trivet.Sampling(**sampling)),
    ):
        with pytest.raises(trivet.RequestRejected, match=text):
            call()
    assert runtime.stats() == before


@pytest.mark.parametrize(
    ("prompts", "sampling", "text"),
    [
        (None, None, "prompts"),
        (5, None, "prompts"),
        ([1, 2, 3], None, "prompt"),
        ([[1]], 5, "sampling"),
        ([[1]], {}, "sampling"),
        ({"a": 1}, None, "prompts is dict"),
        ({"x", "y"}, None, "prompts is set"),
        ([[1]], {trivet.Sampling()}, "sampling is set"),
        ([[1]], [trivet.Sampling()] * 2, "sampling"),
    ],
)
def test_a_batch_of_the_wrong_kind_is_refused(prompts: Any, sampling: Any, text: str, runtime: trivet.Runtime) -> None:
    with pytest.raises(trivet.RequestRejected, match=text):
        runtime.generate(prompts, sampling)


@pytest.fixture(scope="module")
def chatting(text_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[trivet.Runtime]:
    directory = tmp_path_factory.mktemp("chatting")
    shutil.copytree(text_checkpoint, directory, dirs_exist_ok=True)
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with trivet.Runtime.load(directory, device="cpu", limits=LIMITS, autostart=False) as runtime:
        yield runtime


@pytest.mark.parametrize("call", ["chat", "stream", "astream", "submit"])
def test_a_value_that_is_no_sampling_is_refused(call: str, chatting: trivet.Runtime) -> None:
    with pytest.raises(trivet.RequestRejected, match="sampling"):
        getattr(chatting, call)([{"role": "user", "content": "hi"}] if call == "chat" else [1], {})


@pytest.mark.parametrize(
    "messages",
    [None, 5, "hi", [], [1], ["hi"], {"role": "user", "content": "hi"}, [{"role": "user"}], [{"role": 1}], [[1, 2]]],
    ids=repr,
)
def test_messages_of_the_wrong_shape_are_refused(messages: Any, chatting: trivet.Runtime) -> None:
    with pytest.raises(trivet.RequestRejected, match="message"):
        chatting.chat(messages)


def test_a_batch_may_be_any_iterable_and_may_be_empty(runtime: trivet.Runtime) -> None:
    one = trivet.Sampling(max_new_tokens=1)
    listed = runtime.generate([[1], [2]], one)
    lazy = runtime.generate(([token] for token in (1, 2)), (one for _ in range(2)))
    assert [out.token_ids for out in lazy] == [out.token_ids for out in listed]
    assert runtime.generate([]) == []


def test_scoring_passes_the_same_gate(runtime: trivet.Runtime) -> None:
    for tokens, text in (([], "empty"), ([97], "vocabulary"), ([1] * 65, "max_context"), ([1] * 33, "pool")):
        with pytest.raises(trivet.RequestRejected, match=text):
            runtime.score(tokens)


def test_a_request_smaller_than_the_pool_is_served_though_a_full_context_would_not_fit(
    runtime: trivet.Runtime,
) -> None:
    assert len(runtime.generate([[1] * 20], trivet.Sampling(max_new_tokens=None))[0].token_ids) == 8 * 4 + 1 - 20


@pytest.mark.parametrize("prompt", [b"ab", bytearray(b"ab"), {1: 2}, {1, 2}], ids=repr)
def test_what_only_looks_like_token_ids_is_refused(prompt: Any, family_checkpoint: Path) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", autostart=False) as runtime:
        for call in (runtime.submit, runtime.stream, runtime.score, lambda each: runtime.generate([each])):
            with pytest.raises(trivet.RequestRejected, match=type(prompt).__name__):
                call(prompt)
        with pytest.raises(trivet.RequestRejected, match=r"expected a trivet\.Sampling"):
            runtime.generate([[1], [2]], {"max_new_tokens": 1})  # type: ignore[arg-type]
        assert runtime.stats()["requests_submitted"] == 0


def test_waiting_for_a_request_steps_a_runtime_without_a_thread(family_checkpoint: Path) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", autostart=False) as runtime:
        request = runtime.submit([1, 2, 3], trivet.Sampling(max_new_tokens=3))
        assert not request.wait(timeout=0)
        assert request.wait() and len(request.completion.token_ids) == 3


def test_a_closed_runtime_cannot_be_entered(family_checkpoint: Path) -> None:
    runtime = trivet.Runtime.load(family_checkpoint, device="cpu", autostart=False)
    runtime.close()
    with pytest.raises(trivet.RuntimeDown), runtime:
        pass


def test_a_context_beyond_the_positions_of_the_model_is_served_with_a_warning(
    family_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    positions = json.loads((family_checkpoint / "config.json").read_text())["max_position_embeddings"]
    for context, warned in ((positions, False), (positions + 1, True)):
        caplog.clear()
        trivet.plan_memory(family_checkpoint, limits=trivet.Limits(2, 8, context, 4))
        assert any(str(positions) in message for message in caplog.messages) == warned


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("autostart", 1, "expected True or False"),
        ("progress", 5, "expected a function"),
        ("dtype", "fp16", "expected one of float32, bfloat16, float16"),
        ("kv_pages", 2.5, "expected an integer"),
        ("kv_pages", np.True_, "expected an integer"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name(saved: Path, argument: str, value: Any, words: str) -> None:
    with pytest.raises(trivet.ConfigError, match=f"{argument}.*{words}"):
        trivet.Runtime.load(saved, device="cpu", limits=LIMITS, **{argument: value})


def test_numbers_and_dtypes_of_other_libraries_are_taken(saved: Path) -> None:
    sizing = {"kv_pages": np.int64(40), "memory_fraction": np.float32(0.5), "dtype": torch.float32}
    with trivet.Runtime.load(saved, device="cpu", limits=LIMITS, **sizing) as runtime:
        assert runtime.memory.kv_pages == 40
        assert len(runtime.score([1, 2, 3], top=np.int64(2))[0].top) == 2


@pytest.mark.parametrize("autostart", [True, False])
def test_a_wait_takes_any_number_of_seconds_and_nothing_else(saved: Path, autostart: bool) -> None:
    with trivet.Runtime.load(saved, device="cpu", limits=LIMITS, autostart=autostart) as runtime:
        request = runtime.submit([1, 2], trivet.Sampling(max_new_tokens=3))
        for odd in ("x", True, float("nan")):
            with pytest.raises(trivet.RequestRejected, match="timeout"):
                request.wait(odd)
        assert request.wait(float("inf")) and request.wait(1e300) and request.wait(np.float64(1))


def test_a_path_that_no_file_system_takes_is_refused() -> None:
    with pytest.raises(trivet.ConfigError, match="too long"):
        trivet.Runtime.load("x" * 5000, device="cpu")


@pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
@pytest.mark.parametrize("value", [np.array(2), torch.tensor(2)], ids=["numpy", "torch"])
def test_an_array_without_dimensions_is_no_list_of_stops(field: str, value: Any) -> None:
    with pytest.raises(trivet.RequestRejected, match=field):
        trivet.Sampling(**{field: value})


def test_text_that_cannot_fit_is_refused_before_it_is_encoded(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trivet.Runtime.load(text_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        assert runtime.tokenizer is not None
        fits = "a" * (LIMITS.max_context - 1)
        assert runtime.generate([fits], trivet.Sampling(max_new_tokens=1))[0].prompt_tokens == len(fits)
        monkeypatch.setattr(type(runtime.tokenizer), "encode", lambda *_: pytest.fail("it was encoded"))
        for ask in (runtime.submit, runtime.score, runtime.stream, lambda text: runtime.generate([text])):
            with pytest.raises(trivet.RequestRejected, match=r"1000000 characters, more than 64 tokens"):
                ask("x" * 1_000_000)
