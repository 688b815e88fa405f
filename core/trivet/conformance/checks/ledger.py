"""The ledger: planned as it is loaded, and no less than what is used."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

import trivet
from trivet.capacity import Limits
from trivet.conformance.bench import Bench
from trivet.conformance.check import Measured, check
from trivet.conformance.failure import expect
from trivet.conformance.served import Served
from trivet.conformance.twins import ModelWrapper, serving
from trivet.reservation import KV_LINE
from trivet.sampling.params import Sampling

if TYPE_CHECKING:
    import torch

    from trivet.layers.decoder import DecoderModel
    from trivet.runtime.engine import Engine
    from trivet.runtime.step_meter import StepMeter

STEPS = 6

PARTS = {
    "attention_bytes": ("attention", "a decode path takes more than its scratch_bytes states"),
    "layers_bytes": (
        "layers, without attention",
        "a layer keeps what it no longer needs, or the planned bound leaves out a term (a wide projection)",
    ),
    "forward_bytes": ("layers and attention", "a layer keeps what it no longer needs, or attention its scratch"),
    "sampling_bytes": (
        "logits and sampling",
        "logits are computed of more rows than are asked for, or layers leave temporaries behind",
    ),
}
"""Parts of a step, as `StepMeter` and `StepBounds` call them: what each is, and what is wrong where it takes more."""


@check(
    "ledger.planned-is-loaded/1",
    "protocol",
    "plan_memory, from config.json alone, gives the ledger that a loaded runtime has; the total is the sum of the "
    "lines, and no line stands for what is not there.",
    cause="the plan and the load compute their sizes apart",
)
def planned_is_loaded(bench: Bench) -> Measured:
    limits = Limits(3, 20, 50, 4)
    for tiny in bench.tinies:
        with bench.serve(tiny, limits=limits, kv_pages=20) as served:
            loaded = served.runtime.memory
            limits = served.engine.blueprint.capacity.limits
        with serving(bench.family):
            planned = trivet.plan_memory(
                tiny.directory,
                "cpu",
                dtype="float32",
                limits=limits,
                kv_pages=20,
                prefix_cache=bench.family.capabilities.prefix_cache,
                cuda_graphs=bench.family.capabilities.cuda_graphs,
            )
        expect(
            planned.as_json() == loaded.as_json() or bench.device != "cpu",
            observed=f"planned {planned.as_json()}",
            expected=f"{loaded.as_json()}, as loaded",
            cause="a size depends on something that is known only after loading",
        )
        expect(
            loaded.total_bytes == sum(line.bytes for line in loaded.items) and loaded.kv_pages == 20,
            observed=f"total {loaded.total_bytes}, {loaded.kv_pages} pages",
            expected=f"{sum(line.bytes for line in loaded.items)}, the sum of the lines, and the 20 pages asked for",
            cause="a line is left out of the total, or the pages are counted from another budget",
        )
        weights = sum(spec.elements for spec in tiny.weight_map.parameters) * 4
        found = sum(line.bytes for line in loaded.items if "weight" in line.name)
        expect(
            found == weights,
            observed=f"the weight line is {found} bytes",
            expected=f"{weights} bytes: every parameter of the weight map in float32, and nothing else",
            cause="parameters are counted twice, or not at all",
        )
        layers = len(tiny.geometry.attention_layers)
        kv = sum(
            2 * limits.page_size * attention.kv_heads * attention.head_dim * 4 * (20 + 1)
            for attention in (tiny.geometry.layers[i] for i in tiny.geometry.attention_layers)
            if isinstance(attention, trivet.plugin.AttentionGeometry)
        )
        expect(
            loaded.line(KV_LINE).bytes == kv,
            observed=f"{loaded.line(KV_LINE).bytes} bytes of KV pages for {layers} attention layers",
            expected=f"{kv}: keys and values of 20 pages and the padding page, in each layer that attends",
            cause="pages are sized by another head count, head dim, dtype or number of layers than attention uses",
        )
    return {"total_bytes": float(loaded.total_bytes)}


@check(
    "ledger.covers-the-peak/2",
    "protocol",
    "The memory that steps of every kind really take beside the owned buffers stays within the ledger's activation "
    "line, that of layers, of attention, and of logits and sampling each within its part of it; and none of it is kept "
    "from one decode step to the next.",
    cause="a layer keeps more temporaries alive than the plan allows for",
)
def covers_the_peak(bench: Bench) -> Measured:
    from trivet.runtime.profile import profiled_bounds

    worst = dict.fromkeys(PARTS, 0.0)
    rng = bench.rng("peak")
    for limits in (Limits(4, 48, 96, 4), Limits(2, 5, 40, 16)):
        with bench.serve(limits=limits) as served:
            blueprint = served.engine.blueprint
            planned = attrs.asdict(profiled_bounds(blueprint.capacity, blueprint.selections))
            line = served.runtime.memory.line("activations").bytes
            prompts = [bench.tokens(rng, int(n)) for n in rng.integers(1, limits.max_context // 2, 4)]
            plain = Sampling(max_new_tokens=3, logprobs=5)
            drawn = Sampling(max_new_tokens=3, temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=1)
            with metered_parts(served.engine) as meter:
                served.generate(prompts, [plain, drawn] * 2)
                served.score(bench.tokens(rng, limits.max_context))
            for part, (what, cause) in PARTS.items():
                found, bound = getattr(meter, part), min(planned[part], line)
                expect(
                    found <= bound,
                    observed=f"{found} bytes of temporaries of {what} were alive at once under {limits}",
                    expected=f"at most {bound} bytes, their part of the {line} bytes of the activation line",
                    cause=cause,
                )
                worst[part] = max(worst[part], found / bound if bound else 0.0)  # attention that needs no scratch
            _require_nothing_kept(served, prompts[0])
    over = {part.replace("bytes", "over_planned"): ratio for part, ratio in worst.items()}
    return {"peak_over_planned": max(worst.values()), **over}


class _Announced(ModelWrapper):
    """A model that tells a meter where the forward part of a step begins and ends."""

    def __init__(self, model: DecoderModel, meter: StepMeter) -> None:
        super().__init__(model)
        self.meter = meter

    def __call__(self, token_ids: torch.Tensor, step: Any) -> torch.Tensor:
        """Hidden states of the wrapped model."""
        self.meter.begin_forward()
        hidden = super().__call__(token_ids, step)
        self.meter.end_forward()
        return hidden


@contextmanager
def metered_parts(engine: Engine) -> Iterator[StepMeter]:
    """Meter the steps that `engine` computes meanwhile, part by part."""
    from trivet.runtime.step_meter import StepMeter, metered

    meter = StepMeter()
    model, owners = engine.model, dict(engine.owners)
    engine.model = _Announced(model, meter)
    engine.owners.update({attention: metered(owner, meter) for attention, owner in owners.items()})
    try:
        with meter:
            yield meter
            meter.end()
    finally:
        engine.model = model
        engine.owners.update(owners)


def _require_nothing_kept(served: Served, prompt: Sequence[int]) -> None:
    """`Broken` if more is alive after twice as many decode steps."""
    from trivet.runtime.meter import StorageMeter

    alive = []
    with StorageMeter() as meter:
        request = served.submit(prompt[:4], Sampling(max_new_tokens=3 * STEPS + 2))
        for _ in range(3):  # the first round also makes what is made once
            for _ in range(STEPS):
                served.step()
            gc.collect()
            alive.append(meter.live_bytes)
        served.finish([request])
    expect(
        alive[2] <= alive[1],
        observed=f"{alive[1]} bytes of temporaries were alive after {2 * STEPS} steps of one request, and {alive[2]} "
        f"after {3 * STEPS}",
        expected="no more: what a step makes is freed by its end",
        cause="the model keeps a tensor of each step: a list or dictionary that a layer adds to, or a cache beside the "
        "runtime's",
    )


CHECKS = (planned_is_loaded,)
LATE_CHECKS = (covers_the_peak,)
"""Where steps of every kind have been shown to be right."""
