"""What a model keeps: the buffers of the ledger's lines, and next to nothing beside them."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from trivet.capacity import Limits
from trivet.conformance.bench import Bench
from trivet.conformance.check import Measured, check
from trivet.conformance.failure import expect
from trivet.conformance.served import Served
from trivet.sampling.params import Sampling

if TYPE_CHECKING:
    from trivet.runtime.meter import StorageMeter

LIMITS = Limits(max_requests=4, max_step_tokens=48, max_context=96, page_size=4)


@check(
    "ledger.nothing-beside-it/1",
    "protocol",
    "Once a model is loaded, and again once it is idle after steps, no more is alive beside the buffers of the "
    "ledger's lines than a load allows a build to keep: the vectors of its weight map in float32, and small tables.",
    cause="the model cannot be loaded while its allocations are counted",
)
def nothing_beside_it(bench: Bench) -> Measured:
    from trivet.runtime.kept import most_kept_bytes
    from trivet.runtime.meter import StorageMeter

    rng = bench.rng("kept")
    tiny = bench.tiny()
    bound = most_kept_bytes(tiny.weight_map)
    with StorageMeter() as meter, bench.serve(tiny, limits=LIMITS) as served:
        loaded_bytes = _beside_buffers(served, meter, bound)
        prompts = [bench.tokens(rng, LIMITS.max_step_tokens), bench.tokens(rng, 5)]
        # The last steps decode: what attention has made for a step it may keep up to the next.
        served.generate(prompts, Sampling(max_new_tokens=6, ignore_eos=True))
        idle_bytes = _beside_buffers(served, meter, bound)
    for when, kept in (
        ("after the load and its start-up profile", loaded_bytes),
        ("idle after some steps", idle_bytes),
    ):
        expect(
            kept <= bound,
            observed=f"{when}: {kept} bytes are alive beside the buffers of the ledger's lines",
            expected=f"at most {bound} bytes",
            cause="the family's layers keep tensors of their own: copies of parameters made on first use, a table by "
            "position or by token, or a step's hidden states as an attribute; keep what comes with Parameters, and let "
            "a step's tensors go",
        )
    return {"kept_bytes": float(max(loaded_bytes, idle_bytes))}


def _beside_buffers(served: Served, meter: StorageMeter, bound: int) -> int:
    """Bytes that are alive of what was made under `meter`, without the runtime's own buffers."""
    owned = sum(buffers.storage_bytes for buffers in served.engine.owned.values())
    if meter.live_bytes - owned > bound:
        gc.collect()  # what only cycles hold is not kept
    return meter.live_bytes - owned


CHECKS = (nothing_beside_it,)
