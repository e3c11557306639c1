"""Runs steps on one device: the model's forward, sampling and verification, drafting."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from proposers.base import ProposeInput, Proposer
from server.model.attention import AttentionGroup, AttentionStep
from server.model.head import LMHead
from server.plan import StepPlan, StepResult
from server.request import SamplingParams
from server.worker.batch import BatchState
from server.worker.logits import LogitsProcessor
from server.worker.logprobs import LogprobTensors, chosen_logprobs, prompt_logprobs
from server.worker.results import SampledTensors, StepHandle
from server.worker.sampler import Drafts, Sampler
from server.worker.step_inputs import SamplingRows, StepInputs, lay_out
from server.worker.transfer import Transfer


class Runner:
    """Implements plan.Executor; owns the batch state and the KV tensor, used from the step thread only.

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
        self._kv = kv
        self._block_size = kv.shape[3]
        self._proposer = proposer
        self._max_drafts = 0 if proposer is None else proposer.num_speculative_tokens
        self._transfer = Transfer(kv.device)
        self._batch = BatchState(num_slots, max_tokens, self._block_size, self._max_drafts, self._transfer)
        self._logits_processor = LogitsProcessor(self._batch, head.vocab_size, self._transfer)
        self._sampler = Sampler(self._batch, self._transfer)
        self._params: dict[int, SamplingParams] = {}
        self._num_prompt: dict[int, int] = {}
        self._drafting: dict[int, bool] = {}

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Queue a step on the device."""
        self._start(plan)
        self._batch.append_blocks(plan.rows)
        inputs = lay_out(plan.rows, self._max_drafts, self._transfer)
        hidden, is_broken = self._forward(inputs)
        prompt = self._prompt_logprobs(inputs, hidden)
        self._batch.num_computed.index_add_(0, inputs.slots, inputs.chunk)
        sampled = None if inputs.sampling is None else self._sample(inputs.sampling, hidden)
        return StepHandle(
            rows=inputs.rows,
            is_broken=self._transfer.download(is_broken),
            sampled=sampled,
            prompt_logprobs=prompt,
            event=self._transfer.record_event(),
        )

    def settle(self, handle: StepHandle) -> StepResult:
        """Wait for a launched step."""
        return handle.settle()

    def _start(self, plan: StepPlan) -> None:
        self._batch.start(plan.starts)
        for start in plan.starts:
            self._params[start.slot] = start.request.sampling
            self._num_prompt[start.slot] = start.num_prompt
            self._drafting[start.slot] = start.num_speculative_tokens > 0
            self._logits_processor.start(start.slot, start.request)

    def _forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """The target's forward. Returns: [T, hidden], and [N] bool, rows that went NaN or infinite."""
        batch = self._batch
        slots = inputs.slots[inputs.token_row]
        positions = batch.num_computed[slots] + inputs.token_offset
        is_real = inputs.token_offset < inputs.num_query[inputs.token_row]
        is_real &= positions < batch.num_tokens[slots] + batch.num_drafts[slots]
        token_ids = torch.where(is_real, batch.token_ids[slots, positions.clamp(max=batch.width - 1)], 0)
        block_index = (positions // self._block_size).clamp(max=batch.block_table.shape[1] - 1)
        blocks = torch.where(is_real, batch.block_table[slots, block_index], 0)
        step = AttentionStep(
            kv=self._kv,
            write_blocks=blocks.long(),
            write_offsets=positions % self._block_size,
            groups=self._attention_groups(inputs, positions),
        )
        outputs = self._model(
            input_ids=token_ids.long()[None],
            position_ids=positions[None],
            use_cache=False,
            attention_step=step,
        )
        hidden: Tensor = outputs.last_hidden_state[0]
        is_bad = is_real & ~torch.isfinite(hidden).all(-1)
        num_bad = torch.zeros_like(inputs.slots).index_add_(0, inputs.token_row, is_bad.long())
        return hidden, num_bad > 0

    def _attention_groups(self, inputs: StepInputs, positions: Tensor) -> tuple[AttentionGroup, ...]:
        groups = []
        for group in inputs.groups:
            num_blocks = -(-group.context_bound // self._block_size)
            slots = inputs.slots[group.first_row : group.first_row + group.num_rows]
            tokens = slice(group.first_token, group.first_token + group.num_rows * group.num_query)
            groups.append(
                AttentionGroup(
                    first_token=group.first_token,
                    num_rows=group.num_rows,
                    num_query=group.num_query,
                    block_table=self._batch.block_table[slots, :num_blocks].long(),
                    positions=positions[tokens].view(group.num_rows, group.num_query),
                )
            )
        return tuple(groups)

    def _sample(self, sampling: SamplingRows, hidden: Tensor) -> SampledTensors:
        """Verify the drafts, append what was generated, draft anew."""
        batch = self._batch
        slots = sampling.slots
        num_positions = sampling.num_positions
        offsets = torch.arange(num_positions, device=slots.device)
        flat = torch.minimum(sampling.first_token[:, None] + offsets, sampling.last_token[:, None])
        logits = self._head.logits(hidden[flat])
        params = [self._params[row.slot] for row in sampling.rows]
        num_top = {i: row.logprobs for i, row in enumerate(params) if row.logprobs is not None}
        raw = logits[self._transfer.upload_ids(list(num_top))] if num_top else None
        failures = self._logits_processor.apply(logits, sampling)
        # NaN compares false: a row is broken unless each of its positions has something to choose.
        is_broken = ~(logits.amax(-1) > -torch.inf).all(-1)

        num_tokens = batch.num_tokens[slots]
        ahead = num_tokens[:, None] + offsets[:-1]
        drafts = Drafts(
            ids=batch.token_ids[slots[:, None], ahead].long(),
            counts=torch.minimum(batch.num_drafts[slots], sampling.max_drafts),
        )
        verified = self._sampler.sample(logits, params, slots, drafts)
        token_ids = torch.cat((drafts.ids, torch.zeros_like(slots)[:, None]), dim=1)
        token_ids.scatter_(1, verified.num_accepted[:, None], verified.next_ids[:, None])
        num_new = verified.num_accepted + 1

        batch.token_ids[slots, num_tokens + verified.num_accepted] = verified.next_ids.int()
        batch.num_tokens[slots] = num_tokens + num_new
        batch.num_computed[slots] = num_tokens + verified.num_accepted
        batch.num_drafts[slots] = 0
        self._draft(sampling)
        download = self._transfer.download
        return SampledTensors(
            slots=tuple(row.slot for row in sampling.rows),
            failures=failures,
            token_ids=download(token_ids),
            num_tokens=download(num_new),
            num_drafted=download(drafts.counts),
            num_next_drafts=download(batch.num_drafts[slots]),
            is_broken=download(is_broken),
            logprobs=None if raw is None else self._chosen_logprobs(raw, token_ids, num_top),
            num_top=num_top,
        )

    def _chosen_logprobs(self, raw: Tensor, token_ids: Tensor, num_top: dict[int, int]) -> LogprobTensors:
        chosen = token_ids[self._transfer.upload_ids(list(num_top))]
        return chosen_logprobs(raw.flatten(0, 1), chosen.flatten(), max(num_top.values())).download(self._transfer)

    def _draft(self, sampling: SamplingRows) -> None:
        """Put new drafts behind the known tokens of the rows that speculate."""
        index = [i for i, row in enumerate(sampling.rows) if self._drafting[row.slot]]
        if self._proposer is None or not index:
            return
        batch = self._batch
        slots = sampling.slots[self._transfer.upload_ids(index)]
        num_tokens = batch.num_tokens[slots]
        bound = max(sampling.rows[i].context_bound for i in index) + 1
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
            end = min(row.context_bound, self._num_prompt[row.slot] - 1)
            first = inputs.first_tokens[i]
            targets = self._batch.token_ids[row.slot, start + 1 : end + 1].long()
            tensors = prompt_logprobs(self._head, hidden[first : first + end - start], targets, row.num_prompt_logprobs)
            found[i] = tensors.download(self._transfer)
        return found
