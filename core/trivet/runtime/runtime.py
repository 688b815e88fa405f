"""The public runtime: load a checkpoint, submit requests from any thread, read what they give."""

from __future__ import annotations

import atexit
import itertools
import logging
import numbers
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from trivet.capacity import Limits
from trivet.errors import ConfigError, RequestRejected, RuntimeDown, TrivetError
from trivet.layout import AllocationMeter
from trivet.plugin.manager import PluginManager
from trivet.reservation import MemoryLedger
from trivet.runtime.blueprint import draw_blueprint
from trivet.runtime.device import current, resolve_device
from trivet.runtime.engine import Engine
from trivet.runtime.fault import release_locals
from trivet.runtime.handle import Request, TokenReader
from trivet.runtime.load import load_engine
from trivet.runtime.locate import locate_checkpoint
from trivet.runtime.options import WEIGHT_SOURCES, SizingOptions
from trivet.runtime.output import RequestOutput, as_raised
from trivet.runtime.prompt import Prompt, check_length, checked_ids, prompt_ids
from trivet.runtime.results import Completion
from trivet.runtime.step import StepReport
from trivet.runtime.stream import Arrivals, AsyncTokenStream, TokenStream
from trivet.sampling.logprobs import TokenLogprob
from trivet.sampling.params import LOGPROBS_MAX, Sampling
from trivet.scheduler.request import Kind
from trivet.scheduler.request import Request as ScheduledRequest
from trivet.text.chat import ChatTemplate
from trivet.text.detokenizer import StreamDecoder
from trivet.text.tokenizer import Tokenizer
from trivet.weights.loader import Progress

logger = logging.getLogger("trivet.runtime")

IDLE_WAIT_S = 0.05

Value = TypeVar("Value")


