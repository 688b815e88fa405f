"""The process: whoever serves a family owns it, and the family changes nothing of it."""

from __future__ import annotations

from trivet.conformance.bench import Bench
from trivet.conformance.check import check
from trivet.conformance.failure import broken, expect
from trivet.conformance.probe import ask

PROBE_TIMEOUT_S = 90.0


@check(
    "process.left-as-it-was/2",
    "protocol",
    "In a process of its own, importing the family, loading a model and serving steps leave torch's settings, the "
    "flags of its backends and its random numbers alone, and print nothing.",
    cause="the tiny checkpoint cannot be written",
)
def left_as_it_was(bench: Bench) -> None:
    found, said = ask(("settings", bench.model_type, str(bench.tiny().directory)), PROBE_TIMEOUT_S)
    if found is None:
        broken(
            observed=f"another process that loads a tiny model and serves steps fails: {said}",
            expected="a fresh process serves the family",
            cause="the model cannot be built or served under settings of torch that others may have made, or needs "
            "something that only this process has",
        )
    before, loaded, after = (found[when] for when in ("before", "loaded", "after"))
    changed = [
        f"{when} {what} is {now[what]}, and was {earlier[what]}"
        for when, earlier, now in (("after the load", before, loaded), ("after some steps", loaded, after))
        for what in before
        if now[what] != earlier[what]
    ]
    expect(
        not changed,
        observed="; ".join(changed),
        expected="everything as it was before the family was imported",
        cause="a module of the family, its build or one of its layers calls torch.set_num_threads, "
        "torch.set_default_dtype, torch.manual_seed or the like, or sets a flag of torch.backends, which holds for all "
        "that the process computes: pass dtypes, devices and generators where tensors are made",
    )
    expect(
        not found["printed"],
        observed=f"printed to standard output: {found['printed'][:80]!r}",
        expected="nothing: a command's output is read by other programs",
        cause="a print was left in a module of the family, in its build or in a layer; use logging",
    )


CHECKS = (left_as_it_was,)
