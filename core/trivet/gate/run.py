"""One run of the gate: load, serve every pass, ask the reference, judge, and see that the controls are caught."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from attrs import asdict, evolve, frozen

from trivet.bench.figures import table
from trivet.config.document import ConfigDocument
from trivet.errors import ConfigError
from trivet.gate.bounds import QUANTITIES, Bounds, bounds_of
from trivet.gate.compare import Compared, Figures, beyond
from trivet.gate.controls import CONTROLS, LONG_CONTROLS, Control, long_untouched, tampered, untouched
from trivet.gate.passes import Bench, Pass, left_out, passes_of
from trivet.gate.reference import Reference
from trivet.gate.session import Served
from trivet.gate.settings import FLOOR_PASS, GateSettings
from trivet.gate.sharpen import sharpen
from trivet.gate.sizes import PAGE_SIZE, Sizes
from trivet.plugin.manager import PluginManager
from trivet.runtime.blueprint import prefill_grid, prefix_grain
from trivet.runtime.device import resolve_device
from trivet.runtime.locate import EMBEDDED, GEOMETRIES, locate_checkpoint

Report = Callable[[str], None]


@frozen
class Outcome:
    """What became of a pass or a control.

    Attributes:
        name: of it.
        kind: ``"pass"``, which must keep the bounds, or ``"control"``, which must not.
        good: whether it did what it must.
        reasons: of a pass, why it failed; of a control, what gave it away.
        figures: over its sequences.
        notes: counts that show what happened.
        seconds: that it took, the reference included; while it is under way, when it began.
        sequences: position by position.
    """

    name: str
    kind: str
    good: bool
    reasons: tuple[str, ...]
    figures: Figures
    notes: dict[str, int]
    seconds: float
    sequences: tuple[Compared, ...]

    @property
    def verdict(self) -> str:
        """For people."""
        words = {"pass": ("passed", "FAILED"), "control": ("caught", "NOT CAUGHT")}[self.kind]
        return words[0] if self.good else words[1]

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        return {
            "name": self.name,
            "kind": self.kind,
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "figures": self.figures.as_json(),
            "notes": self.notes,
            "seconds": round(self.seconds, 2),
            "sequences": [sequence.as_json() for sequence in self.sequences],
        }


def run_gate(settings: GateSettings, report: Report) -> dict[str, Any]:
    """Run the gate; returns what a record keeps, with ``"passed"`` on top.

    Raises:
        ConfigError: what is asked cannot be served, or transformers is not installed.
        GateError: runtime and reference cannot be compared.
    """
    from trivet.runtime.runtime import Runtime

    started = time.perf_counter()
    if settings.load.get("weights") == "random" and settings.reference == "files":
        raise ConfigError("--reference files needs the checkpoint's weights, and --weights random draws others")
    sizes = sizes_for(settings)
    load = {"kv_pages": sizes.kv_pages, **settings.load, "limits": sizes.limits}
    with Runtime.load(settings.checkpoint, autostart=False, **load) as runtime:
        loaded = time.perf_counter()
        make = Reference.over_files if settings.reference == "files" else Reference.over_tensors
        reference = make(runtime)
        capacity = runtime._engine.blueprint.capacity
        tier = _tier(settings)
        sharpened = sharpen(runtime) if settings.load.get("weights") == "random" else 0
        about = {
            "tier": tier,
            "dtype": capacity.dtype,
            "device": str(runtime._engine.inputs["token_ids"].device),
            "reference": f"transformers {reference.name} over {reference.source}",
            "sharpened_norms": sharpened,
            "paths": runtime.explain_paths(),
            "graph_buckets": list(capacity.graph_buckets),
            "limits": asdict(capacity.limits),
            "kv_pages": runtime.memory.kv_pages,
            "load_s": round(loaded - started, 2),
            "reference_s": round(time.perf_counter() - loaded, 2),
        }
        report(f"{settings.checkpoint}: {tier}, {capacity.dtype} on {about['device']}; {about['reference']}")
        for attention, path in runtime.explain_paths().items():
            report(f"decode path of {attention}: {path}")
        judge = Judge(Bench(runtime, settings, sizes), reference, report)
        for name, reason in judge.left_out.items():
            if name in settings.passes:
                raise ConfigError(f"the pass {name!r} cannot be served: {reason}")
            report(f"{name} left out: {reason}")
        outcomes = judge.passes() + (judge.controls() if settings.controls else [])
    passed = all(outcome.good for outcome in outcomes)
    report(table(_HEADER, [_row(outcome) for outcome in outcomes]))
    report(_bounds_text(judge.bounds, judge.floor))
    recorded = bounds_of(capacity.dtype)
    within = not any(beyond(outcome.figures, recorded) for outcome in outcomes if outcome.kind == "pass")
    if judge.bounds != recorded:
        report(f"the passes {'also keep' if within else 'do not keep'} the figures of every {capacity.dtype} model")
    if tier != "checkpoint":
        report(f"evidence of the tier {tier!r}: a gate on the real checkpoint remains open")
    seconds = time.perf_counter() - started
    failed = [f"{outcome.name}: {outcome.verdict}" for outcome in outcomes if not outcome.good]
    report(f"gate {'passed' if passed else 'FAILED (' + ', '.join(failed) + ')'} in {seconds:.1f} s")
    return {
        "passed": passed,
        **about,
        "bounds": asdict(judge.bounds),
        "within_recorded_figures": within,
        "floor": judge.floor.as_json() if judge.floor is not None else None,
        "left_out": judge.left_out,
        "seconds": round(seconds, 2),
        "outcomes": [outcome.as_json() for outcome in outcomes],
    }


class Judge:
    """Has the passes and the controls served, and holds them against the reference.

    Attributes:
        bounds: those of the dtype, and once a floor is measured those of the model.
        floor: what rounding alone does to the reference; None where that is not measured.
        left_out: why passes are not served, by name.
    """

    def __init__(self, bench: Bench, reference: Reference, report: Report) -> None:
        self.bounds: Bounds = bounds_of(bench.dtype)
        self.floor: Figures | None = None
        self.left_out = left_out(bench)
        self._bench = bench
        self._reference = reference
        self._report = report

    def passes(self) -> list[Outcome]:
        """The passes that were asked for, in their order.

        The floor is measured on the sequences of `FLOOR_PASS`, asked for or not: bounds are those of the model, and do
        not depend on which passes are run.
        """
        settings, known = self._bench.settings, passes_of(self._bench.settings)
        for name in self.left_out:
            del known[name]
        chosen = {name: serve for name, serve in known.items() if not settings.passes or name in settings.passes}
        if settings.floor and FLOOR_PASS not in chosen:
            self._report(f"the sequences of {FLOOR_PASS} are served for the floor alone")
            self._take_floor(known[FLOOR_PASS](self._bench).served)
        return [self._passed(name, serve) for name, serve in chosen.items()]

    def controls(self) -> list[Outcome]:
        """What the faults are put into, without any; then each fault that this model can have."""
        geometry = self._bench.runtime._engine.blueprint.geometry

        def caught(controls: dict[str, Control]) -> list[Outcome]:
            return [self._caught(name, each) for name, each in controls.items() if each.applies(geometry)]

        outcomes = [self._passed("untouched", untouched), *caught(CONTROLS)]
        if self._bench.settings.long:
            outcomes += [self._passed("long-untouched", long_untouched), *caught(LONG_CONTROLS)]
        return outcomes

    def _passed(self, name: str, serve: Pass) -> Outcome:
        began = time.perf_counter()
        evidence = serve(self._bench)
        gives_floor = name == FLOOR_PASS and self._bench.settings.floor
        if gives_floor:
            self._take_floor(evidence.served)
        sequences = self._compared(evidence.served)
        figures = Figures.of(sequences)
        over = beyond(figures, self.bounds)
        if over and self.floor is not None and not gives_floor:
            over = self._beyond_own_floor(name, figures, evidence.served)
        reasons = (*over, *evidence.faults)
        return self._told(Outcome(name, "pass", not reasons, reasons, figures, evidence.notes, began, sequences))

    def _take_floor(self, served: Sequence[Served]) -> None:
        """Measure the floor of the model, and take its bounds from it."""
        self.floor = self._measured_floor(served) if served else None
        if self.floor is not None:
            self.bounds = bounds_of(self._bench.dtype, self.floor.as_floor())

    def _beyond_own_floor(self, name: str, figures: Figures, served: Sequence[Served]) -> list[str]:
        """Hold a pass that is over the model's bounds against the floor of its own sequences.

        Rounding does more to some sequences than to others, and the floor is the reference's alone: a fault of the
        runtime does not raise it.
        """
        assert self.floor is not None
        own = self._measured_floor(served)
        if own is None:
            return beyond(figures, self.bounds)
        floors = {quantity: max(value, self.floor.as_floor()[quantity]) for quantity, value in own.as_floor().items()}
        bounds = bounds_of(self._bench.dtype, floors)
        self._report(
            f"{name} is over the model's bounds; by its own sequences' floor they are regret {bounds.regret:.2g}, "
            f"mean {bounds.mean:.2g}, p99 {bounds.p99:.2g}"
        )
        return beyond(figures, bounds)

    def _measured_floor(self, served: Sequence[Served]) -> Figures | None:
        try:
            return measure_floor(self._reference, served)
        except Exception as error:  # of kernels that take no float32, or of memory: the recorded figures stand
            self._report(f"the floor could not be measured: {type(error).__name__}: {error}")
            return None

    def _caught(self, name: str, control: Control) -> Outcome:
        """The fault at its smallest, and larger ones only as long as nothing gives them away."""
        began = time.perf_counter()
        for size in control.sizes_on(self._bench):
            evidence = tampered(self._bench, control, size)
            sequences = self._compared(evidence.served)
            figures = Figures.of(sequences)
            found = (*(beyond(figures, self.bounds) if sequences else ()), *evidence.faults)
            caught = bool(found) and evidence.notes["strikes"] > 0
            if caught:
                break
        return self._told(Outcome(name, "control", caught, found, figures, evidence.notes, began, sequences))

    def _compared(self, served: Sequence[Served]) -> tuple[Compared, ...]:
        return tuple(Compared.of(one, self._reference.tell(one.prompt, one.token_ids)) for one in served)

    def _told(self, outcome: Outcome) -> Outcome:
        outcome = evolve(outcome, seconds=time.perf_counter() - outcome.seconds)
        reasons = f": {'; '.join(outcome.reasons)}" if outcome.reasons else ""
        notes = ", ".join(f"{name} {count}" for name, count in outcome.notes.items())
        self._report(f"{outcome.name} {outcome.verdict}{reasons} [{notes}]")
        return outcome


def measure_floor(reference: Reference, served: Sequence[Served]) -> Figures:
    """What the rounding of the served dtype alone does to the reference."""
    compared = []
    for one in served:
        narrow, wide = (reference.logprobs(one.prompt, one.token_ids, wide=wide) for wide in (False, True))
        compared.append(Compared.of_rounding(one, narrow, wide))
    return Figures.of(compared)


def sizes_for(settings: GateSettings) -> Sizes:
    """The sizes of a run, from the checkpoint's config.json."""
    weights = settings.load.get("weights", "checkpoint")
    document = ConfigDocument.read(locate_checkpoint(settings.checkpoint, with_weights=weights == "checkpoint"))
    geometry = PluginManager.discover().family_for(document.model_type).read_geometry(document)
    device, _ = resolve_device(settings.load.get("device"))
    load = settings.load
    grid_tokens = prefill_grid(geometry, load.get("numeric_policy", "tuned"))
    page_size = load.get("limits", {}).get("page_size", PAGE_SIZE)
    grain_tokens = prefix_grain(geometry, page_size, device.type, load.get("snapshot_stride"), grid_tokens)
    return Sizes.of(settings, geometry, device.type, grain_tokens)


