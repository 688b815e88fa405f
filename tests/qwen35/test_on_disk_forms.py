"""Text-only and multimodal checkpoints hold the same text model; what is beside it is ignored by name, not by luck."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.qwen35.conftest import Group6
from tests.support.checkpoints import make_qwen35, oracle_logprobs, randomise
from tests.support.multimodal import write_multimodal
from tests.support.oracle import assert_scores
from tests.support.positions import drawn

import trivet

ATOL = 2e-3
LIMITS = trivet.Limits(max_requests=2, max_step_tokens=33, max_context=96, page_size=16)


def load(directory: Path) -> trivet.Runtime:
    return trivet.Runtime.load(directory, device="cpu", limits=LIMITS, autostart=False)


def test_the_multimodal_form_is_served_like_the_text_only_form(group6: Group6, tmp_path: Path) -> None:
    prompt = drawn(np.random.default_rng(0), 80)
    with load(group6.directory) as runtime:
        text_only = runtime.score(prompt, top=5)
    with load(write_multimodal(group6.directory, tmp_path)) as runtime:
        assert runtime.score(prompt, top=5) == text_only
        assert_scores(runtime, group6.model, prompt, ATOL)


def test_a_checkpoint_saved_by_the_multimodal_class_of_transformers_is_served(tmp_path: Path) -> None:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "eos_token_id": None,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0],
        },
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 8, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
        "patch_size": 4, "num_position_embeddings": 16,
    }  # fmt: skip
    config = Qwen3_5Config(text_config=text, vision_config=vision, image_token_id=90, video_token_id=91)
    model = Qwen3_5ForConditionalGeneration(config).eval().float()
    randomise(model, 4)
    model.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert any(name.startswith("model.visual.") for name in names)
    assert any(name.startswith("model.language_model.") for name in names)
    with load(tmp_path) as runtime:
        assert_scores(runtime, model, drawn(np.random.default_rng(4), 80), ATOL)


@pytest.mark.parametrize(
    ("text", "root", "tied"),
    [
        (True, False, True),
        (False, True, False),
        (None, True, True),
        (None, False, False),
        (True, None, True),
        (None, None, False),
    ],
)
def test_tie_word_embeddings_is_read_from_text_config_and_from_the_root_only_where_that_is_silent(
    text: bool | None, root: bool | None, tied: bool, group6: Group6, tmp_path: Path
) -> None:
    """The file holds an output matrix of its own in every case: tied, it is ignored."""
    key = "tie_word_embeddings"
    directory = write_multimodal(group6.directory, tmp_path, text={key: text}, root={key: root})
    prompt = drawn(np.random.default_rng(5), 40)
    expected = oracle_logprobs(group6.model, prompt)
    if tied:
        inner = group6.model.model
        with torch.inference_mode():
            hidden = inner(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
            expected = torch.log_softmax(hidden @ inner.embed_tokens.weight.T, dim=-1)
    with load(directory) as runtime:
        scores = runtime.score(prompt, top=97)
    for position, score in enumerate(scores):
        for token, value in score.top:
            assert abs(value - expected[position, token].item()) <= ATOL


@pytest.mark.parametrize("form", ["text-only", "multimodal"])
def test_untied_without_an_output_matrix_is_an_error_that_names_it(form: str, group6: Group6, tmp_path: Path) -> None:
    directory = write_multimodal(group6.directory, tmp_path, tensors={"lm_head.weight": None})
    if form == "text-only":
        directory = tmp_path / "text"
        directory.mkdir()
        (directory / "config.json").write_text((group6.directory / "config.json").read_text())
        tensors = load_file(group6.directory / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, directory / "model.safetensors")
    with pytest.raises(trivet.CheckpointError, match=r"lm_head\.weight"):
        load(directory)


def test_tied_without_an_output_matrix_is_served(tmp_path: Path) -> None:
    model = make_qwen35(tmp_path / "text", seed=7, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "text" / "model.safetensors")
    directory = write_multimodal(tmp_path / "text", tmp_path / "multimodal")
    for form in (tmp_path / "text", directory):
        with load(form) as runtime:
            assert_scores(runtime, model, drawn(np.random.default_rng(7), 40), ATOL)


@pytest.mark.parametrize(
    "name",
    [
        "model.language_model.layers.0.linear_attn.in_proj_g.weight",
        "model.language_model.layers.4.input_layernorm.weight",
        "visual.patch_embed.proj.weight",
        "model.mtp.fc.weight",
    ],
)
def test_a_tensor_that_is_neither_the_text_model_s_nor_on_the_list_is_refused_by_name(
    name: str, group6: Group6, tmp_path: Path
) -> None:
    directory = write_multimodal(group6.directory, tmp_path, tensors={name: torch.zeros(2)})
    with pytest.raises(trivet.CheckpointError, match=name.replace(".", r"\.")):
        load(directory)


def test_a_missing_tensor_is_named_as_it_is_called_on_disk(group6: Group6, tmp_path: Path) -> None:
    name = "model.language_model.layers.1.linear_attn.A_log"
    directory = write_multimodal(group6.directory, tmp_path, tensors={name: None})
    with pytest.raises(trivet.CheckpointError, match=name.replace(".", r"\.")):
        load(directory)


def test_a_multimodal_config_without_text_config_is_refused(group6: Group6, tmp_path: Path) -> None:
    directory = write_multimodal(group6.directory, tmp_path, root={"text_config": None})
    with pytest.raises(trivet.ConfigError, match="text_config"):
        trivet.plan_memory(directory, limits=LIMITS)


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is this?"}],
        [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "cat.png"}}],
        [{"type": "video", "video": "cat.mp4"}],
    ],
)
def test_image_input_is_refused_at_the_call_and_changes_nothing(content: Any) -> None:
    with trivet.Runtime.load("tiny-qwen35", device="cpu", limits=LIMITS, autostart=False) as runtime:
        before = runtime.stats()
        with pytest.raises(trivet.RequestRejected, match=r"image|video|text"):
            runtime.chat([{"role": "user", "content": content}], trivet.Sampling(max_new_tokens=1))
        assert runtime.stats() == before
        runtime.chat([{"role": "user", "content": "Hello"}], trivet.Sampling(max_new_tokens=1))


def test_end_tokens_are_read_from_text_config_first(group6: Group6, tmp_path: Path) -> None:
    prompt = drawn(np.random.default_rng(8), 20)
    with load(group6.directory) as runtime:
        answer = runtime.generate([prompt], trivet.Sampling(max_new_tokens=6))[0].token_ids
    other = next(token for token in range(97) if token not in answer)
    directory = write_multimodal(
        group6.directory, tmp_path, text={"eos_token_id": answer[2]}, root={"eos_token_id": other}
    )
    with load(directory) as runtime:
        out = runtime.generate([prompt], trivet.Sampling(max_new_tokens=6))[0]
    assert out.finish_reason == "stop"
    assert out.token_ids == answer[: answer.index(answer[2]) + 1]


def test_memory_is_planned_alike_for_both_forms(group6: Group6, tmp_path: Path) -> None:
    write_multimodal(group6.directory, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    plans = [trivet.plan_memory(form, limits=LIMITS).as_json() for form in (group6.directory, tmp_path)]
    assert plans[0] == plans[1]
