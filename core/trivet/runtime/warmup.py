"""Build what a model's kernels need before the first request waits for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from attrs import frozen

from trivet.errors import ConfigError
from trivet.plugin.manager import PluginManager
from trivet.runtime.blueprint import draw_blueprint
from trivet.runtime.device import current, resolve_device
from trivet.runtime.locate import locate_checkpoint
from trivet.runtime.options import SizingOptions
from trivet.sampling.params import Sampling

Report = Callable[[str], None]

PROMPT_TOKENS = (1, 5, 300)
NEW_TOKENS = 3


@frozen
class Built:
    """One thing that was built.

    Attributes:
        name: of the kernel, or of the step.
        seconds: how long it took.
    """

    name: str
    seconds: float


def warm_up(
    checkpoint: str | os.PathLike[str],
    report: Report,
    *,
    device: str | None = None,
    weights: str = "random",
    **load: Any,
) -> list[Built]:
    """Build the kernels that serving `checkpoint` with these arguments takes, into the caches of their libraries.

    First the modules of the selected decode paths that are not built yet, one by one; then a runtime is loaded,
    which compiles what its layers and its captured decode steps launch, and serves prompts of a few lengths.

    Args:
        report: told what is being built, and how long it took.
        device, weights, load: as in `Runtime.load`; random weights do, since only shapes count.

    Raises:
        ConfigError: a kernel cannot be built, with the library's message; and the other errors of `Runtime.load`.
    """
    from trivet.runtime.runtime import Runtime

    directory = locate_checkpoint(checkpoint)
    torch_device, profile = resolve_device(device)
    built: list[Built] = []

    def timed(name: str, build: Callable[[], Any]) -> Any:
        report(f"{name} ...")
        started = time.perf_counter()
        try:
            result = build()
        except RuntimeError as error:  # of a compiler
            raise ConfigError(f"{name} cannot be built: {error}") from error
        built.append(Built(name, time.perf_counter() - started))
        report(f"{name}: {built[-1].seconds:.1f} s")
        return result

    options = SizingOptions(**load)
    plugins = PluginManager.discover()
    with current(torch_device):
        blueprint = timed("choosing decode paths", lambda: draw_blueprint(directory, options, profile, plugins))
        for plan in blueprint.capacity.plans:
            builds = getattr(blueprint.selections[plan.attention].path, "builds", None)
            for name, build in builds(plan) if builds is not None else ():
                timed(name, build)
    runtime = timed(
        "loading and capturing",
        lambda: Runtime.load(checkpoint, device=device, weights=weights, autostart=False, **load),
    )
    with runtime:
        limits = blueprint.capacity.limits
        vocab_size = blueprint.geometry.vocab_size
        for tokens in PROMPT_TOKENS:
            length = min(tokens, limits.max_context - NEW_TOKENS)
            if length >= 1:
                prompt = [token % vocab_size for token in range(length)]
                sampling = Sampling(max_new_tokens=NEW_TOKENS, ignore_eos=True)
                timed(f"a prompt of {length} tokens", partial(runtime.generate, [prompt], sampling))
    return built
