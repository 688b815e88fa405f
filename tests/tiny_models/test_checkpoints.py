"""The checkpoints that ship are what the recipe says: geometry, dtype, size, tokenizer, template, end tokens."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from sdk_docs.tiny_models import corpus
from sdk_docs.tiny_models.checkpoint import RANDOM_MARKER, random_model, write_checkpoint
from sdk_docs.tiny_models.evaluate import RESULTS, file_sha256, judge
from sdk_docs.tiny_models.geometries import (
    END_TOKEN_IDS,
    LARGEST_CHECKPOINT_BYTES,
    MODEL_NAMES,
    SPECIAL_TOKENS,
    VOCABULARY_TOKENS,
)
from sdk_docs.tiny_models.language import CONVERSATION, STORY, tiny_language
from sdk_docs.tiny_models.summary import README, with_figures
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

MODELS = Path(__file__).parents[2] / "core" / "trivet" / "models"
EXPECTED = {"tiny-qwen3": ("qwen3", 5), "tiny-qwen35": ("qwen3_5_text", 6)}
TOKENIZER = Tokenizer.from_file(str(MODELS / "tiny-qwen3" / "tokenizer.json"))


def _json(model: str, name: str) -> Any:
    return json.loads((MODELS / model / name).read_text())


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_family_and_group_size_are_those_that_the_project_is_about(model: str) -> None:
    config = _json(model, "config.json")
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    assert (config["model_type"], group) == EXPECTED[model]
    assert config["head_dim"] in (64, 128, 256)
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "bfloat16"
    assert RANDOM_MARKER not in config


def test_the_hybrid_has_both_kinds_of_layers_in_their_order() -> None:
    config = _json("tiny-qwen35", "config.json")
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    assert config["layer_types"] == kinds * (config["num_hidden_layers"] // 4)
    assert config["rope_parameters"]["partial_rotary_factor"] == 0.25


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_weights_are_small_bfloat16_and_tied(model: str) -> None:
    path = MODELS / model / "model.safetensors"
    assert path.stat().st_size <= LARGEST_CHECKPOINT_BYTES
    with safe_open(path, framework="pt") as tensors:
        names = set(tensors.keys())
        assert {tensors.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert "lm_head.weight" not in names
    assert {name.split(".")[0] for name in names} == {"model"}


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_every_file_may_ship(model: str) -> None:
    for path in (MODELS / model).iterdir():
        assert path.stat().st_size <= LARGEST_CHECKPOINT_BYTES
        assert path.stat().st_mode & 0o444 == 0o444, f"{path.name} is not readable by everyone"


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_generation_ends_at_the_end_of_a_text_and_of_a_turn(model: str) -> None:
    assert _json(model, "generation_config.json")["eos_token_id"] == list(END_TOKEN_IDS)
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]


def test_both_models_share_one_tokenizer() -> None:
    texts = {(MODELS / model / "tokenizer.json").read_bytes() for model in MODEL_NAMES}
    assert len(texts) == 1
    assert TOKENIZER.get_vocab_size() == VOCABULARY_TOKENS


@given(text=st.text())
@settings(deadline=None)
def test_any_text_encodes_and_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@given(number=st.integers(10**6, 10**7))
@settings(max_examples=20, deadline=None)
def test_common_words_are_single_tokens(number: int) -> None:
    texts = [corpus.document(corpus.SEED, corpus.HELD_OUT, number + offset).text for offset in range(20)]
    words = re.findall(r" [a-z]+", " ".join(texts))
    single = sum(len(TOKENIZER.encode(word).ids) == 1 for word in words)
    assert single >= 0.9 * len(words)


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_the_chat_template_renders_the_form_that_was_trained(model: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / model)
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What colour is the sky?"},
        {"role": "assistant", "content": "The sky is blue."},
        {"role": "user", "content": "What is 3 plus 4?"},
    ]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>assistant\n")
    whole = prompt + "3 plus 4 is 7.<|im_end|>\n"
    assert tiny_language().recognise(CONVERSATION, whole).accepted
    with pytest.raises(Exception, match="unknown role tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": ""}], tokenize=False)


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_an_untrained_checkpoint_says_so(model: str, tmp_path: Path) -> None:
    write_checkpoint(random_model(model, seed=3), TOKENIZER, tmp_path, random=True)
    assert json.loads((tmp_path / "config.json").read_text())[RANDOM_MARKER] == "random"
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_the_results_speak_of_the_weights_that_ship(model: str) -> None:
    record = json.loads(RESULTS.read_text())[model]
    assert file_sha256(MODELS / model / "model.safetensors") == record["weights_sha256"]


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_recorded_continuations_are_those_of_transformers_and_parse_as_recorded(model: str) -> None:
    story = json.loads(RESULTS.read_text())[model]["evaluation"]["stories"][0]
    reference = AutoModelForCausalLM.from_pretrained(MODELS / model, dtype=torch.float32).eval()
    ids = torch.tensor([TOKENIZER.encode(story["prompt"]).ids])
    new = reference.generate(ids, max_new_tokens=len(story["token_ids"]), do_sample=False)[0, ids.shape[1] :]
    assert new.tolist() == story["token_ids"]
    verdict = judge(tiny_language(), STORY, story["prompt"] + story["continuation"], story["ended"])
    assert verdict["parses"] == story["parses"]


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_the_ten_kept_continuations_parse_and_were_never_read(model: str) -> None:
    stories = json.loads(RESULTS.read_text())[model]["evaluation"]["stories"]
    assert len(stories) == 10
    for story in stories:
        assert story["absent_from_training"]
        assert story["new_tokens"] > 60
        assert judge(tiny_language(), STORY, story["prompt"] + story["continuation"], story["ended"])["parses"]


def test_the_readme_shows_the_recorded_figures() -> None:
    text = README.read_text()
    assert with_figures(text, json.loads(RESULTS.read_text())) == text