class Runtime:
    """A loaded model that serves requests. Made by `Runtime.load`; use it as a context manager, or call `close`.

    With ``autostart`` (the default) a thread of the runtime's own steps while there is work. Without it the caller
    drives: `step`, `run_until_idle`, or any call that waits for a result.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        plugins: PluginManager,
        meter: AllocationMeter,
        *,
        autostart: bool,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._engine = engine
        self._plugins = plugins
        self._meter = meter
        self._ids = itertools.count()
        self._steps = threading.Lock()
        self._stepping_thread = 0  # the thread that holds `_steps`
        self._observing = threading.RLock()  # an observer may step, too
        self._wake = threading.Condition()
        self._closing = False
        self._down: RuntimeDown | None = None
        self._device = engine.inputs.device
        self._cuda_baseline = _cuda_allocations(self._device)
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        if autostart:
            # An interpreter that ends while the thread is inside torch would abort.
            atexit.register(self.close)
            self._thread = threading.Thread(target=self._loop, name="trivet-runtime", daemon=True)
            self._thread.start()

    @classmethod
    def load(
        cls,
        checkpoint: str | os.PathLike[str],
        *,
        device: str | None = None,
        dtype: str | None = None,
        limits: Limits | None = None,
        kv_pages: int | None = None,
        memory_fraction: float = 0.9,
        prefix_cache: bool = True,
        snapshot_stride: int | None = None,
        numeric_policy: str = "tuned",
        snapshot_bytes: int | None = None,
        cuda_graphs: bool = True,
        weights: str = "checkpoint",
        attention: str | None = None,
        seed: int = 0,
        autostart: bool = True,
        progress: Progress | None = None,
        observers: Sequence[object] = (),
    ) -> Runtime:
        """Load a checkpoint and make it ready to serve.

        Args:
            checkpoint: directory with config.json, \\*.safetensors and, for text, tokenizer.json; or ``"tiny-qwen3"``,
                ``"tiny-qwen35"``; or with random weights a published geometry, as in ``"qwen3-14b"``.
            device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``; None picks CUDA if there is one.
            dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; None takes the checkpoint's.
            limits: how much may be asked at once; None takes defaults for the device.
            kv_pages: an exact number of pages; None takes what the memory budget leaves (on a CPU at most
                ``max_requests * ceil(max_context / page_size)``).
            memory_fraction: of the device's memory, for the whole runtime.
            prefix_cache: whether prompts may start from what earlier ones left.
            snapshot_stride: hybrid families: tokens between prefix-cache snapshots, a multiple of the page size.
            numeric_policy: ``"tuned"``, or ``"pinned"`` for results that do not depend on the batch.
            snapshot_bytes: hybrid families: budget of the snapshot pool; 0 turns hybrid prefix caching off.
            cuda_graphs: whether decode steps may be captured.
            weights: ``"checkpoint"``, or ``"random"`` for seeded weights from config.json alone.
            attention: backend name; None lets predicates choose.
            seed: of requests without a seed of their own, and of random weights.
            autostart: whether a thread steps by itself.
            progress: called with the bytes that are ready and their total: weights, from files or drawn, and on CUDA
                the reserve of captured steps, an equal part with each.
            observers: objects with implementations of the hook ``trivet_observe_step``, called beside those of
                installed plugins for the steps of this runtime.

        Raises:
            ConfigError, CapacityExceeded, MemoryBudgetError: a setting that cannot be served; nothing is allocated.
            CheckpointError: files that do not hold what config.json promises.
            PluginError: no working plugin serves the model type.
        """
        if weights not in WEIGHT_SOURCES:
            raise ConfigError(f"weights is {weights!r}, expected one of {', '.join(WEIGHT_SOURCES)}")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise ConfigError(f"seed is {seed!r}, expected an integer")
        if not isinstance(autostart, bool):
            raise ConfigError(f"autostart is {autostart!r}, expected True or False")
        if progress is not None and not callable(progress):
            raise ConfigError(f"progress is {progress!r}, expected a function of two numbers of bytes, or None")
        if not isinstance(observers, Sequence) or isinstance(observers, str):
            raise ConfigError(f"observers is {observers!r}, expected a list of objects with a step hook")
        options = SizingOptions(
            dtype=dtype,
            limits=limits,
            kv_pages=kv_pages,
            memory_fraction=memory_fraction,
            prefix_cache=prefix_cache,
            snapshot_stride=snapshot_stride,
            snapshot_bytes=snapshot_bytes,
            numeric_policy=numeric_policy,
            cuda_graphs=cuda_graphs,
            attention=attention,
        )
        directory = locate_checkpoint(checkpoint, with_weights=weights == "checkpoint")
        torch_device, profile = resolve_device(device)
        plugins = PluginManager.discover().observed_by(observers)
        with current(torch_device):
            blueprint = draw_blueprint(directory, options, profile, plugins)
        tokenizer = Tokenizer.load(directory)
        template = ChatTemplate.load(directory)
        meter = AllocationMeter()
        try:
            engine = load_engine(
                blueprint, torch_device, meter, random_weights=weights == "random", seed=seed, progress=progress
            )
        except BaseException as error:
            release_locals(error)
            raise
        return cls(engine, tokenizer, template, plugins, meter, autostart=autostart)

    # Asking for tokens.

    def generate(
        self, prompts: str | Iterable[Prompt], sampling: Sampling | Iterable[Sampling] | None = None
    ) -> list[Completion]:
        """Generate for all `prompts` at once and wait for them.

        Args:
            prompts: each is text or token ids.
            sampling: one for all, or one for each.

        Raises:
            RequestRejected: a prompt or its sampling cannot be served; none was submitted.
            RuntimeDown: the runtime was closed or its device failed.
        """
        self._check_up()
        given: list[Prompt] = [prompts] if isinstance(prompts, str) else _listed(prompts, "prompts")
        samplings = _one_for_each(sampling, len(given))
        prepared = [
            self._prepare(self._prompt_ids(prompt), each) for prompt, each in zip(given, samplings, strict=True)
        ]
        return self._finish(prepared)

    def chat(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling | None = None) -> Completion:
        """Render the checkpoint's chat template over `messages` and generate the answer.

        Args:
            messages: ``{"role": ..., "content": ...}``, oldest first.

        Raises:
            RequestRejected: the messages do not fit the template, or there is no template or tokenizer.
        """
        ids = self.chat_ids(messages)
        return self._finish([self._prepare(ids, sampling)])[0]

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt that `chat` would use for `messages`, as token ids."""
        if self.tokenizer is None or self.chat_template is None:
            missing = "tokenizer.json" if self.tokenizer is None else "chat template"
            raise RequestRejected(f"the checkpoint has no {missing}: pass token ids or plain text to generate")
        text = self.chat_template.render(messages)
        check_length(text, self.tokenizer, self._engine.blueprint.capacity.limits.max_context)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return checked_ids(ids, self._engine.blueprint.geometry.vocab_size)

    def score(self, token_ids: Prompt, top: int = 0) -> list[TokenLogprob]:
        """Log-probabilities of a sequence under the model.

        Args:
            token_ids: the sequence.
            top: alternatives to report at each position, at most 4096.

        Returns:
            ``len(token_ids) - 1`` entries; entry *i* is about token *i + 1* given tokens 0 to *i*. Natural logarithm.
        """
        if not isinstance(top, numbers.Integral) or isinstance(top, bool) or not 0 <= top <= LOGPROBS_MAX:
            raise RequestRejected(f"top is {top!r}, expected an integer from 0 to {LOGPROBS_MAX}")
        ids = self._prompt_ids(token_ids)
        request = self._scheduled(ids, None, "score", 0)
        output = RequestOutput(score_top=int(top))
        self._serve([(request, output)])
        if output.error is not None:
            raise as_raised(output.error)
        return output.score

    def stream(self, prompt: Prompt, sampling: Sampling | None = None) -> TokenStream:
        """Generate for one prompt, a token at a time. Closing the iterator cancels the request.

        Raises:
            RequestRejected: the prompt or its sampling cannot be served.
        """
        request, output = self._prepare(self._prompt_ids(prompt), sampling)
        handle = self._submit(request, output)
        return TokenStream(handle, output, self._reader(output), None if self._thread else self.step)

    def astream(self, prompt: Prompt, sampling: Sampling | None = None) -> AsyncTokenStream:
        """As `stream`, for asyncio. Cancelling the reader cancels the request."""
        arrivals = Arrivals()
        request, output = self._prepare(self._prompt_ids(prompt), sampling, arrivals.notify)
        handle = self._submit(request, output)
        drive = None if self._thread else self.step
        return AsyncTokenStream(handle, output, self._reader(output), arrivals, drive)

    def submit(self, prompt: Prompt, sampling: Sampling | None = None) -> Request:
        """Queue one prompt and return at once. May be called from any thread.

        Raises:
            RequestRejected: the prompt or its sampling cannot be served; nothing was changed.
        """
        return self._submit(*self._prepare(self._prompt_ids(prompt), sampling))

    # Driving.

    def step(self) -> StepReport:
        """Advance by one step; with nothing to do it returns at once.

        Raises:
            RuntimeDown: the runtime was closed or its device failed.
        """
        return self._step(overlap=False)

    def _step(self, *, overlap: bool) -> StepReport:
        """One step of the engine; the last that ended with it, or an idle one.

        Args:
            overlap: leave the launched step in flight; see `Engine.step`.
        """
        self._check_not_within("step")
        with self._steps:
            self._stepping_thread = threading.get_ident()
            try:
                self._check_up()
                reports = self._engine.step(overlap=overlap)
            finally:
                self._stepping_thread = 0
                fatal = self._engine.fatal
                if fatal is not None:
                    self._go_down(_unusable(fatal), fatal)
        with self._observing:
            for report in reports:
                self._plugins.observe_step(report)
        return reports[-1] if reports else StepReport()

    def run_until_idle(self) -> None:
        """Step until no request is waiting or running.

        Raises:
            RuntimeDown: the runtime was closed or its device failed.
        """
        self._check_up()
        while self._engine.has_work:
            self._check_waiting()
            if self._thread is None:
                self.step()
            else:
                self._check_up()
                with self._wake:
                    self._wake.wait(IDLE_WAIT_S)

    # Looking.

    @property
    def memory(self) -> MemoryLedger:
        """The memory ledger: what is reserved, line by line."""
        return self._engine.blueprint.ledger

    def stats(self) -> dict[str, Any]:
        """Counters, all integers but ``prefix_hit_rate``; see sdk_docs/runtime.md for each.

        Raises:
            RuntimeDown: the runtime was closed or its device failed.
        """
        self._check_up()
        counters: dict[str, Any] = self._engine.counters()
        counters["observers_failed"] = self._plugins.failed_observers
        looked_up = counters["prefix_prompt_tokens"]
        counters["prefix_hit_rate"] = counters["prefix_hit_tokens"] / looked_up if looked_up else 0.0
        cuda = _cuda_allocations(self._device)
        counters["device_allocations"] = self._meter.allocations if cuda is None else cuda - (self._cuda_baseline or 0)
        return counters

    def explain_paths(self) -> dict[str, str]:
        """For each attention geometry, the decode path that serves it and why."""
        selections = self._engine.blueprint.selections
        return {a.label: f"{chosen.path.name}: {chosen.reason}" for a, chosen in selections.items()}

    def close(self) -> None:
        """End open requests with `RuntimeDown`, stop the thread and release all memory. Idempotent.

        Raises:
            TrivetError: the caller interrupted a call of this runtime on its own thread, as a signal handler does.
        """
        if self._forked:
            return  # thread, memory and locks that the thread may hold are the parent's
        self._check_not_within("close")
        atexit.unregister(self.close)
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._steps:
            self._go_down("the runtime was closed")
            try:
                self._engine.close()
            except Exception:
                if self._engine.fatal is None:
                    raise
                logger.exception("a runtime whose device was lost could not release all of its memory")

    def __enter__(self) -> Runtime:
        self._check_up()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Within.

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        blueprint = self._engine.blueprint
        return prompt_ids(prompt, self.tokenizer, blueprint.geometry.vocab_size, blueprint.capacity.limits.max_context)

    def _prepare(
        self, ids: list[int], sampling: Sampling | None, listener: Callable[[], None] | None = None
    ) -> tuple[ScheduledRequest, RequestOutput]:
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise RequestRejected(f"sampling is {sampling!r}, expected a trivet.Sampling")
        request = self._scheduled(ids, sampling, "generate", sampling.max_new_tokens)
        decoder = None
        if sampling.stop:
            if self.tokenizer is None:
                raise RequestRejected(
                    "sampling field 'stop' has strings, and the checkpoint has no tokenizer.json: use stop_token_ids"
                )
            decoder = StreamDecoder(self.tokenizer, sampling.stop)
        return request, RequestOutput(decoder, listener=listener)

    def _scheduled(
        self, ids: list[int], sampling: Sampling | None, kind: Kind, max_new_tokens: int | None
    ) -> ScheduledRequest:
        self._check_up()
        allowed = self._engine.scheduler.gate.check(len(ids), max_new_tokens, kind)
        request = ScheduledRequest(next(self._ids), ids, allowed, kind=kind, sampling=sampling)
        self._engine.scheduler.prepare(request)
        return request

    def _submit(self, request: ScheduledRequest, output: RequestOutput) -> Request:
        with self._engine.lock:
            self._check_up()
            self._engine.submit(request, output)
        try:
            self._awake()
            drive = None if self._thread else self.step
            return Request(request, output, self._cancel, self._decoder, drive, self._check_waiting)
        except BaseException:  # an interrupt, before anybody holds the request
            self._cancel(request)
            raise

    def _cancel(self, *requests: ScheduledRequest) -> None:
        if self._down is None:
            self._engine.cancel(*requests)
            self._awake()

    def _decoder(self) -> StreamDecoder | None:
        return StreamDecoder(self.tokenizer) if self.tokenizer is not None else None

    def _reader(self, output: RequestOutput) -> TokenReader:
        return TokenReader(None if output.stop_decoder is not None else self._decoder())

    def _finish(self, prepared: Sequence[tuple[ScheduledRequest, RequestOutput]]) -> list[Completion]:
        return [handle.completion for handle in self._serve(prepared)]

    def _serve(self, prepared: Sequence[tuple[ScheduledRequest, RequestOutput]]) -> list[Request]:
        """Submit all and wait until they are done, stepping if no thread does; cancels them if it is interrupted."""
        try:
            handles = [self._submit(request, output) for request, output in prepared]
            for handle in handles:
                while not handle.done:
                    if self._thread is None:
                        self.step()
                    else:
                        handle.wait()
        except BaseException:
            self._cancel(*(request for request, _ in prepared))
            raise
        return handles

    def _awake(self) -> None:
        if self._thread is not None:
            with self._wake:
                self._wake.notify_all()

    def _loop(self) -> None:
        overlap = self._device.type == "cuda"  # a CPU computes a step while it is launched
        while True:
            with self._wake:
                while not self._closing and not self._engine.has_work:
                    self._wake.wait()
                if self._closing:
                    return
            try:
                report = self._step(overlap=overlap)
            except RuntimeDown:
                return
            except BaseException as error:
                logger.exception("the runtime's thread failed")
                with self._steps:
                    self._go_down(f"the runtime's thread failed: {type(error).__name__}: {error}", error)
                return
            if report.path == "idle" and not self._engine.busy:
                with self._wake:
                    self._wake.wait(IDLE_WAIT_S)

    def _go_down(self, why: str, cause: BaseException | None = None) -> None:
        """End every open request and refuse all others. The first reason stands."""
        if self._down is not None:
            return
        down = RuntimeDown(f"{why}; load a new runtime")
        down.__cause__ = cause
        self._down = down  # before the requests end, so that none is submitted behind them
        self._engine.end_all(down)

    @property
    def _forked(self) -> bool:
        """Whether this is a fork of the process whose thread steps: nobody steps here."""
        return self._thread is not None and os.getpid() != self._process

    def _check_not_within(self, call: str) -> None:
        """Refuse what would wait for the very call that it interrupted."""
        if self._stepping_thread == threading.get_ident() or self._engine.changing_here:
            raise TrivetError(
                f"{call}() was called within another call of this runtime on the same thread, by a signal handler for "
                "instance, and would wait for it for ever: set a flag there, or use asyncio's add_signal_handler"
            )

    def _check_waiting(self) -> None:
        """Refuse to wait where nobody steps, and on the thread that steps."""
        self._check_process()
        if self._thread is threading.current_thread():
            raise TrivetError(
                "this thread makes the steps, and an observer that waits for one waits for ever: call from another "
                "thread"
            )

    def _check_process(self) -> None:
        if self._forked:
            raise RuntimeDown(
                "this process was forked from the one that loaded the runtime, whose thread stayed there; start "
                "processes by 'spawn' and load a runtime in each (torch's own threads do not survive a fork either)"
            )

    def _check_up(self) -> None:
        self._check_process()
        if self._down is not None:
            raise RuntimeDown(str(self._down)) from self._down.__cause__
        fatal = self._engine.fatal
        if fatal is not None:  # the next step takes it down
            raise RuntimeDown(f"{_unusable(fatal)}; load a new runtime") from fatal


def _unusable(fault: BaseException) -> str:
    return f"a fault left the runtime unusable: {type(fault).__name__}: {fault}"


def _listed(values: Iterable[Value], name: str) -> list[Value]:
    if isinstance(values, Mapping | set | frozenset):  # the keys of one, in no order that was asked for of the others
        raise RequestRejected(f"{name} is {type(values).__name__}, expected one value or a list of them")
    try:
        return list(values)
    except TypeError as error:
        raise RequestRejected(f"{name} is {values!r}, expected one value or a list of them") from error


def _one_for_each(sampling: Sampling | Iterable[Sampling] | None, count: int) -> list[Sampling]:
    if sampling is None:
        return [Sampling()] * count
    if isinstance(sampling, Sampling):
        return [sampling] * count
    if isinstance(sampling, Mapping):
        raise RequestRejected(f"sampling is {sampling!r}, expected a trivet.Sampling, or one for each prompt")
    samplings = _listed(sampling, "sampling")
    if len(samplings) != count:
        raise RequestRejected(f"{len(samplings)} samplings for {count} prompts: expected one, or one for each")
    return samplings


def _cuda_allocations(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int(torch.cuda.memory_stats(device)["allocation.all.allocated"])
