"""The null model serves like any other, and computes nothing."""

from __future__ import annotations

from pathlib import Path

import trivet
from trivet.bench.host import _null_runtime
from trivet.bench.null_model import write_null_config


def test_requests_are_served_to_their_full_length_without_attention(tmp_path: Path) -> None:
    write_null_config(tmp_path)
    limits = trivet.Limits(max_requests=2, max_step_tokens=8, max_context=32, page_size=4)
    with _null_runtime(tmp_path, limits, kv_pages=16) as runtime:
        engine = runtime._engine
        for owner in engine.owners.values():
            owner.attend = owner.append = None  # type: ignore[method-assign]
        outs = runtime.generate([[1, 2, 3], [4] * 20], trivet.Sampling(max_new_tokens=9, ignore_eos=True))
        assert [(len(out.token_ids), out.finish_reason) for out in outs] == [(9, "length")] * 2
        assert runtime.generate([[4] * 20], trivet.Sampling(max_new_tokens=1))[0].cached_tokens == 16
