"""``stats()`` says how much of all prompts the prefix cache spared, for dense and for hybrid models."""

from __future__ import annotations

from pathlib import Path

import trivet

LIMITS = trivet.Limits(max_requests=2, max_step_tokens=64, max_context=64, page_size=4)
TWO = trivet.Sampling(max_new_tokens=2, ignore_eos=True)


def test_the_hit_rate_is_the_share_of_looked_up_prompt_tokens_that_were_not_computed(family_checkpoint: Path) -> None:
    prompt, other = [token % 90 + 3 for token in range(30)], [token % 80 + 7 for token in range(11)]
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        stats = runtime.stats()
        assert (stats["prefix_prompt_tokens"], stats["prefix_hit_rate"]) == (0, 0.0)
        assert all(type(value) is (float if name == "prefix_hit_rate" else int) for name, value in stats.items())
        (cold,) = runtime.generate([prompt], TWO)
        stats = runtime.stats()
        assert cold.cached_tokens == 0 and (stats["prefix_prompt_tokens"], stats["prefix_hit_rate"]) == (30, 0.0)
        warm, _ = runtime.generate([prompt, other], TWO)
        runtime.score(prompt)  # needs every position, and looks up nothing
        stats = runtime.stats()
        assert warm.cached_tokens == 28
        assert (stats["prefix_hit_tokens"], stats["prefix_prompt_tokens"]) == (28, 71)
        assert stats["prefix_hit_rate"] == 28 / 71


def test_without_a_prefix_cache_nothing_is_looked_up(family_checkpoint: Path) -> None:
    with trivet.Runtime.load(
        family_checkpoint, device="cpu", limits=LIMITS, prefix_cache=False, autostart=False
    ) as runtime:
        for _ in range(2):
            runtime.generate([[1] * 20], TWO)
        assert (runtime.stats()["prefix_prompt_tokens"], runtime.stats()["prefix_hit_rate"]) == (0, 0.0)
