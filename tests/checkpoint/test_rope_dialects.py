"""Every dialect of rope reads alike, agrees with transformers, and what is not served is refused."""

import random
from typing import Any

import numpy as np
import pytest
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from trivet.config.document import ConfigDocument
from trivet.config.rope import Rope
from trivet.errors import ConfigError

CONTEXT = 32768
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8192, "beta_fast": 16.0},
}


def _read(values: dict[str, Any], head_dim: int = 128, **defaults: float) -> Rope:
    return Rope.read(ConfigDocument({"max_position_embeddings": CONTEXT, **values}), head_dim, **defaults)


def _random_parameters(kind: str, rng: random.Random) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": kind}
    parameters["rope_theta"] = rng.choice([10_000, 1e6, 5e6, rng.uniform(100.0, 1e7)])
    if kind == "default":
        return parameters
    parameters["factor"] = rng.choice([1.0, 4.0, 8, rng.uniform(1.0, 40.0)])
    if rng.random() < 0.5:
        parameters["partial_rotary_factor"] = rng.choice([0.25, 0.5, 0.75])
    if kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = rng.choice([16, 512, 8192, 32768])
    if kind == "llama3":
        parameters["low_freq_factor"] = rng.uniform(0.5, 2.0)
        parameters["high_freq_factor"] = parameters["low_freq_factor"] + rng.uniform(0.1, 6.0)
    if kind == "yarn":
        if rng.random() < 0.5:
            parameters |= {"beta_fast": rng.uniform(8.0, 64.0), "beta_slow": rng.uniform(0.5, 4.0)}
        parameters["truncate"] = rng.random() < 0.5
        attention = rng.randrange(3)
        if attention == 1:
            parameters["attention_factor"] = rng.uniform(0.5, 2.0)
        if attention == 2:
            parameters |= {"mscale": rng.uniform(0.5, 2.0), "mscale_all_dim": rng.choice([0.0, 1.0, 0.7])}
    return parameters


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_frequencies_agree_with_transformers(kind: str, seed: int) -> None:
    rng = random.Random(f"{kind}-{seed}")
    parameters = _random_parameters(kind, rng)
    head_dim = rng.choice([16, 32, 64, 80, 128, 256])
    config = Qwen3Config(
        head_dim=head_dim,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        rope_parameters=dict(parameters),
        max_position_embeddings=CONTEXT,
    )
    if kind == "default":
        oracle = Qwen3RotaryEmbedding(config)
        expected, scaling = oracle.inv_freq, oracle.attention_scaling
    else:
        expected, scaling = ROPE_INIT_FUNCTIONS[kind](config)
    rope = _read({"rope_parameters": parameters}, head_dim)
    found = rope.inverse_frequencies()
    assert found.dtype == np.float32
    # Two units in the last place; llama3's blend subtracts, which magnifies them.
    np.testing.assert_allclose(found, expected.numpy(), rtol=5e-6 if kind == "llama3" else 2.5e-7)
    assert rope.attention_scaling == pytest.approx(scaling, rel=1e-12)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("head_dim", "factor"), [(256, 0.25), (128, 0.5), (64, 0.25), (80, 0.6)])
def test_a_partial_rotary_factor_is_read_inside_or_beside(head_dim: int, factor: float, inside: bool) -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": factor}
    config = Qwen3_5TextConfig(head_dim=head_dim, hidden_size=64, rope_parameters=dict(parameters))
    expected = Qwen3_5TextRotaryEmbedding(config).inv_freq.numpy()
    values: dict[str, Any] = {"rope_parameters": dict(parameters)}
    if not inside:
        values["partial_rotary_factor"] = values["rope_parameters"].pop("partial_rotary_factor")
    rope = _read(values, head_dim, default_rotary_factor=0.125)
    assert rope.rotary_dim == 2 * len(expected)
    np.testing.assert_allclose(rope.inverse_frequencies(), expected, rtol=2.5e-7)


@pytest.mark.parametrize("kind", SCALED)
def test_the_dialects_read_alike(kind: str) -> None:
    scaling = SCALED[kind]
    reference = _read({"rope_parameters": {"rope_type": kind, "rope_theta": 1e6, **scaling}})
    assert reference.kind == kind
    assert reference.theta == 1e6
    dialects: list[dict[str, Any]] = [
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": kind, **scaling}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": kind, **scaling}},
        {"rope_theta": 1e6, "rope_scaling": {"type": kind, **scaling}},
        {"rope_theta": 1e6, "rope_scaling": {"type": kind, "rope_type": kind, **scaling}},
        {"rope_scaling": {"type": kind, "rope_theta": 1e6, **scaling}},
        {"rope_theta": 5.0, "rope_parameters": {"rope_type": kind, "rope_theta": 1e6, **scaling}},
        {"rope_theta": 1e6, "rope_parameters": {"type": kind, **scaling, "truncate": None}},
    ]
    assert [_read(dialect) for dialect in dialects] == [reference] * len(dialects)


@pytest.mark.parametrize("values", [{}, {"rope_scaling": None}, {"rope_parameters": {}}])
def test_a_rope_that_is_stated_only_by_its_theta_is_the_default_one(values: dict[str, Any]) -> None:
    assert _read({**values, "rope_theta": 1e6}) == Rope(1e6, 128)


def test_what_the_config_leaves_out_is_the_architectures() -> None:
    rope = _read({}, 256, default_theta=1e7, default_rotary_factor=0.25)
    assert rope == Rope(1e7, 64)


