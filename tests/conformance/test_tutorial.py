"""The plugin that sdk_docs/tutorial_llama.md ends with is Llama, as transformers has it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conformance.projects import project
from tests.support.checkpoints import randomise
from tests.support.oracle import assert_greedy, assert_scores

import trivet
from trivet.conformance import Asked, Kit

PAGE = Path(__file__).parents[2] / "sdk_docs" / "tutorial_llama.md"
ATOL = 2e-4
MOST_LINES = 150

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "one group": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "groups of four": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 12},
    "llama3 rope": {"num_attention_heads": 4, "num_key_value_heads": 1, "rope_parameters": LLAMA3},
    "tied": {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The template with the two files of the tutorial put in."""
    blocks = re.findall(r"^`(trivet_llama/\w+\.py)`.*?^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert [name for name, _ in blocks] == ["trivet_llama/__init__.py", "trivet_llama/model.py"]
    folder = tmp_path_factory.mktemp("llama")
    with project(folder, "llama") as package:
        for name, source in blocks:
            (folder / name).write_text(source)
        (package / "oracle.safetensors").unlink()
        yield package


def test_the_page_puts_the_oracle_s_library_where_ci_installs_it() -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert tomllib.loads(block)["project"]["optional-dependencies"] == {"test": ["transformers>=5.17"]}


def test_it_is_an_ordinary_family_of_at_most_150_lines(llama: Path) -> None:
    assert sum(len(file.read_text().splitlines()) for file in llama.glob("*.py")) <= MOST_LINES


def test_it_conforms_with_nothing_not_run(llama: Path) -> None:
    with Kit(Asked("llama")) as kit:
        outcomes = [kit.run(check) for check in kit.manifest()]
    assert [(o.id, o.failure or o.reason) for o in outcomes if o.status != "passed"] == []


@pytest.mark.parametrize("name", MODELS)
def test_it_says_what_transformers_says(name: str, llama: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
        **MODELS[name],
    }
    model = LlamaForCausalLM(LlamaConfig(**settings)).eval().float()
    randomise(model, len(name))
    model.save_pretrained(tmp_path)
    rng = np.random.default_rng(len(name))
    prompts = [[int(token) for token in rng.integers(0, 97, n)] for n in (90, 5, 33)]
    limits = trivet.Limits(max_requests=3, max_step_tokens=37, max_context=160, page_size=16)
    with trivet.Runtime.load(tmp_path, device="cpu", limits=limits, autostart=False) as runtime:
        assert_scores(runtime, model, prompts[0], ATOL)
        for _ in ("cold", "warm"):
            outs = runtime.generate(prompts, trivet.Sampling(max_new_tokens=12, logprobs=3))
            for prompt, out in zip(prompts, outs, strict=True):
                assert_greedy(model, prompt, out, ATOL)


def test_with_the_norms_left_in_the_first_failure_names_them(llama: Path) -> None:
    source = (llama / "model.py").read_text()
    marked = source.replace('parameters.below("attention"))', 'parameters.below("attention"), qk_norm_eps=eps)')
    assert marked != source
    (llama / "model.py").write_text(marked)
    import sys

    try:
        sys.modules.pop("trivet_llama.model", None)
        with Kit(Asked("llama")) as kit:
            failed = next(o for check in kit.manifest() if (o := kit.run(check)).status == "failed")
    finally:
        (llama / "model.py").write_text(source)
        sys.modules.pop("trivet_llama.model", None)
    assert failed.id == "plugin.tiny-models/1" and failed.failure is not None
    assert "layers.0.attention.q_norm.weight" in failed.failure.observed
