"""Sequences that follow a grammar, in the scheduler."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from server.config import SchedulerConfig
from server.engine.protocol import FinishReason
from server.guidance.grammar import Grammar
from server.kv.prefix_cache import BlockHashes
from server.scheduler.budget import TokenBudget
from server.scheduler.sequence import InFlight, Sequence
from server.scheduler.stop_rules import apply_stop_rules
from tests.fakes.core import make_request

PROMPT = 10
EOS = 2
GRAMMAR = Grammar(Mock(), (EOS,))  # nobody here follows it


def sequence(*, is_guided: bool, min_tokens: int = 0) -> Sequence:
    """One that has computed its prompt."""
    request = make_request("r", range(PROMPT), stop_token_ids=(EOS,), max_tokens=20, min_tokens=min_tokens)
    return Sequence(
        seq_id=0,
        request=replace(request, grammar=GRAMMAR) if is_guided else request,
        choice=0,
        order=(0.0, 0),
        hashes=BlockHashes(b"", 4),
        num_speculative_tokens=0,
        key=0,
        token_ids=list(request.prompt_token_ids),
        num_computed=PROMPT - 1,
    )


@pytest.mark.parametrize("is_guided", [False, True])
def test_only_who_is_guided_waits_for_its_step(is_guided: bool) -> None:
    """Its masks follow from tokens that the host must know; drafts or none."""
    one = sequence(is_guided=is_guided)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)
    for num_allowed in (0, 3):
        assert TokenBudget(config, [one], has_waiting=False).offer(one, num_allowed) is not None
    one.launch(InFlight(1, 0, is_sampling=True))
    for num_allowed in (0, 3):
        offer = TokenBudget(config, [one], has_waiting=False).offer(one, num_allowed)
        assert (offer is None) == is_guided


@pytest.mark.parametrize("is_guided", [False, True])
def test_a_stop_id_ends_a_guided_sequence_whatever_its_minimum(is_guided: bool) -> None:
    """Before it masks allow one only where the grammar has no other token left."""
    one = sequence(is_guided=is_guided, min_tokens=5)
    ends = (7, EOS), FinishReason.STOP
    goes_on = (7, EOS, 8), None
    assert apply_stop_rules(one, (7, EOS, 8)) == (ends if is_guided else goes_on)
