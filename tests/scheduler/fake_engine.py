"""An engine without arithmetic whose caches can be checked: every entry says which tokens it was computed from.

In place of keys and values, a page holds for each position the fingerprint of all tokens up to it; in place of a
recurrent state, a slot holds the fingerprint of all tokens that went through it. A page or a state that reaches
the wrong row therefore shows at once, whatever way it took. Where prompts are cut on a grid, new tokens leave other
fingerprints than the same tokens in a prompt, as they leave other bits in a recurrent state.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from attrs import define, field

from trivet.attention.batch import check_batch
from trivet.caches.node import PrefixNode
from trivet.caches.pages import PagePool
from trivet.caches.prefix import PrefixCache
from trivet.caches.slots import SlotPool
from trivet.capacity import Limits, PlanCapacity, TileShape
from trivet.config.rope import Rope
from trivet.geometry import AttentionGeometry
from trivet.scheduler import Ending, Request, Scheduler, Status, StepPlan

VOCABULARY = 97
EMPTY = 1
POISON = -1


def fingerprint(before: int, token: int) -> int:
    """Fingerprint of a context that goes on with `token`."""
    return (before * 1_000_003 + token + 17) % (2**61 - 1)


def decoded(token: int) -> int:
    """What `fingerprint` takes for a token that a decode row computes, where that leaves other bits than a prompt."""
    return token + VOCABULARY


def next_token(context: int) -> int:
    """The token that the pretended model gives after a context."""
    return context % VOCABULARY


def solo_run(prompt: Sequence[int], new_tokens: int, *, grid_tokens: int = 1) -> tuple[int, ...]:
    """The tokens that a request gets when nothing else is served."""
    context = EMPTY
    for token in prompt:
        context = fingerprint(context, token)
    answer = []
    for _ in range(new_tokens):
        answer.append(next_token(context))
        context = fingerprint(context, decoded(answer[-1]) if grid_tokens > 1 else answer[-1])
    return tuple(answer)


@define
class InFlight:
    """A step that was launched: what the device has made of it."""

    plan: StepPlan
    new_tokens: list[int]


@define(eq=False)
class World:
    """A scheduler with its pools, and the pretended device."""

    limits: Limits
    pool: PagePool
    slots: SlotPool
    prefix: PrefixCache | None
    snapshots: SlotPool | None
    scheduler: Scheduler
    recurrent: bool
    mixed: bool = True
    grid_tokens: int = 1
    requests: list[Request] = field(factory=list)
    in_flight: deque[InFlight] = field(factory=deque)
    steps: list[StepPlan] = field(factory=list)
    entries: dict[tuple[int, int], int] = field(factory=dict)
    states: dict[int, int] = field(factory=dict)
    saved: dict[int, int] = field(factory=dict)
    sampled: dict[Request, int] = field(factory=dict)
    poisoned: set[Request] = field(factory=set)
    capacity: PlanCapacity = field(init=False)

    def __attrs_post_init__(self) -> None:
        attention = AttentionGeometry(2, 1, 4, Rope(theta=1e4, rotary_dim=4))
        self.capacity = PlanCapacity(attention, self.limits, TileShape(1, 16))

    @classmethod
    def of(
        cls,
        limits: Limits,
        pages: int,
        *,
        prefix: bool = True,
        snapshots: int | None = None,
        grain_pages: int = 1,
        chunked: bool = True,
        mixed: bool = True,
        cuts_inside: bool = False,
        grid_tokens: int = 1,
    ) -> World:
        """A dense world, or with a number of snapshots a hybrid one."""
        pool, slots = PagePool(pages), SlotPool(limits.max_requests)
        ids = SlotPool(snapshots, "snapshot") if snapshots is not None else None
        grain = limits.page_size * (grain_pages if ids is not None else 1)
        cache = PrefixCache(pool, limits.page_size, grain, ids) if prefix else None
        scheduler = Scheduler(
            limits,
            pool,
            slots,
            prefix=cache,
            recurrent=ids is not None,
            chunked_prefill=chunked,
            mixed_steps=mixed,
            cuts_inside=cuts_inside,
            grid_tokens=grid_tokens,
        )
        return cls(limits, pool, slots, cache, ids, scheduler, ids is not None, mixed, grid_tokens)

    def submit(self, prompt: Sequence[int], max_new_tokens: int | None = 1, kind: str = "generate") -> Request:
        """Pass the gate and queue."""
        resolved = self.scheduler.gate.check(len(prompt), max_new_tokens, kind)  # type: ignore[arg-type]
        request = Request(len(self.requests), prompt, resolved, kind=kind)  # type: ignore[arg-type]
        self.scheduler.submit(request)
        self.requests.append(request)
        return request

    def launch(self) -> StepPlan | None:
        """Schedule a step and let the device compute it."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.steps.append(plan)
            self.in_flight.append(InFlight(plan, self._compute(plan)))
        return plan

    def land(
        self,
        *,
        endings: Callable[[Request], Ending | None] = lambda request: None,
        error: BaseException | None = None,
    ) -> list[Request]:
        """Complete, or with `error` fail, the oldest step in flight."""
        step = self.in_flight.popleft()
        if error is not None:
            return self.scheduler.fail(step.plan, error)
        sampling = [step.plan.requests[row] for row in step.plan.sampling_rows]
        chosen = {request: ending for request in sampling if (ending := endings(request)) is not None}
        return self.scheduler.complete(step.plan, step.new_tokens, chosen)

    def step(self, **how: object) -> StepPlan | None:
        """Launch a step and land it."""
        plan = self.launch()
        if plan is not None:
            self.land(**how)  # type: ignore[arg-type]
        return plan

    def drain(self, audited: bool = False) -> int:
        """Serve until nothing is left; returns the number of steps."""
        steps = 0
        while self.scheduler.has_work:
            assert self.step() is not None, "there is work, and no step comes of it"
            steps += 1
            if audited:
                audit(self)
        return steps

    def serve(self, prompt: Sequence[int], max_new_tokens: int = 1, kind: str = "generate") -> Request:
        """Submit one request and serve until nothing is left."""
        request = self.submit(prompt, max_new_tokens, kind)
        self.drain()
        return request

    def _compute(self, plan: StepPlan) -> list[int]:
        self._check(plan)
        for snapshot, slot in plan.restores:
            self.states[slot] = self.saved[snapshot]
        for slot in plan.clears:
            self.states[slot] = EMPTY
        ids = plan.token_ids().tolist()
        batch = plan.batch(2, 1)
        last = []
        offset = 0
        for row, (request, start, tokens) in enumerate(zip(plan.requests, plan.starts, plan.lengths, strict=True)):
            pages = batch.page_indices[batch.page_indptr[row] : batch.page_indptr[row + 1]].tolist()
            inputs = ids[offset : offset + tokens]
            offset += tokens
            if row in plan.carried_rows:
                inputs = [self.sampled[request]]
            cuts = {start + cut.tokens: cut.snapshot for cut in plan.cuts if cut.row == row}
            last.append(self._row(request, pages, start, inputs, cuts))
        for slot, snapshot in plan.saves:
            self.saved[snapshot] = self.states[slot]
        new_tokens = []
        for row in plan.sampling_rows:
            self.sampled[plan.requests[row]] = next_token(last[row])
            new_tokens.append(next_token(last[row]))
        return new_tokens

    def _row(self, request: Request, pages: list[int], start: int, inputs: list[int], cuts: dict[int, int]) -> int:
        size = self.limits.page_size
        before = list(request.tokens[:start]) + [self.sampled.get(request, 0)] * (start - len(request.tokens))
        context = EMPTY
        for position, token in enumerate(before):
            context = fingerprint(context, self._mark(request, position, token))
            found = self.entries.get((pages[position // size], position % size))
            if request not in self.poisoned:
                assert found == context, f"{request!r} reads a page that holds another context at {position}"
        if self.recurrent and request not in self.poisoned:
            assert self.states[request.slot] == context, f"{request!r} goes on from another request's state"
        for position, token in enumerate(inputs, start):
            context = fingerprint(context, self._mark(request, position, token))
            if request in self.poisoned:
                context = POISON
            self.entries[pages[position // size], position % size] = context
            if position + 1 in cuts:
                self.saved[cuts.pop(position + 1)] = context
        assert not cuts, f"{request!r}: snapshots are wanted at {cuts}, outside its piece"
        self.states[request.slot] = context
        return context

    def _mark(self, request: Request, position: int, token: int) -> int:
        return decoded(token) if self.grid_tokens > 1 and position >= request.prompt_tokens else token

    def _check(self, plan: StepPlan) -> None:
        batch = plan.batch(2, 1)
        check_batch(batch, self.capacity, 0)
        assert len(set(plan.requests)) == len(plan.requests), "a request has two rows in one step"
        assert len(set(plan.slots.tolist())) == len(plan.requests), "two rows share a slot"
        assert all(tokens > 0 for tokens in plan.lengths)
        for row in plan.rows:
            prompt = row.request.prompt_tokens
            assert (row.kind == "decode") == (row.start >= prompt)
            end = row.start + row.tokens
            assert row.kind == "decode" or end <= prompt
            assert row.kind == "decode" or end == prompt or not end % self.grid_tokens
            assert row.samples == (row.request.kind == "generate" and row.start + row.tokens >= prompt)
        if not self.mixed:
            assert plan.path != "mixed"
        for cut in plan.cuts:
            assert plan.decode_rows <= cut.row and 0 < cut.tokens < plan.lengths[cut.row]


def audit(world: World) -> None:
    """Count everything again from what each owner holds, and compare with what the pools and counters say."""
    counters = world.scheduler.counters()
    running = world.scheduler.running
    prefix = world.prefix
    nodes: set[PrefixNode] = set()
    ends = [request.node for request in running if request.node is not None]
    if prefix is not None:
        for start in (*prefix._nodes.values(), *ends):
            node: PrefixNode | None = start
            while node is not None and node is not prefix.root:
                nodes.add(node)
                node = node.parent

    # Pages: each free, in one node, or one request's own.
    owned = [node.page for node in nodes]
    for request in running:
        shared = request.published_pages if request.node is not None else 0
        owned += [*request.pages[shared:], *request.duplicates]
    free = [page for page in range(world.pool.total) if world.pool.is_free(page)]
    assert sorted(owned + free) == list(range(world.pool.total)), "a page has two owners, or none"
    assert len(free) == counters["pages_free"]
    assert counters["pages_free"] + counters["pages_cached"] + counters["pages_held"] == counters["pages_total"]

    # Pins, and with them what is cached.
    pins = dict.fromkeys(nodes, 0)
    children = dict.fromkeys(nodes, 0)
    for node in ends:
        if node in pins:
            pins[node] += 1
    for node in sorted(nodes, key=lambda node: -node.depth):
        if node.parent in pins:
            children[node.parent] += 1
            pins[node.parent] += pins[node] > 0
    assert {node: node.pins for node in nodes} == pins
    assert {node: node.children for node in nodes} == children
    assert counters["pages_cached"] == sum(not count for count in pins.values())

    # Reservations: what every running request may still take is there to be taken.
    assert counters["pages_reserved"] == sum(request.reserved_pages for request in running)
    assert counters["pages_reserved"] <= counters["pages_free"] + counters["pages_cached"]
    for request in running:
        assert len(request.pages) + request.reserved_pages == request.lifetime_pages
        assert request.page_room_tokens == len(request.pages) * world.limits.page_size >= request.scheduled_tokens

    # Slots and snapshots.
    slots = [request.slot for request in running]
    assert sorted(slots + [s for s in range(world.slots.total) if world.slots.is_free(s)]) == [
        *range(world.slots.total)
    ]
    assert counters["slots_free"] == world.slots.total - len(slots)
    if world.snapshots is not None and prefix is not None:
        kept = [node.snapshot for node in nodes if node.snapshot is not None]
        lent = [save.snapshot for step in world.in_flight for save in step.plan.save_points]
        unused = [i for i in range(world.snapshots.total) if world.snapshots.is_free(i)]
        assert sorted([*kept, *lent, *unused]) == list(range(world.snapshots.total)), "a snapshot dangles, or leaks"
        for node in nodes:
            assert node.snapshot is None or not node.depth * prefix.page_size % prefix.grain_tokens
            waiting_to_restore = sum(request.restore_from is node for request in running)
            assert node.restores == waiting_to_restore
            assert node.snapshot is not None or not waiting_to_restore

    # Requests.
    requests = world.requests
    done = [request for request in requests if request.done]
    assert counters["requests_waiting"] == sum(request.status is Status.WAITING for request in requests)
    assert counters["requests_running"] == sum(request.status is Status.RUNNING for request in running)
    assert counters["requests_submitted"] == len(requests)
    assert counters["requests_finished"] == len(done)
    assert counters["requests_failed"] == sum(request.finish_reason == "error" for request in requests)
    assert counters["requests_cancelled"] == sum(request.finish_reason == "cancelled" for request in requests)
    assert counters["prefix_hit_tokens"] == sum(request.cached_tokens for request in requests)
    looked_up = [r for r in requests if r.admitted_s is not None and r.kind == "generate"]
    caching = prefix is not None and prefix.enabled
    assert counters["prefix_prompt_tokens"] == caching * sum(request.prompt_tokens for request in looked_up)
    assert counters["steps"] == len(world.steps)
    for request in done:
        if not request.in_flight:
            assert request not in running
            assert not request.pages and request.slot == -1 and not request.reserved_pages


def random_prompts(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    """Prompts of at most `longest` tokens, many of which begin alike."""
    stems = [[rng.randrange(VOCABULARY) for _ in range(longest)] for _ in range(2)]
    prompts = []
    for _ in range(count):
        shared = rng.randrange(longest + 1)
        own = rng.randrange(longest + 1 - shared)
        prompt = rng.choice(stems)[:shared] + [rng.randrange(VOCABULARY) for _ in range(own)]
        prompts.append(prompt or [0])
    return prompts
