"""Runs steps on one device: the model's forward, sampling and verification, drafting."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from proposers.base import ProposeInput, Proposer
from server.model.attention import AttentionStep
from server.model.head import LMHead
from server.plan import StepPlan, StepResult
from server.worker.batch import BatchState
from server.worker.logits import LogitsProcessor
from server.worker.logprobs import LogprobTensors, chosen_logprobs, prompt_logprobs
from server.worker.results import SampledTensors, StepHandle, StepTensors
from server.worker.sampler import Drafts, Sampler
from server.worker.step_inputs import SamplingRows, SlotInfo, StepInputs, lay_out
from server.worker.transfer import Transfer


class Runner:
    """Implements plan.Executor; owns `batch`, `kv` and `slots`, used from the step thread only.

    `launch` queues a whole step on the device without waiting for it: what depends on generated
    tokens (positions, accepted drafts, new drafts) is computed there.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head: LMHead,
        kv: Tensor,
        *,
        num_slots: int,
        max_tokens: int,
        proposer: Proposer | None,
    ) -> None:
        """Args: kv: see kv_tensors.allocate_kv. max_tokens: longest sequence, prompt and output together."""
        self._model = model.base_model
        self._head = head
        self.kv = kv
        self._block_size = kv.shape[3]
        self._proposer = proposer
        self._max_drafts = 0 if proposer is None else proposer.num_speculative_tokens
        self._transfer = Transfer(kv.device)
        self.batch = BatchState(num_slots, max_tokens, self._block_size, self._max_drafts, self._transfer)
        self._logits_processor = LogitsProcessor(self.batch, head.vocab_size, self._transfer)
        self._sampler = Sampler(self.batch)
        self.slots: dict[int, SlotInfo] = {}

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Queue a step on the device."""
        self._start(plan)
        self.batch.append_blocks(plan.rows)
        inputs = lay_out(plan.rows, self.slots, self._max_drafts, self._transfer)
        outputs = self.step(inputs)
        return StepHandle(inputs, outputs.download(self._transfer), self._transfer.record_event())

    def step(self, inputs: StepInputs) -> StepTensors:
        """The device's part of a step, a function of `inputs` and the batch state alone; uploads nothing."""
        hidden, is_broken = self._forward(inputs)
        prompt = self._prompt_logprobs(inputs, hidden)
        self.batch.num_computed.index_add_(0, inputs.slots, inputs.chunk)
        sampled = None if inputs.sampling is None else self._sample(inputs.sampling, hidden)
        return StepTensors(is_broken, sampled, prompt)

    def settle(self, handle: StepHandle) -> StepResult:
        """Wait for a launched step."""
        return handle.settle()

    def _start(self, plan: StepPlan) -> None:
        self.batch.start(plan.starts)
        for start in plan.starts:
            self.slots[start.slot] = SlotInfo.of(start)
            self._logits_processor.start(start.slot, start.request)

    def _forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """The target's forward. Returns: [T, hidden], and [N] bool, rows that went NaN or infinite."""
        batch = self.batch
        slots = inputs.slots[inputs.token_row]
        positions = batch.num_computed[slots] + inputs.token_offset
        is_real = inputs.token_offset < inputs.num_query[inputs.token_row]
        is_real &= positions < batch.num_tokens[slots] + batch.num_drafts[slots]
        positions = torch.where(is_real, positions, 0)  # padding may lie beyond what the model can embed
        token_ids = torch.where(is_real, batch.token_ids[slots, positions], 0)
        blocks = torch.where(is_real, batch.block_table[slots, positions // self._block_size], 0)
        step = AttentionStep(
            kv=self.kv,
            write_blocks=blocks.long(),
            write_offsets=positions % self._block_size,
            positions=positions,
            first_token=inputs.first_token,
            num_query=inputs.num_query,
            slots=inputs.slots,
            block_table=batch.block_table,
            groups=inputs.groups,
        )
        outputs = self._model(
            input_ids=token_ids.long()[None],
            position_ids=positions[None],
            use_cache=False,
            attention_step=step,
        )
        hidden: Tensor = outputs.last_hidden_state[0]
        # Of drafts only the accepted ones count; they are judged by their logits.
        is_known = is_real & (inputs.token_offset < inputs.num_known[inputs.token_row])
        is_bad = is_known & ~torch.isfinite(hidden).all(-1)
        num_bad = torch.zeros_like(inputs.slots).index_add_(0, inputs.token_row, is_bad.long())
        return hidden, num_bad > 0

    def _sample(self, sampling: SamplingRows, hidden: Tensor) -> SampledTensors:
        """Process the logits, verify the drafts, append what was generated, draft anew."""
        batch = self.batch
        slots = sampling.slots
        offsets = torch.arange(sampling.num_positions, device=slots.device)
        flat = torch.minimum(sampling.first_token[:, None] + offsets, sampling.last_token[:, None])
        hidden = hidden[flat]
        logits = self._head.logits(hidden)
        raw = None if sampling.reporting is None else logits[sampling.reporting.rows]
        failures = self._logits_processor.apply(logits, sampling)
        is_finite, has_choice = torch.isfinite(hidden).all(-1), torch.isfinite(logits.amax(-1))

        num_tokens = batch.num_tokens[slots]
        drafts = Drafts(
            ids=batch.token_ids[slots[:, None], num_tokens[:, None] + offsets[:-1]].long(),
            counts=torch.minimum(batch.num_drafts[slots], sampling.max_drafts),
        )
        verified = self._sampler.sample(logits, sampling, drafts)
        token_ids = torch.cat((drafts.ids, torch.zeros_like(slots)[:, None]), dim=1)
        token_ids.scatter_(1, verified.num_accepted[:, None], verified.next_ids[:, None])

        end = num_tokens + verified.num_accepted
        batch.token_ids[slots, end] = verified.next_ids.int()
        batch.num_tokens[slots] = end + 1
        batch.num_computed[slots] = end
        batch.num_drafts.index_fill_(0, slots, 0)
        self._draft(sampling)
        is_used = offsets <= verified.num_accepted[:, None]  # what comes after was computed in vain, NaN or not
        return SampledTensors(
            token_ids=token_ids,
            num_tokens=verified.num_accepted + 1,
            num_drafted=drafts.counts,
            num_next_drafts=batch.num_drafts[slots],
            is_broken=(~is_finite & is_used).any(-1),
            is_empty=(~has_choice & is_used).any(-1),
            logprobs=None if raw is None else self._chosen_logprobs(raw, token_ids, sampling),
            failures=failures,
        )

    def _chosen_logprobs(self, raw: Tensor, token_ids: Tensor, sampling: SamplingRows) -> LogprobTensors:
        assert sampling.reporting is not None
        num_top = max(sampling.params[i].logprobs or 0 for i in sampling.reporting.index)
        return chosen_logprobs(raw.flatten(0, 1), sampling.reporting.of(token_ids).flatten(), num_top)

    def _draft(self, sampling: SamplingRows) -> None:
        """Put new drafts behind the known tokens of the rows that speculate."""
        if self._proposer is None or sampling.drafting is None:
            return
        batch = self.batch
        slots = sampling.drafting.of(sampling.slots)
        num_tokens = batch.num_tokens[slots]
        bound = max(sampling.rows[i].context_bound for i in sampling.drafting.index) + 1
        draft = self._proposer.propose(
            ProposeInput(batch.token_ids, slots, num_tokens, batch.max_drafts[slots], max_num_tokens=bound)
        )
        ahead = num_tokens[:, None] + torch.arange(self._max_drafts, device=slots.device)
        batch.token_ids[slots[:, None], ahead] = draft.ids.clamp(min=0)  # padding is never read, but must be an index
        batch.num_drafts[slots] = draft.counts.long()

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