def _tier(settings: GateSettings) -> str:
    """Which evidence this is, so that no fixture is taken for a model."""
    if settings.load.get("weights") == "random":
        return "full geometry, random weights" if settings.checkpoint in GEOMETRIES else "random weights"
    return "fixture" if settings.checkpoint in EMBEDDED else "checkpoint"


_HEADER = ("", "result", "sequences", "positions", "regret", "mean", "p99", "largest", "seconds")


def _row(outcome: Outcome) -> tuple[object, ...]:
    figures = outcome.figures
    numbers = [f"{value:.2g}" for value in (figures.regret, figures.mean, figures.p99, figures.largest)]
    return (
        outcome.name, outcome.verdict, figures.sequences, figures.positions, *numbers, f"{outcome.seconds:.1f}",
    )  # fmt: skip


def _bounds_text(bounds: Bounds, floor: Figures | None) -> str:
    floors = floor.as_floor() if floor is not None else {}
    parts = []
    for name in QUANTITIES:
        bound = getattr(bounds, name)
        part = f"{name} {bound:.2g}"
        if floors.get(name, 0.0) > 0:
            part += f" ({bound / floors[name]:.1f} times the floor of {floors[name]:.2g})"
        parts.append(part)
    text = f"bounds in nats: {', '.join(parts)}; the largest difference has none"
    return text if floor is not None else f"{text}; the floor was not measured here"
