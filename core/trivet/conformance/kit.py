"""Runs the checks on one family: what pytest and the command line have in common."""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType

import torch
from attrs import frozen

import trivet
from trivet.conformance.bench import Bench
from trivet.conformance.check import TIERS, Check, Measured, Tier
from trivet.conformance.checks.capabilities import refusal
from trivet.conformance.checks.tiny_models import PATHS_ALONE, tiny_models
from trivet.conformance.failure import Broken, NotRun
from trivet.conformance.manifest import CHECKS
from trivet.conformance.origin import told
from trivet.conformance.outcome import Failure, Outcome
from trivet.errors import PluginError
from trivet.plugin.evidence import ExpectedFailure
from trivet.plugin.family import ModelFamily
from trivet.plugin.groups import FAMILIES
from trivet.plugin.manager import PluginManager
from trivet.plugin.record import PluginRecord

DEFAULT_TIERS: tuple[Tier, ...] = ("protocol", "numerics")


@frozen
class Asked:
    """What a run was asked for.

    Attributes:
        model_type: whose family is tested.
        tiers: which tiers; None: protocol and numerics, device if there is CUDA, checkpoint if a model is given.
        model: a real checkpoint, for the checkpoint tier.
        seed: of every drawn input.
    """

    model_type: str
    tiers: tuple[Tier, ...] | None = None
    model: Path | None = None
    seed: int = 0

    def unreached(self) -> dict[Tier, str]:
        """Tiers that are not run, each with the reason."""
        cuda = torch.cuda.is_available()
        missing: dict[Tier, str] = {}
        for tier in TIERS:
            if tier == "device" and not cuda:
                missing[tier] = "no CUDA"
            elif tier == "checkpoint" and self.model is None:
                missing[tier] = "no --model"
            elif self.tiers is not None and tier not in self.tiers:
                missing[tier] = "not asked for"
        return missing

    def reached(self) -> tuple[Tier, ...]:
        """Tiers that are run or, where they were asked for by name, must be."""
        unreached = self.unreached()
        return tuple(t for t in TIERS if t not in unreached or (self.tiers is not None and t in self.tiers))

    def rerun(self, check: Check) -> str:
        """The command that runs one check again."""
        words = ["trivet", "conform", self.model_type, "--check", check.id, "--seed", str(self.seed)]
        if check.tier == "checkpoint" and self.model is not None:
            words += ["--model", str(self.model)]
        return shlex.join(words)


