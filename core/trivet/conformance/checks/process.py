"""The process: whoever serves a family owns it, and the family changes nothing of it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import torch

from trivet.conformance.bench import Bench
from trivet.conformance.check import check
from trivet.conformance.failure import expect
from trivet.sampling.params import Sampling

UNLIKELY_THREADS = 3
"""What a family that sets the number of threads would hardly set."""


@check(
    "process.left-as-it-was/1",
    "protocol",
    "Loading a model and serving steps leave torch's settings and random numbers alone, and print nothing.",
    cause="the model cannot be built or served under settings of torch that others may have made",
)
def left_as_it_was(bench: Bench) -> None:
    rng = bench.rng("process")
    said = io.StringIO()
    with _settings_kept(), contextlib.redirect_stdout(said):
        torch.set_num_threads(UNLIKELY_THREADS)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.manual_seed(int(rng.integers(2**31)))  # a load before may have left the seed that this one sets
        torch.set_float32_matmul_precision("highest")
        before = _settings()
        with bench.serve() as served:
            loaded = _settings()
            served.generate([bench.tokens(rng, 30)] * 2, Sampling(max_new_tokens=3))
            after = _settings()
    changed = [
        f"{when} {what} {'is another' if found is None else f'is {found}, and was {before[what][1]}'}"
        for when, now in (("after the load", loaded), ("after some steps", after))
        for what, (value, found) in now.items()
        if value != before[what][0]
    ]
    expect(
        not changed,
        observed="; ".join(changed),
        expected="everything as it was before the load",
        cause="the family's build or one of its layers calls torch.set_num_threads, torch.set_default_dtype, "
        "torch.manual_seed or the like, which holds for all that the process computes: pass dtypes, devices and "
        "generators where tensors are made",
    )
    expect(
        not said.getvalue(),
        observed=f"printed to standard output: {said.getvalue()[:80]!r}",
        expected="nothing: a command's output is read by other programs",
        cause="a print was left in the family's build or in a layer; use logging",
    )


def _settings() -> dict[str, tuple[object, object]]:
    """What is to stay as it is, to compare, and the same to be shown; None where it says nothing to people."""
    values: dict[str, Any] = {
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
    }
    state = torch.get_rng_state().numpy().tobytes()
    return {name: (value, value) for name, value in values.items()} | {"the state of torch.random": (state, None)}


@contextlib.contextmanager
def _settings_kept() -> Iterator[None]:
    """Put back what is set inside, by the check or by what it finds."""
    threads, dtype, gradients = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    random_state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        torch.set_float32_matmul_precision(precision)
        if torch.are_deterministic_algorithms_enabled() != deterministic:  # to set it imports torch's compiler
            torch.use_deterministic_algorithms(deterministic)
        torch.set_rng_state(random_state)


CHECKS = (left_as_it_was,)
