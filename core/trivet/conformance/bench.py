"""What a check works with: one family, tiny checkpoints of it, and runtimes over them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trivet.attention.protocol import DecodePath, PathRequest
from trivet.capacity import DeviceProfile, Limits, PlanCapacity
from trivet.capacity.plan import NUMERIC_POLICIES
from trivet.conformance.failure import NotRun
from trivet.conformance.tiny import TinyModel, make_tiny, with_tied_embeddings
from trivet.conformance.twins import manager_of, serving
from trivet.geometry import AttentionGeometry
from trivet.plugin.family import ModelFamily
from trivet.plugin.record import PluginRecord

if TYPE_CHECKING:
    import torch

    from trivet.conformance.oracle import Oracle
    from trivet.conformance.served import Served
    from trivet.runtime.blueprint import Blueprint

LIMITS = Limits(max_requests=4, max_step_tokens=24, max_context=96, page_size=4)
"""Small, and such that steps mix, prompts are chunked and contexts span pages."""
DEVICE_LIMITS = attrs.evolve(LIMITS, page_size=16)
DEVICE_DTYPE = "bfloat16"
"""What kernel libraries are made for."""


class Bench:
    """One family under test.

    Attributes:
        model_type: the one that is tested.
        family: the family that serves it.
        record: what is known of its plugin.
        workspace: a directory for tiny checkpoints.
        seed: decides every drawn input.
        device: ``"cpu"`` or ``"cuda"``, where runtimes are loaded.
        model: a real checkpoint for the checkpoint tier, or None.
        paths: the family's decode paths, then those of installed attention backends, which may serve it too.
    """

    def __init__(
        self,
        model_type: str,
        family: ModelFamily,
        record: PluginRecord,
        workspace: Path,
        seed: int = 0,
        device: str = "cpu",
        model: Path | None = None,
        installed: Iterable[DecodePath] = (),
    ) -> None:
        self.model_type = model_type
        self.family = family
        self.record = record
        self.workspace = workspace
        self.seed = seed
        self.device = device
        self.model = model
        self.paths = (*family.decode_paths, *installed)
        self._made: dict[str, TinyModel] = {}

    # Inputs.

    def rng(self, label: str) -> np.random.Generator:
        """Random numbers for one purpose, the same in every run with this seed."""
        digest = hashlib.blake2b(f"{self.seed}:{label}".encode(), digest_size=8).digest()
        return np.random.default_rng(int.from_bytes(digest, "little"))

    def tokens(self, rng: np.random.Generator, count: int, tiny: TinyModel | None = None) -> list[int]:
        """`count` tokens of the vocabulary of `tiny`, by default the first."""
        return [int(token) for token in rng.integers(0, (tiny or self.tiny()).vocab_size, count)]

    # Tiny checkpoints.

    @property
    def configs(self) -> dict[str, Mapping[str, object]]:
        """The tiny configs of this model type."""
        return {
            name: config
            for name, config in self.family.tiny_configs.items()
            if config.get("model_type") == self.model_type
        }

    def tiny(self, name: str | None = None) -> TinyModel:
        """The checkpoint of config `name`, by default of the first."""
        configs = self.configs
        if not configs:
            raise NotRun(f"the family declares no tiny config of model_type {self.model_type!r}")
        name = next(iter(configs)) if name is None else name
        if name not in self._made:
            self._made[name] = make_tiny(self.family, name, configs[name], self.workspace / name)
        return self._made[name]

    @property
    def tinies(self) -> list[TinyModel]:
        """The checkpoints of all configs."""
        return [self.tiny(name) for name in self.configs]

    def untied(self) -> TinyModel:
        """A checkpoint whose output projection is a matrix of its own."""
        for tiny in self.tinies:
            if not tiny.geometry.tied_embeddings:
                return tiny
        return self.variant("untied", with_tied_embeddings(self.tiny().config, False))

    def tied(self) -> TinyModel:
        """A checkpoint whose output projection is the embedding."""
        for tiny in self.tinies:
            if tiny.geometry.tied_embeddings:
                return tiny
        return self.variant("tied", with_tied_embeddings(self.tiny().config, True))

    def variant(
        self,
        name: str,
        config: Mapping[str, object],
        tensors: Mapping[str, torch.Tensor] | None = None,
        shards: int = 1,
    ) -> TinyModel:
        """A checkpoint of another config, under a name of its own."""
        return make_tiny(self.family, name, config, self.workspace / "variants" / name, tensors, shards)

    @cached_property
    def hybrid(self) -> bool:
        """Whether the family has recurrent layers, by its first tiny config."""
        return self.tiny().geometry.hybrid

    @cached_property
    def oracle(self) -> Oracle:
        """What the family's log-probabilities are held against; `NotRun` without one."""
        from trivet.conformance.oracle import open_oracle

        return open_oracle(self.family, self.workspace, self.rng)

    # Runtimes.

    def serve(
        self,
        tiny: TinyModel | Path | None = None,
        family: ModelFamily | None = None,
        *,
        exact_limits: bool = False,
        **options: Any,
    ) -> Served:
        """A runtime over `tiny`, by default the first, that the caller closes.

        Capabilities that the family declares unsupported are not asked for. Where prompts are computed whole, steps
        are made large enough for any of them, unless `exact_limits`.

        Args:
            family: serves in place of the family under test.
            options: as in `Runtime.load`.
        """
        from trivet.conformance.served import Served
        from trivet.runtime.runtime import Runtime

        options = {**self._defaults(family or self.family), **options}
        if not (family or self.family).capabilities.chunked_prefill and not exact_limits:
            limits = options["limits"]
            if limits.max_step_tokens < limits.max_context:
                options["limits"] = attrs.evolve(limits, max_step_tokens=limits.max_context)
        if self.device == "cuda" and options.get("kv_pages") is None:
            options["kv_pages"] = options["limits"].logical_pages  # as on a CPU, and not all of the memory
        directory = tiny if isinstance(tiny, Path) else (tiny or self.tiny()).directory
        if family is None and self.record.status == "loaded":
            return Served(Runtime.load(directory, **options))
        with serving(family or self.family):
            return Served(Runtime.load(directory, **options))

    def blueprint(
        self,
        tiny: TinyModel | None = None,
        family: ModelFamily | None = None,
        device: str = "cpu",
        device_memory_bytes: int | None = None,
        **options: Any,
    ) -> Blueprint:
        """The sizes of a runtime that is not loaded."""
        from trivet.runtime.blueprint import draw_blueprint
        from trivet.runtime.options import SizingOptions

        defaults = self._defaults(family or self.family)
        del defaults["device"], defaults["autostart"]
        return draw_blueprint(
            (tiny or self.tiny()).directory,
            SizingOptions(**{**defaults, **options}),
            DeviceProfile.named(device, device_memory_bytes),
            manager_of(family or self.family),
        )

    # Decode paths.

    @property
    def limits(self) -> Limits:
        """Of runtimes and paths for which a check states no others."""
        return DEVICE_LIMITS if self.device == "cuda" else LIMITS

    @property
    def dtype(self) -> str:
        """What is served where a check states no other dtype."""
        return DEVICE_DTYPE if self.device == "cuda" else "float32"

    def usable_paths(self, attention: AttentionGeometry) -> list[DecodePath]:
        """The decode paths that say they serve `attention` on this bench's device, in its dtype, under any policy."""
        needs = [
            PathRequest(attention, self.profile, self.dtype, policy, self.limits.page_size)
            for policy in NUMERIC_POLICIES
        ]
        return [path for path in self.paths if any(self._says_yes(path, need) for need in needs)]

    def _says_yes(self, path: DecodePath, need: PathRequest) -> bool:
        try:
            return path.usable(need).ok
        except Exception:
            if path in self.family.decode_paths:
                raise
            return False  # an installed one is passed over when it is asked for a model; paths.verdicts names it

    def plan_capacity(self, path: DecodePath, attention: AttentionGeometry, limits: Limits) -> PlanCapacity:
        """The capacity that a runtime on this bench's device would make for `path`."""
        return PlanCapacity(attention, limits, path.tile(attention), device=self.profile, dtype=self.dtype)

    @cached_property
    def profile(self) -> DeviceProfile:
        """Profile of this bench's device."""
        return DeviceProfile.of_cuda(0) if self.device == "cuda" else DeviceProfile.named("cpu")

    def _defaults(self, family: ModelFamily) -> dict[str, Any]:
        return {
            "device": self.device,
            "dtype": self.dtype,
            "limits": self.limits,
            "autostart": False,
            "prefix_cache": family.capabilities.prefix_cache
            and (family.capabilities.chunked_prefill or not self.hybrid),
            "cuda_graphs": family.capabilities.cuda_graphs,
        }


def differing(first: Sequence[object], second: Sequence[object]) -> int:
    """The first place where two token sequences differ."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
