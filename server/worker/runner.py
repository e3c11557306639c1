"""Runs steps on one device: what a plan changes goes there, what it brings comes back."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from connectors.base import ConnectorWorker, Finished, TransferPlan
from proposers.base import HostProposer, Proposer
from proposers.chain import Arrangement
from server.model.head import LMHead
from server.plan import PlanRow, StepPlan, StepResult
from server.worker.batch import BatchState
from server.worker.buckets import Bucket, Buckets
from server.worker.drafting import Drafting
from server.worker.flight import Flight, Flights
from server.worker.generation import NUM_COUNTS, Generation
from server.worker.graphs import StepGraphs
from server.worker.guided import GuidedRows
from server.worker.host_drafts import HostDrafting
from server.worker.layout import lay_out, lay_out_decoding
from server.worker.logits import LogitsProcessor
from server.worker.logprobs import LogprobTensors, prompt_logprobs
from server.worker.rejection import Acceptance
from server.worker.results import StepHandle, StepOutputs
from server.worker.slot_info import SlotInfo
from server.worker.step_inputs import StepInputs
from server.worker.target import Target, TargetOutputs
from server.worker.token_masks import StandingMasks
from server.worker.transfer import Transfer
from server.worker.transfers import Transfers

MIN_UPLOAD_NBYTES = 1 << 20
"""Room for a step's uploads besides the longest prompt; what does not fit takes memory of its own."""


