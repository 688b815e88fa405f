"""How ``numeric_policy="pinned"`` reaches the products of the layers, and where it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.runtimes import make_checkpoint
from torch import Tensor

import trivet
from trivet.attention.protocol import PathRequest, Verdict
from trivet.attention.reference.path import ReferencePath
from trivet.layers import linear, mlp
from trivet.plugin.layers import Decoder, GatedMlp, Linear, Parameters, RmsNorm
from trivet.runtime import blueprint

LIMITS = trivet.Limits(max_requests=2, max_step_tokens=16, max_context=64, page_size=4)
ROOMY = trivet.Limits(max_requests=2, max_step_tokens=66, max_context=64, page_size=4)


class Product:
    """A product that writes down what it is asked for."""

    made: list[Product]

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.calls = 0
        self.made.append(self)

    def __call__(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        self.calls += 1
        out = torch.nn.functional.linear(x, self.weight, bias)
        return out if residual is None else residual.add_(out)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Product]:
    """The pinned products that layers ask for, in order."""
    made: list[Product] = []
    monkeypatch.setattr(Product, "made", made, raising=False)
    monkeypatch.setattr(linear, "pinned_matmul", Product)
    return made


def refuse_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(weight: Tensor, *, gated: bool = False) -> None:
        raise AssertionError("a product that depends on the number of rows was asked for")

    for module in (linear, mlp):
        monkeypatch.setattr(module, "small_batch_matmul", refused)


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding.weight": (11, 8), "a.norm.weight": (8,), "a.gate_up.weight": (12, 8), "a.down.weight": (8, 6)}
    shapes |= {"a.down.bias": (8,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_every_product_of_pinned_parameters_is_a_pinned_one(
    products: list[Product], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_tables(monkeypatch)
    held = tensors()
    parameters = Parameters(held, pinned=True)
    gated = GatedMlp(parameters.below("a"))
    decoder = Decoder(
        parameters, [lambda hidden, step: gated(hidden, hidden)], RmsNorm(parameters.below("a.norm"), 1e-6)
    )
    names = ["a.gate_up.weight", "a.down.weight", "embedding.weight"]
    assert [product.weight.data_ptr() for product in products] == [held[name].data_ptr() for name in names]
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    residual = torch.ones(3, 8)
    found = gated(hidden, residual)
    assert found.data_ptr() == residual.data_ptr()
    gate, up = (hidden @ held["a.gate_up.weight"].T).chunk(2, -1)
    wanted = (torch.nn.functional.silu(gate) * up) @ held["a.down.weight"].T + held["a.down.bias"] + 1
    torch.testing.assert_close(found, wanted)
    decoder.logits(hidden)
    assert [product.calls for product in products] == [1, 1, 1]


def test_parameters_that_are_not_pinned_ask_for_no_pinned_product(products: list[Product]) -> None:
    held = tensors()
    parameters = Parameters(held)
    assert not parameters.pinned and not parameters.below("a").below("down").pinned
    hidden = torch.randn(3, 8)
    assert torch.equal(
        Linear(parameters.below("a.gate_up"))(hidden), torch.nn.functional.linear(hidden, held["a.gate_up.weight"])
    )
    GatedMlp(parameters.below("a"))
    assert not products


def test_a_weight_without_pinned_products_is_refused_by_name() -> None:
    with pytest.raises(trivet.ConfigError, match=r"numeric_policy='pinned'.*float32 on cpu.*'tuned'"):
        Linear(Parameters(tensors(), "a.down.", pinned=True))


@pytest.mark.parametrize("policy", ["tuned", "pinned"])
def test_the_policy_that_a_runtime_is_loaded_with_reaches_all_its_products(
    policy: str, products: list[Product], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def willing(path: ReferencePath, need: PathRequest) -> Verdict:
        return Verdict(True, "a test wants it")

    monkeypatch.setattr(ReferencePath, "usable", willing)
    checkpoint = make_checkpoint("qwen3", tmp_path, num_hidden_layers=2)
    outs = []
    for each in ("tuned", policy):
        settings = {"limits": LIMITS, "autostart": False, "numeric_policy": each}
        with trivet.Runtime.load(checkpoint, device="cpu", dtype="float32", **settings) as runtime:
            outs.append(runtime.generate([[1, 2, 3]], trivet.Sampling(max_new_tokens=4))[0].token_ids)
    assert outs[0] == outs[1]
    # qkv, out, gate_up and down of each layer, and the output projection; each is used
    assert len(products) == (2 * 4 + 1 if policy == "pinned" else 0)
    assert all(product.calls for product in products)


def test_a_model_with_recurrent_layers_is_planned_with_prompts_cut_at_whole_chunks(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen3.5", tmp_path, head_dim=64)
    settings = {"device": "h200", "dtype": "bfloat16", "numeric_policy": "pinned"}
    assert trivet.plan_memory(checkpoint, limits=ROOMY, **settings).kv_pages > 0
    with pytest.raises(
        trivet.ConfigError, match=r"max_step_tokens is 16, expected at least 65.*multiples of 64 tokens"
    ):
        trivet.plan_memory(checkpoint, limits=LIMITS, **settings)
    with pytest.raises(trivet.ConfigError, match="snapshot_stride is 32, expected a multiple of 64"):
        trivet.plan_memory(checkpoint, limits=ROOMY, snapshot_stride=32, **settings)
    uncached = trivet.plan_memory(checkpoint, limits=ROOMY, snapshot_stride=32, prefix_cache=False, **settings)
    assert uncached.kv_pages > 0


def test_a_family_that_promises_fused_recurrence_and_computes_by_torch_operations_is_blamed_at_load(
    products: list[Product], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferencePath, "usable", lambda path, need: Verdict(True, "a test wants it"))
    checkpoint = make_checkpoint("qwen3.5", tmp_path)
    settings = {"limits": ROOMY, "snapshot_stride": 64, "numeric_policy": "pinned", "dtype": "float32"}
    monkeypatch.setattr(blueprint, "chunk_kernels_missing", lambda device, dtype, layers: None)
    with pytest.raises(trivet.PluginError, match=r"says fused_recurrence, and .* did not go through the kernels"):
        trivet.Runtime.load(checkpoint, device="cpu", **settings)


@pytest.mark.parametrize(
    ("sizes", "settings", "missing"),
    [
        ({}, {"device": "cpu", "dtype": "bfloat16"}, "cpu is none"),
        ({}, {"device": "h200", "dtype": "float32"}, "served in float32"),
        ({"linear_key_head_dim": 320}, {"device": "h200", "dtype": "bfloat16"}, "up to 128 elements.* some of 320"),
    ],
)
def test_recurrent_layers_without_chunk_kernels_are_refused_before_anything_is_loaded(
    sizes: dict[str, int], settings: dict[str, str], missing: str, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("qwen3.5", tmp_path, head_dim=64, **sizes)
    with pytest.raises(trivet.ConfigError, match=f"'pinned': the [0-9]+ recurrent layers .*{missing}.*'tuned'"):
        trivet.plan_memory(checkpoint, limits=ROOMY, numeric_policy="pinned", **settings)


@pytest.mark.parametrize(("page_size", "stride"), [(1, 256), (16, 256), (48, 384), (100, 1600)])
def test_the_default_snapshot_stride_is_whole_pages_and_whole_chunks(
    page_size: int, stride: int, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("qwen3.5", tmp_path, head_dim=64)
    limits = trivet.Limits(max_requests=2, max_step_tokens=66, max_context=40 * page_size + 1024, page_size=page_size)
    settings = {"device": "h200", "dtype": "bfloat16", "limits": limits, "numeric_policy": "pinned"}
    line = trivet.plan_memory(checkpoint, **settings).line("snapshots")
    assert line.source.endswith(f"at multiples of {stride} tokens")


def test_a_model_of_attention_alone_is_planned_on_the_pinned_path(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen3", tmp_path, head_dim=64)
    settings = {"device": "h200", "dtype": "bfloat16", "limits": LIMITS}
    assert trivet.plan_memory(checkpoint, numeric_policy="pinned", **settings).total_bytes > 0
    with pytest.raises(trivet.ConfigError, match="reference backend cannot promise"):
        trivet.Runtime.load(checkpoint, device="cpu", limits=LIMITS, numeric_policy="pinned")