class Kit:
    """One family, ready to be checked. Close it, or use ``with``.

    Raises:
        PluginError: no plugin serves the model type, or the one that does fails to load.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        manager = PluginManager.discover()
        self.family = manager.family_for(asked.model_type)
        self.record = _record(manager, asked.model_type)
        installed = [path for backend in manager.attention_backends() for path in backend.decode_paths]
        self._workspace = tempfile.TemporaryDirectory(prefix="trivet-conformance-")
        self.benches = {
            device: Bench(
                asked.model_type,
                self.family,
                self.record,
                Path(self._workspace.name) / device,
                asked.seed,
                device,
                asked.model,
                installed,
            )
            for device in ("cpu", "cuda")
        }
        self._gates: dict[str, Outcome] = {}
        self._expected = _expected_failures(self.family)

    @property
    def family_name(self) -> str:
        """Name of the family, for reports."""
        return self.family.name

    @property
    def loaded(self) -> bool:
        """Whether the family could be loaded."""
        return True

    def manifest(self) -> tuple[Check, ...]:
        """The checks that are asked of this family, in order."""
        reached = self.asked.reached()
        return tuple(check for check in CHECKS if check.tier in reached and self._applies(check))

    def inapplicable(self) -> tuple[Check, ...]:
        """Checks of the tiers asked for that are about something that this family has not."""
        reached = self.asked.reached()
        return tuple(check for check in CHECKS if check.tier in reached and not self._applies(check))

    def run(self, check: Check) -> Outcome:
        """Run one check, after the gates before it."""
        if check.gate and check.id in self._gates:
            return self._gates[check.id]
        outcome = self._behind_gates(check)
        if check.gate:
            self._gates[check.id] = outcome
        return outcome

    def _behind_gates(self, check: Check) -> Outcome:
        unreached = self.asked.unreached()
        if check.tier in unreached and check.tier in (self.asked.tiers or ()):
            return Outcome.of(check, "not run", reason=unreached[check.tier])
        for gate in CHECKS:
            if gate is check:
                break
            if gate.gate and self.run(gate).status == "failed" and not self._stands_alone(check, gate):
                return Outcome.of(check, "not run", reason=f"{gate.id} failed")
        outcome = self._outcome(check)
        expected = self._expected.get(check.id)
        if expected is None:
            return outcome
        reason = f"{expected.reason} ({expected.link})"
        if outcome.status == "failed":
            return Outcome.of(
                check, "expected failure", seconds=outcome.seconds, reason=reason, failure=outcome.failure
            )
        return self._failed(
            check,
            outcome.seconds,
            observed=f"the check {outcome.status}",
            expected=f"the failure that the family declares: {reason}",
            cause="what was broken is mended: take the entry out of ModelFamily.expected_failures",
        )

    def _outcome(self, check: Check) -> Outcome:
        bench = self.benches["cuda" if check.tier in ("device", "checkpoint") and torch.cuda.is_available() else "cpu"]
        unsupported = check.capability is not None and not getattr(self.family.capabilities, check.capability)
        started = time.perf_counter()
        measured: Measured | None = None
        try:
            with _one_thread() if check.tier in DEFAULT_TIERS else nullcontext():
                if unsupported:
                    assert check.capability is not None
                    refusal(bench, check.capability, self.family)
                else:
                    measured = check.run(bench)
        except NotRun as missing:
            return Outcome.of(check, "not run", seconds=time.perf_counter() - started, reason=str(missing))
        except Broken as error:
            return self._failed(
                check,
                time.perf_counter() - started,
                observed=error.observed,
                expected=error.expected,
                cause=error.cause,
            )
        except Exception as error:
            return self._failed(
                check,
                time.perf_counter() - started,
                observed=told(error, self.family, self.record.target),
                expected="no exception: " + check.contract,
                cause=check.cause,
            )
        seconds = time.perf_counter() - started
        if unsupported:
            reason = f"the family declares {check.capability} unsupported, and refuses it"
            return Outcome.of(check, "declared unsupported", seconds=seconds, reason=reason)
        return Outcome.of(check, "passed", seconds=seconds, measured=dict(measured or {}))

    def _failed(self, check: Check, seconds: float, *, observed: str, expected: str, cause: str) -> Outcome:
        failure = Failure(
            contract=check.contract,
            observed=observed,
            expected=expected,
            cause=cause,
            rerun=self.asked.rerun(check),
            docs=check.docs,
        )
        return Outcome.of(check, "failed", seconds=seconds, failure=failure)

    def _stands_alone(self, check: Check, gate: Check) -> bool:
        """Whether a check asks no more of the family than its decode paths and geometries, where no model is served."""
        if gate is not tiny_models or check not in PATHS_ALONE:
            return False
        try:
            return bool(self.benches["cpu"].tinies)
        except Exception:
            return False  # no geometry is known

    def _applies(self, check: Check) -> bool:
        if not check.recurrent:
            return True
        try:
            return self.benches["cpu"].hybrid
        except Exception:
            return True  # the gate says what is wrong with the tiny config

    def close(self) -> None:
        """Remove the tiny checkpoints."""
        self._workspace.cleanup()

    def __enter__(self) -> Kit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class UnloadedKit(Kit):
    """The kit of a plugin that is there and cannot be loaded: its first check fails by that, and no other is run.

    Args:
        record: what is known of the plugin.
        error: why it cannot be loaded.
    """

    def __init__(self, asked: Asked, record: PluginRecord, error: PluginError) -> None:
        self.asked = asked
        self.record = record
        self._error = error
        self._workspace = tempfile.TemporaryDirectory(prefix="trivet-conformance-")

    @property
    def family_name(self) -> str:
        """The model type, since no family is known."""
        return self.asked.model_type

    @property
    def loaded(self) -> bool:
        """See `Kit.loaded`."""
        return False

    def manifest(self) -> tuple[Check, ...]:
        """The checks that would be asked of a family without recurrent layers."""
        reached = self.asked.reached()
        return tuple(check for check in CHECKS if check.tier in reached and not check.recurrent)

    def inapplicable(self) -> tuple[Check, ...]:
        """None that are known."""
        return ()

    def run(self, check: Check) -> Outcome:
        """Fail the first check; all others stand behind it."""
        if check.id != CHECKS[0].id:
            return Outcome.of(check, "not run", reason=f"{CHECKS[0].id} failed")
        return self._failed(
            check,
            0.0,
            observed=str(self._error),
            expected=f"a plugin that loads and brings a family for model_type {self.asked.model_type!r}",
            cause="`trivet doctor` names the phase in which it fails, and what to do",
        )


def open_kit(asked: Asked) -> Kit:
    """The kit of a family; of a plugin that claims its name and cannot be loaded, one that says so.

    Raises:
        PluginError: no plugin claims the name.
    """
    try:
        return Kit(asked)
    except PluginError as error:
        manager = PluginManager.discover()
        manager.load_all()
        for record in manager.records:
            if record.name == asked.model_type and record.status in ("failed", "incompatible"):
                return UnloadedKit(asked, record, error)
        raise


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from more threads, and wait for them where other processes compute too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _record(manager: PluginManager, model_type: str) -> PluginRecord:
    named = [r for r in manager.records if r.name == model_type and r.group == FAMILIES.name and r.status == "loaded"]
    return named[0]


def _expected_failures(family: ModelFamily) -> dict[str, ExpectedFailure]:
    known = {check.id for check in CHECKS}
    unknown = [entry.check for entry in family.expected_failures if entry.check not in known]
    if unknown:
        raise PluginError(
            f"model family {family.name!r} expects checks to fail that Trivet {trivet.__version__} does not have: "
            f"{unknown}; correct the ids or their versions in ModelFamily.expected_failures"
        )
    return {entry.check: entry for entry in family.expected_failures}
