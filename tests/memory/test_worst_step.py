"""The start-up profile's worst step is a step that the scheduler could plan."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trivet.attention import StepBatch
from trivet.attention.batch import check_batch
from trivet.capacity import DeviceProfile, Limits, RuntimeCapacity, TileShape
from trivet.config.rope import Rope
from trivet.geometry import AttentionGeometry, ModelGeometry
from trivet.runtime.profile import _worst_batch, worst_lengths

ATTENTION = AttentionGeometry(4, 2, 16, Rope(theta=1e4, rotary_dim=16))


def capacity_of(limits: Limits) -> RuntimeCapacity:
    geometry = ModelGeometry(
        model_type="worst",
        dtype="float32",
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        layers=(ATTENTION,),
        norm_eps=1e-6,
        max_positions=limits.max_context,
        tied_embeddings=True,
    )
    device = DeviceProfile.named("cpu", 2**34)
    return RuntimeCapacity.of(geometry, limits, device, dtype="float32", tile_of=lambda _: TileShape(16, 16))


@given(
    requests=st.integers(1, 9),
    step_tokens=st.integers(1, 200),
    context=st.integers(1, 64),
    page_size=st.integers(1, 16),
)
def test_its_decode_rows_have_a_token_each_and_its_rows_fill_the_step(
    requests: int, step_tokens: int, context: int, page_size: int
) -> None:
    capacity = capacity_of(Limits(requests, step_tokens, context, page_size))
    (plan,) = capacity.plans
    query_lengths, kv_lengths = worst_lengths(capacity)
    batch: StepBatch = _worst_batch(plan, query_lengths, kv_lengths)
    check_batch(batch, plan, tiles=0)
    assert (batch.query_lengths[: batch.decode_rows] == 1).all()
    assert batch.decode_rows < batch.rows == capacity.step_rows
    assert batch.tokens == capacity.step_tokens
