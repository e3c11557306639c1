"""Which draft policy a configuration means on an executor."""

from collections.abc import Callable

from server.scheduler.auto_policy import AutoPolicy
from server.scheduler.draft_policy import DraftPolicy, FixedPolicy
from server.scheduler.on_off_policy import OnOffPolicy
from server.speculative_config import PolicyConfig

MakePolicy = Callable[[PolicyConfig, int], DraftPolicy]
"""A new policy, which has learned nothing. Args: what is configured, and the most drafts of a row."""


def make_policy(
    config: PolicyConfig, max_drafts: int, *, is_captured: bool = False, catches_up: bool = True
) -> DraftPolicy:
    """See MakePolicy.

    Args:
        is_captured: whether steps are replayed as they were captured, with all drafts or none.
        catches_up: whether a proposer has to do what was computed while it was off.
    """
    by_batch_size = config.num_speculative_tokens_per_batch_size
    if by_batch_size is None and config.policy == "auto":
        return OnOffPolicy(max_drafts, catches_up=catches_up) if is_captured else AutoPolicy(max_drafts)
    return FixedPolicy(max_drafts, by_batch_size)
