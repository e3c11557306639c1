"""A request's choices, as sequences."""

from server.config import SchedulerConfig
from server.kv.prefix_cache import BlockHashes, root_hash
from server.request import ModelInfo, Request
from server.scheduler.policy import order_key
from server.scheduler.sequence import Sequence, sampling_key


class ChoiceMaker:
    """Makes the sequences of requests, and numbers them; owned by the scheduler."""

    def __init__(self, config: SchedulerConfig, model_info: ModelInfo, *, enable_prefix_caching: bool) -> None:
        self._config = config
        self._info = model_info
        self._enable_prefix_caching = enable_prefix_caching
        self._next_seq_id = 0

    def make(self, request: Request) -> list[Sequence]:
        """One sequence per choice; the later ones wait for the first one's prompt blocks, if there are full ones."""
        primary = order_key(request, self._config.scheduling_policy, self._config.priority_ageing_seconds)
        fingerprint = self._info.fingerprint
        if not self._enable_prefix_caching:  # a root of its own: the choices share blocks, nobody else does
            fingerprint += b"/%d" % self._next_seq_id
        root = root_hash(fingerprint, request.cache_salt)
        num_drafts = self._speculative_tokens(request)
        choices: list[Sequence] = []
        for choice in range(request.sampling.n):
            done: tuple[int, ...] = ()
            key = sampling_key(request.sampling.seed, choice)
            if request.continuation is not None:
                state = request.continuation.choices[choice]
                if state is None:
                    continue
                done = state.token_ids
                if state.key is not None:
                    key = state.key
            shares_blocks = bool(choices) and len(request.prompt_token_ids) > self._info.block_size
            sequence = Sequence(
                seq_id=self._next_seq_id,
                request=request,
                choice=choice,
                order=(primary, self._next_seq_id),
                hashes=BlockHashes(root, self._info.block_size),
                num_speculative_tokens=num_drafts,
                key=key,
                drafts_on_host=self._info.drafts_on_host and num_drafts > 0,
                leader=choices[0] if shares_blocks else None,
                token_ids=[*request.prompt_token_ids, *done],
            )
            self._next_seq_id += 1
            choices.append(sequence)
        return choices

    def _speculative_tokens(self, request: Request) -> int:
        if not request.speculation.enabled or request.hands_on:
            return 0
        wanted = request.speculation.num_speculative_tokens
        most = self._info.num_speculative_tokens
        return most if wanted is None else min(wanted, most)
