"""Random traffic on nodes that exchange KV and hand requests on to each other."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from server.engine.protocol import FinishReason
from server.kv_handle import Continuation
from server.plan import StepPlan
from server.request import Request
from tests.fakes.fake_connector import FakeConnector, FakeStore
from tests.property.simulation import MAX_DRAIN_STEPS, Expected, Simulation


class ConnectedSimulation(Simulation):
    """A node with a connector; where it hands requests on to is `others`.

    Blocks are held by transfers for many steps, so that sequences wait longer than without them.
    """

    max_stalled_steps = 200
    max_waiting_steps = 600

    def __init__(self, seed: int, number: int, store: FakeStore, *, depth: int, policy: str) -> None:
        """Args: seed: nodes with the same one are alike. number: of the node, which tells its traffic."""
        rng = random.Random(f"{seed}/{number}")
        block_size = random.Random(seed).choice((1, 2, 4, 8))
        self.connector = FakeConnector(rng, store, block_size)
        super().__init__(
            seed,
            depth=depth,
            policy=policy,
            connector=self.connector,
            fails_on_bad_loads=random.Random(seed).random() < 0.2,
        )
        assert self.block_size == block_size
        self.rng = rng
        self.number = number
        self.connector.bind(self.core.executor, self.pool)
        self.others: list[ConnectedSimulation] = [self]
        self.num_handed_on = 0
        self._published: dict[bytes, tuple[int | None, ...]] = {}

    @property
    def is_over(self) -> bool:
        """Whether nothing runs, waits or is moved."""
        external = self.scheduler.external
        assert external is not None
        return not (self.scheduler.has_requests or self.launched or self.connector.is_busy or len(external.held))

    def step(self, *, has_traffic: bool) -> None:
        """One step of this node."""
        if has_traffic:
            self._traffic()
        self._step()

    # -- callers ---------------------------------------------------------------------------

    def _submit(self, request: Request) -> None:
        request = replace(request, request_id=f"{self.number}-{request.request_id}", hands_on=self.rng.random() < 0.4)
        super()._submit(request)

    def _end_choice(self, choice: Expected) -> None:
        request = choice.request
        siblings = self.live[request.request_id]
        super()._end_choice(choice)
        if request.request_id in self.live or not request.hands_on:
            return
        ends = [sibling.end for sibling in siblings]
        states = tuple(None if end is None else end.handed_on for end in ends)
        source = next((end.source for end in ends if end is not None and end.source is not None), None)
        if not any(states) or self.rng.random() < 0.1:
            self.scheduler.release(request.request_id)
            return
        self.num_handed_on += 1
        other = self.rng.choice(self.others)
        other.go_on(replace(request, hands_on=False, deadline_s=None, continuation=Continuation(states, source)))

    def _deliver(self, output: Any) -> None:
        if output.finish_reason is FinishReason.HANDED_ON:
            assert output.handed_on is not None
            choice = self.live[output.request_id][output.choice]
            assert output.handed_on.token_ids == tuple(choice.tokens)
        super()._deliver(output)

    def go_on(self, request: Request) -> None:
        """Take a request over from another node."""
        continuation = request.continuation
        assert continuation is not None
        request = replace(request, request_id=f"{request.request_id}+{self.number}", arrival_s=self.core.clock.now_s)
        choices = [Expected(request, index) for index in range(request.sampling.n)]
        for choice, state in zip(choices, continuation.choices, strict=True):
            if state is None:
                choice.is_over = True
            else:
                choice.tokens += state.token_ids
        self.live[request.request_id] = choices
        self.scheduler.add(request)

    # -- the engine's part -----------------------------------------------------------------

    def _step(self) -> None:
        finished, bad_blocks = self.connector.poll()
        if finished:
            self.scheduler.update_transfers(finished, bad_blocks)
        super()._step()

    def _launch(self, plan: StepPlan) -> Any:
        if plan.transfers is not None:
            self.connector.begin(plan.transfers)
        launched = super()._launch(plan)
        self.connector.end_step(has_run=not isinstance(launched, Exception))
        return launched

    def _begin_transfers(self) -> bool:
        external = self.scheduler.external
        assert external is not None
        transfers = external.plan()
        if transfers is not None:
            self.connector.begin(transfers)
        return transfers is not None or self.connector.is_busy

    # -- rules -----------------------------------------------------------------------------

    def _may_have_hits(self, request: Request) -> bool:
        return request.sampling.prompt_logprobs is None or request.continuation is not None

    def _held_by_others(self) -> Counter[int]:
        external = self.scheduler.external
        assert external is not None
        held = self.connector.held
        held.update(save.block_id for save in external.saves._ordered)
        for wish in external.loads._wishes.values():
            held.update(wish.held)
        return held

    def _check_blocks(self) -> None:
        super()._check_blocks()
        for block_hash, block_id in self.pool._block_of.items():
            cells = self.core.executor.block(block_id)
            assert self._published.setdefault(block_hash, cells) == cells, f"published block {block_id} has changed"


class Nodes:
    """Some nodes on one store."""

    def __init__(self, seed: int, *, depth: int, policy: str, num_nodes: int = 2) -> None:
        store = FakeStore()
        self.nodes = [
            ConnectedSimulation(seed, number, store, depth=depth, policy=policy) for number in range(num_nodes)
        ]
        for node in self.nodes:
            node.others = self.nodes

    def run(self, num_steps: int) -> None:
        """Random traffic for some steps, then none: everything ends, and all blocks are free."""
        for _ in range(num_steps):
            for node in self.nodes:
                node.step(has_traffic=True)
        for _ in range(MAX_DRAIN_STEPS):
            for node in self.nodes:
                node.step(has_traffic=False)
            if all(node.is_over for node in self.nodes):
                break
        for node in self.nodes:
            self._check_end(node)

    def _check_end(self, node: ConnectedSimulation) -> None:
        assert node.is_over, "the rest never ends"
        assert node.live == {}
        external = node.scheduler.external
        assert external is not None
        loads, saves = external.loads, external.saves
        assert not any((loads._wishes, loads._loads, loads._coming, saves._leases, saves._handed_on, saves._queued))
        assert len(external.held) == 0
        assert node.pool.num_free == node.pool.num_usable
        node.scheduler.check_integrity()