@pytest.mark.parametrize("kind", [{}, {"type": "mrope"}, {"type": "default"}, {"rope_type": "default"}])
def test_mrope_sections_change_nothing_for_text(kind: dict[str, str]) -> None:
    parameters = {**kind, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    assert _read({"rope_theta": 1e6, "rope_scaling": parameters}) == Rope(1e6, 128)


def test_the_original_context_is_taken_from_the_root_then_the_section_then_the_context() -> None:
    key, section = "original_max_position_embeddings", {"rope_type": "yarn", "factor": 2.0}
    assert _read({"rope_parameters": {**section, key: 512}, key: 1024}).original_context == 1024
    assert _read({"rope_parameters": {**section, key: 512}}).original_context == 512
    assert _read({"rope_parameters": section}).original_context == CONTEXT


def test_two_dialects_in_one_config_may_agree() -> None:
    section = {"rope_type": "yarn", "rope_theta": 1e6, **SCALED["yarn"]}
    assert _read({"rope_parameters": section, "rope_scaling": section}).kind == "yarn"


def test_two_dialects_that_disagree_are_refused() -> None:
    values = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
    }
    with pytest.raises(ConfigError, match=r"'rope_parameters' and 'rope_scaling' disagree"):
        _read(values)


LLAMA3 = {"rope_type": "llama3", **SCALED["llama3"]}
YARN = {"rope_type": "yarn", **SCALED["yarn"]}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"rope_type": "longrope", "factor": 2.0},
            "'rope_type' is 'longrope': expected one of default, linear",
        ),
        ({"type": "dynamic", "factor": 2.0}, "'type' is 'dynamic': expected one of default, linear"),
        ({"rope_type": "proportional"}, "'rope_type' is 'proportional'"),
        ({"rope_type": ["yarn"]}, r"'rope_type' is \['yarn'\]: expected a non-empty string"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "'rope_type' is 'linear'.*'yarn'"),
        ([{"rope_type": "yarn"}], "'rope_parameters' is .*: expected an object"),
        ("yarn", "'rope_parameters' is 'yarn': expected an object"),
        ({"full_attention": {"rope_type": "default"}}, "'full_attention' is .* not served: one rope"),
        ({"factor": 4.0}, "'rope_type' is missing beside 'factor'"),
        ({"rope_type": "linear"}, "'factor' is missing"),
        ({"rope_type": "linear", "factor": 0.5}, "'factor' is 0.5: expected a finite number at least 1"),
        ({"rope_type": "linear", "factor": float("nan")}, "'factor' is nan"),
        ({"rope_type": "linear", "factor": "4"}, "'factor' is '4'"),
        ({**LLAMA3, "low_freq_factor": None}, "'low_freq_factor' is missing"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "'high_freq_factor' is 1.0: expected a finite number above 1"),
        ({**LLAMA3, "original_max_position_embeddings": 2**40}, "'original_max_position_embeddings' is 1099"),
        ({**YARN, "factor": None}, "'factor' is missing"),
        ({**YARN, "attention_factor": 0}, "'attention_factor' is 0: expected a finite number above 0"),
        ({**YARN, "beta_fast": 0.5}, "'beta_fast' is 0.5: expected a finite number at least 1"),
        ({**YARN, "truncate": 1}, "'truncate' is 1: expected true or false"),
        ({"rope_theta": 0}, "'rope_theta' is 0: expected a finite number above 1"),
        ({"rope_theta": float("inf")}, "'rope_theta' is inf"),
        ({"rope_theta": 1e300}, "'rope_theta' is 1e[+]300.*at most 1e[+]30"),
        ({"partial_rotary_factor": 0.0}, "'partial_rotary_factor' is 0.0"),
        ({"partial_rotary_factor": 1.5}, "'partial_rotary_factor' is 1.5"),
        ({"partial_rotary_factor": 0.01}, "rotates 1 entries: expected an even number"),
        ({"partial_rotary_factor": 9 / 128}, "rotates 9 entries: expected an even number"),
        ({"mrope_section": "11,11,10"}, "'mrope_section' is .*: expected a list of integers"),
        ({"mrope_interleaved": 1}, "'mrope_interleaved' is 1: expected true or false"),
    ],
)
def test_a_rope_that_cannot_be_served_is_refused_by_key(section: object, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config\.json.*{message}"):
        _read({"rope_parameters": section})


def test_a_yarn_without_any_context_is_refused() -> None:
    document = ConfigDocument({"rope_scaling": {"type": "yarn", "factor": 2.0}})
    with pytest.raises(ConfigError, match=r"'max_position_embeddings' is missing"):
        Rope.read(document, 128)


def test_an_odd_head_dimension_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"head dimension 65 rotates 65 entries"):
        _read({}, 65)


@pytest.mark.parametrize(
    "wrong",
    [
        {"theta": 1.0},
        {"rotary_dim": 7},
        {"kind": "longrope"},
        {"factor": 0.0},
        {"kind": "yarn", "original_context": 0},
        {"kind": "llama3", "original_context": 8, "low_freq_factor": 4.0},
        {"kind": "yarn", "original_context": 8, "beta_slow": 64.0},
    ],
)
def test_a_rope_value_is_validated_when_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"rope|rotary"):
        Rope(**{"theta": 1e4, "rotary_dim": 64, **wrong})