_LAYOUT_KEY = itemgetter(
    *map(PlanRow._fields.index, ("slot", "seq_id", "epoch", "num_query", "num_drafts", "is_sampling"))
)
"""What the layout of a captured step depends on in a row; which tokens it is about, the device knows."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """A step's layout by the number of drafts to propose, and the bytes it takes in the device buffer.

    Reusable are those of captured steps.
    """

    key: list[Any]
    inputs: StepInputs
    nbytes: int
    is_reusable: bool
    _variants: dict[int, StepInputs] = field(default_factory=dict)

    def drafting(self, num_proposed: int) -> StepInputs:
        """The layout for so many drafts."""
        if num_proposed not in self._variants:
            self._variants[num_proposed] = self.inputs.drafting(num_proposed)
        return self._variants[num_proposed]


class Runner:
    """Implements plan.Executor; owns `batch`, `kv` and `slots`, used from the step thread only.

    `launch` queues a whole step on the device without waiting for it: what depends on generated
    tokens (positions, accepted drafts, new drafts) is computed there. Its device part is `step`, or the
    same captured.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head: LMHead,
        kv: Tensor,
        *,
        num_slots: int,
        max_tokens: int,
        proposers: Sequence[Proposer | HostProposer],
        acceptance: Acceptance,
        connector: ConnectorWorker[Any] | None = None,
        fingerprint: str = "",
        on_compute: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        kv: see kv_tensors.allocate_kv.
        max_tokens: longest sequence, prompt and output together.
        proposers: each row's drafts are from the first that has some; none is no speculation.
        connector: moves blocks in and out. fingerprint: hex, of the KV that may be exchanged.
        on_compute: called in `launch` where the model's forward pass begins, which on the CPU takes most of a step and
            leaves the interpreter to others.
        """
        arranged = Arrangement.of(proposers, head.vocab_size)
        on_device, max_drafts = arranged.on_device, arranged.num_speculative_tokens
        vocabulary = None if on_device is None else on_device.vocabulary
        self.kv = kv
        self.max_tokens = max_tokens
        self.max_drafts = max_drafts
        self.num_device_drafts = 0 if on_device is None else on_device.num_speculative_tokens
        self._head = head
        self._transfer = Transfer(kv.device)
        self.batch = BatchState(num_slots, max_tokens, kv.shape[3], max_drafts, kv.device, vocabulary)
        self._buckets = Buckets(spare_slot=num_slots, max_query=1 + max_drafts, max_context=max_tokens)
        self._graphs: StepGraphs | None = None
        self._standing_masks: StandingMasks | None = None
        # A graph that drafts will do for steps that should not, unless that costs the work of a network.
        is_network = bool(arranged.readers) or getattr(on_device, "needs_hidden", False)
        self._captured_drafts = [0] if on_device is None else [0, max_drafts] if is_network else [max_drafts]
        self._is_second_captured = on_device is None or on_device.runs_on_device
        self._host_drafting = None
        if arranged.on_host:
            are_alone = on_device is None
            self._host_drafting = HostDrafting(arranged.on_host, self.batch, head.vocab_size, are_alone=are_alone)
        self._guided = GuidedRows(head.vocab_size)
        self._logits_processor = LogitsProcessor(self.batch, head.vocab_size, self._transfer)
        self._drafting = Drafting(self.batch, on_device, arranged.followers, max_tokens=max_tokens)
        self._target = Target(model, kv, self.batch, self._drafting.tapped, on_compute)
        for reader in arranged.readers:
            reader.bind(self.batch.memory(num_blocks=kv.shape[0], block_size=kv.shape[3]))
        self._transfers = None
        if connector is not None:
            self._transfers = Transfers(connector, model.base_model, kv, fingerprint, arranged.followers)
        self._generation = Generation(
            self.batch, head, self._logits_processor, self._drafting, acceptance, vocabulary, max_drafts=max_drafts
        )
        num_results = num_slots * (1 + NUM_COUNTS + 3 * (1 + max_drafts))
        self._flights = Flights(kv.device, MIN_UPLOAD_NBYTES + 4 * max_tokens, num_results)
        self.slots: dict[int, SlotInfo] = {}
        self._standing: _Layout | None = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Queue a step on the device."""
        with nullcontext() if self._transfers is None else self._transfers.step(plan.transfers):
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> StepHandle:
        for start in plan.starts:
            self.slots[start.slot] = SlotInfo.of(start)
            self._logits_processor.start(start.slot, start.request)
            self._guided.start(start)
            if self._host_drafting is not None:
                self._host_drafting.start(start)
        flight = self._flights.begin()
        standing = self._lay_out(plan, flight)
        is_drafting = plan.num_proposed > 0 and any(self.slots[row.slot].is_drafting for row in plan.rows)
        inputs = standing.drafting(plan.num_proposed if is_drafting else 0)
        if inputs.sampling is not None:
            pending = {} if self._host_drafting is None else self._host_drafting.pending
            inputs = inputs.masked(self._guided.stage(inputs.sampling.rows, pending, flight))
        changes = self.batch.stage(plan.starts, plan.rows, flight)
        drafts = None if self._host_drafting is None else self._host_drafting.stage(plan.rows, flight)
        self._standing = None
        flight.send()
        self._standing = standing
        self.batch.apply(changes)
        if self._host_drafting is not None and drafts is not None:
            self._host_drafting.apply(drafts)
        caught_up = self._drafting.begin(plan.starts, plan.rows, is_followed=is_drafting)
        outputs = self.step(inputs) if inputs.bucket is None else self._replay(inputs, inputs.bucket)
        return StepHandle(inputs, outputs, flight, self._transfer, proposes=plan.num_proposed > 0, caught_up=caught_up)

    def begin_transfers(self, transfers: TransferPlan) -> None:
        """Have a connector begin what it was ordered, without a step."""
        assert self._transfers is not None
        self._transfers.begin(transfers)

    def poll_transfers(self) -> tuple[Finished, frozenset[int]]:
        """What a connector has done since the last call, and which blocks it could not load."""
        assert self._transfers is not None
        return self._transfers.poll()

    def _lay_out(self, plan: StepPlan, flight: Flight) -> _Layout:
        """The layout of a plan; the last step's, which the device still has, if it decodes the same rows again."""
        if self._graphs is None:
            return _Layout([], lay_out(plan.rows, self.slots, self._buckets, flight), 0, is_reusable=False)
        last, key = self._standing, list(map(_LAYOUT_KEY, plan.rows))
        if last is not None and last.is_reusable and not plan.starts and key == last.key:
            flight.keep(last.nbytes)
            return last
        inputs = lay_out(plan.rows, self.slots, self._buckets, flight)
        is_captured = inputs.sampling is not None and inputs.sampling.is_captured
        return _Layout(key, inputs, flight.num_put, is_captured)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int]) -> None:
        """Capture the steps of decoding rows for batches of these sizes; from now on such steps are replayed.

        Before the first request: the spare slot and block 0 are written to. Args: sizes: ascending.
        """
        graphs = StepGraphs(self.kv.device)
        buckets = self._buckets.with_sizes(sizes, is_second_captured=self._is_second_captured)
        if self._is_second_captured:
            self._standing_masks = self._logits_processor.keep_masks(sizes[-1], buckets.max_query)
        for bucket in buckets:
            flight = self._flights.begin()
            inputs = lay_out_decoding((), self.slots, buckets, flight, bucket)
            flight.send()
            widths = self._captured_drafts if self._is_second_captured else ()
            seconds = {width > 0: partial(self._second, inputs.drafting(width)) for width in widths}
            graphs.capture(bucket, partial(self._target.forward, inputs), seconds)
            self._flights.give_back(flight)
        self._graphs, self._buckets = graphs, buckets

    def _second(self, inputs: StepInputs, target: TargetOutputs) -> StepOutputs:
        return StepOutputs.of(None, self._generation.generate(inputs, target), {})

    def _replay(self, inputs: StepInputs, bucket: Bucket) -> StepOutputs:
        """The same as `step` from captured segments, the second only where it does all that the rows ask for.

        Masks, which come late, are put between the two.
        """
        assert self._graphs is not None
        assert inputs.sampling is not None
        sampling, target = inputs.sampling, self._graphs.replay_first(bucket)
        if not sampling.is_captured:
            return self._second(inputs, target)
        assert self._standing_masks is not None
        self._standing_masks.put(sampling.masks)
        outputs = self._graphs.replay_second(bucket, drafts=inputs.is_followed)
        if sampling.masks is None or not self.num_device_drafts:
            return outputs
        return outputs.with_next_drafts(self._generation.next_drafts(sampling.slots))

    def step(self, inputs: StepInputs) -> StepOutputs:
        """The device's part of a step, a function of `inputs` and the batch state alone; uploads nothing."""
        target = self._forward(inputs)
        prompt = self._prompt_logprobs(inputs, target.hidden)
        return StepOutputs.of(target.is_broken, self._generation.generate(inputs, target), prompt)

    def _forward(self, inputs: StepInputs) -> TargetOutputs:
        if self._transfers is None or inputs.known_row is None:  # all rows decode, as captured steps do
            return self._target.forward(inputs)
        with self._transfers.between_layers():
            return self._target.forward(inputs)

    def settle(self, handle: StepHandle) -> StepResult:
        """Wait for a launched step."""
        result = handle.settle()
        self._guided.settle(handle.rows, result.rows, handle.next_drafts())
        self._flights.give_back(handle.flight)
        self._drafting.settle(handle.rows, result.rows)
        if self._host_drafting is None:
            return result
        return self._host_drafting.advance(handle.rows, result, proposes=handle.proposes)

    def _prompt_logprobs(self, inputs: StepInputs, hidden: Tensor) -> dict[int, LogprobTensors]:
        """Log probabilities of the prompt tokens that follow each computed one."""
        found: dict[int, LogprobTensors] = {}
        for i, row in enumerate(inputs.rows):
            if row.num_prompt_logprobs is None:
                continue
            start = row.context_bound - row.num_query
            end = min(row.context_bound, self.slots[row.slot].num_prompt - 1)
            if end <= start:
                continue  # planned before the prompt's last chunk had settled
            first = inputs.first_tokens[i]
            targets = self.batch.token_ids[row.slot, start + 1 : end + 1].long()
            found[i] = prompt_logprobs(
                self._head, hidden[first : first + end - start], targets, row.num_prompt_logprobs
            )
        return found
