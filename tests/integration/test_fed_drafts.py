"""A network that is fed hidden states drafts as if it had seen each text whole, whatever became of it meanwhile."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.base import Draft, ProposeInput, TargetView
from proposers.drafting import LONGEST_GAP, NetworkProposer
from proposers.network import Features
from server.plan import StepResult
from server.request import Request, SamplingParams
from tests.fakes.fed_network import FedNetwork, FedReference
from tests.fakes.stepping import Stepping
from tests.fakes.tiny_target import target_model
from tests.tiny_model import build_tiny_model

K, BLOCK, LONGEST = 3, 16, 256
FEW = tuple(range(20, 24))
"""The tokens that are generated and drafted, so that drafts are kept now and then."""
TIE = 1e-3
FEATURES: dict[str, Features] = {"last": "last", "layers": (2, 0)}


@dataclass(frozen=True)
class Drafted:
    """What was proposed for a sequence: behind which tokens, attending from where."""

    known: tuple[int, ...]
    drafts: tuple[int, ...]
    first: int


class FedStepping(Stepping):
    """Steps with a fed network, whose drafts are looked at.

    Attributes:
        drafted: in order, sequences without drafts among them. reference: what they should be.
    """

    def __init__(self, folder: Path, device_name: str, features: Features = "last", **settings: Any) -> None:
        device = torch.device(device_name)
        settings = {"max_tokens": LONGEST, "enable_prefix_caching": True, "max_num_seqs": 6, **settings}
        super().__init__(folder, device, torch.float32, k=K, build=self._proposer(features), **settings)
        self.drafted: list[Drafted] = []
        self.reference = FedReference(self._network, target_model(folder, device_name))
        self._num_requests = 0

    def _proposer(self, features: Features) -> Any:
        def build(target: TargetView) -> list[NetworkProposer]:
            assert target.network is not None
            self._network = FedNetwork(target.network, features, FEW, target.device)
            proposer = NetworkProposer(
                self._network,
                target,
                num_speculative_tokens=K,
                is_sampled=False,
                num_features=self._network.num_features,
            )
            propose = proposer.propose

            def recorded(inputs: ProposeInput) -> Draft:
                draft = propose(inputs)
                self._record(inputs, draft, proposer)
                return draft

            proposer.propose = recorded  # type: ignore[method-assign]
            return [proposer]

        return build

    def _record(self, inputs: ProposeInput, draft: Draft, proposer: NetworkProposer) -> None:
        for row, (slot, length) in enumerate(zip(inputs.slots.tolist(), inputs.num_tokens.tolist(), strict=True)):
            ids = draft.ids[row, : int(draft.counts[row])].tolist()
            first = int(proposer._bound.first[slot])
            self.drafted.append(Drafted(tuple(inputs.token_ids[slot, :length].tolist()), tuple(ids), first))

    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int = 24, **sampling: Any) -> list[list[int]]:
        """Seeded answers to prompts that come at once."""
        return self.generate(self.add(prompts, max_tokens, **sampling))

    def add(self, prompts: Sequence[Sequence[int]], max_tokens: int, **sampling: Any) -> list[Request]:
        """Requests for them."""
        made = []
        for seed, prompt in enumerate(prompts):
            self._num_requests += 1
            params = SamplingParams(
                **{"seed": seed, "temperature": 3, "max_tokens": max_tokens, "ignore_eos": True, **sampling},
                allowed_token_ids=FEW,
            )
            made.append(Request(request_id=f"{self._num_requests}", prompt_token_ids=tuple(prompt), sampling=params))
        return made

    def take_drafted(self) -> list[Drafted]:
        """Those since the last call, once each is seen to be what it should."""
        drafted, self.drafted = self.drafted, []
        for each in drafted:
            self._check(each)
        return drafted

    def _check(self, drafted: Drafted) -> None:
        if not drafted.drafts:
            return
        logits = self.reference.logits(drafted.known, drafted.drafts, drafted.first)
        for scores, draft in zip(logits, drafted.drafts, strict=True):
            assert float(scores.max() - scores[FEW.index(draft)]) < TIE, drafted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("fed"), num_layers=3)


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(length)]


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("budget", [2048, 24], ids=["whole prompts", "chunks"])
@pytest.mark.parametrize("depth", [0, 1])
def test_every_text_is_seen_whole(folder: Path, device_name: str, depth: int, budget: int, features: Features) -> None:
    stepping = FedStepping(folder, device_name, features, depth=depth, max_num_batched_tokens=budget)
    stepping.answer([text(length, length) for length in (1, 2, 15, 16, 17, 33, 100, 130)])
    drafted = stepping.take_drafted()
    assert len(drafted) > 100
    assert all(len(each.drafts) == K and each.first == 1 for each in drafted)
    assert sum(stepping.scheduler.counters.accepted) > 20


def test_what_is_compared_would_show_a_gap(folder: Path, device_name: str) -> None:
    """Drafts depend on positions far in front."""
    stepping = FedStepping(folder, device_name)
    stepping.answer([text(100)])
    drafted = stepping.take_drafted()
    num_equal = sum(
        stepping.reference.logits(each.known, each.drafts, 40).argmax(-1).tolist()
        == stepping.reference.logits(each.known, each.drafts, 1).argmax(-1).tolist()
        for each in drafted
    )
    assert num_equal < 0.7 * len(drafted)


@pytest.mark.parametrize("depth", [0, 1])
def test_prefix_hits_lose_nothing(folder: Path, device_name: str, depth: int) -> None:
    """Prompts of 1 to 4 blocks, and of a token more or less."""
    stepping = FedStepping(folder, device_name, depth=depth)
    lengths = [BLOCK * count + more for count in (1, 2, 3, 4) for more in (-1, 0, 1)]
    prompts = [text(length, length) for length in lengths]
    expected = stepping.answer(prompts, seed=1)
    drafted = {each.known: each for each in stepping.take_drafted()}
    assert stepping.answer(prompts, seed=1) == expected
    hit_tokens = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]
    assert stepping.scheduler.counters.prefix_hit_tokens == sum(hit_tokens) > 0
    again = stepping.take_drafted()
    assert [each for each in again if each.drafts] == [drafted[each.known] for each in again]
    assert {each.first for each in again} == {1}


def test_choices_share_what_is_kept_of_the_prompt(folder: Path, device_name: str) -> None:
    stepping = FedStepping(folder, device_name)
    stepping.answer([text(50)], n=4)
    assert stepping.scheduler.counters.prefix_hit_tokens == 3 * 48
    drafted = stepping.take_drafted()
    assert len(drafted) > 4 * 24 / (K + 1)
    assert all(len(each.drafts) == K and each.first == 1 for each in drafted)


def test_the_next_turn_of_a_chat_sees_the_whole_chat(folder: Path, device_name: str) -> None:
    """Each prompt is all of the turn before and a little more; generated blocks are hit as prompts are."""
    stepping = FedStepping(folder, device_name)
    chats = [text(length, length) for length in (5, 20, 40)]
    for turn in range(4):
        before = stepping.scheduler.counters.prefix_hit_tokens
        answers = stepping.answer(chats)
        num_hit = stepping.scheduler.counters.prefix_hit_tokens - before
        # Of the turn before, all but its last token is kept, as far as it fills blocks.
        assert num_hit == (0 if turn == 0 else sum((len(chat) - 7 - 1) // BLOCK * BLOCK for chat in chats))
        drafted = stepping.take_drafted()
        assert all(len(each.drafts) == K and each.first == 1 for each in drafted)
        chats = [[*chat, *answer, *text(7, turn)] for chat, answer in zip(chats, answers, strict=True)]


@pytest.mark.parametrize("depth", [0, 1])
def test_blocks_that_were_never_done_are_left_out(folder: Path, device_name: str, depth: int) -> None:
    """A prompt that came while drafts were off: what is behind the hit is seen, and drafts come at once."""
    stepping = FedStepping(folder, device_name, depth=depth)
    prompts = [text(length, length) for length in (17, 40, 64, 65)]
    stepping.scheduler.drafts.is_on = False
    stepping.answer(prompts, seed=1)
    assert stepping.take_drafted() == []
    stepping.scheduler.drafts.is_on = True
    answers = stepping.answer(prompts, seed=2)
    drafted = stepping.take_drafted()
    for prompt in prompts:
        own = [each for each in drafted if each.known[: len(prompt)] == tuple(prompt)]
        assert own
        assert {each.first for each in own} == {(len(prompt) - 1) // BLOCK * BLOCK}
        assert all(len(each.drafts) == K for each in own)
    # Now there are whole blocks behind those of the prompt.
    longer = [[*prompt, *answer, 5] for prompt, answer in zip(prompts, answers, strict=True)]
    stepping.answer(longer)
    drafted = stepping.take_drafted()
    for number, prompt in enumerate(longer):
        (each,) = [each for each in drafted if each.known[:-1] == tuple(prompt)]
        assert each.first == len(prompts[number]) // BLOCK * BLOCK


def run(stepping: FedStepping, requests: Sequence[Request], off: range) -> list[bool]:
    """Step to the end, with drafts off in some steps. Returns: for each proposal, whether they were off before."""
    for request in requests:
        stepping.scheduler.add(request)
    number, after_off = 0, list[bool]()
    while stepping.scheduler.has_requests:
        stepping.scheduler.drafts.is_on = number not in off
        stepping.step()
        after_off += [number >= off.start] * (len(stepping.drafted) - len(after_off))
        number += 1
    return after_off


@pytest.mark.parametrize("depth", [0, 1])
def test_a_short_time_off_is_made_up_for(folder: Path, device_name: str, depth: int) -> None:
    stepping = FedStepping(folder, device_name, depth=depth)
    requests = stepping.add([text(length, length) for length in (20, 50, 90)], max_tokens=LONGEST_GAP + 40)
    after_off = run(stepping, requests, range(3, LONGEST_GAP - 4))
    assert sum(after_off) > 10
    assert all(len(each.drafts) == K and each.first == 1 for each in stepping.take_drafted())


@pytest.mark.parametrize("depth", [0, 1])
def test_after_a_long_time_off_the_last_positions_are_seen(folder: Path, device_name: str, depth: int) -> None:
    """Drafts come at once, of which nothing is amiss but what they do not see; then the next gap is caught up."""
    stepping = FedStepping(folder, device_name, depth=depth)
    requests = stepping.add([text(length, length) for length in (20, 50, 90)], max_tokens=LONGEST_GAP + 60)
    after_off = run(stepping, requests, range(3, LONGEST_GAP + 20))
    drafted = stepping.take_drafted()
    assert all(len(each.drafts) == K for each in drafted)
    assert sum(after_off) > 10
    for is_after, each in zip(after_off, drafted, strict=True):
        assert is_after == (each.first > 1)
        # It has seen so many positions when drafts came back, and all since then.
        assert not is_after or len(each.known) - each.first >= LONGEST_GAP


def test_a_long_time_off_is_caught_up_in_one_step(folder: Path, device_name: str) -> None:
    """What was left out costs nothing more."""
    stepping = FedStepping(folder, device_name)
    for request in stepping.add([text(20)], max_tokens=LONGEST_GAP * 3):
        stepping.scheduler.add(request)
    caught_up = []
    settle = stepping.scheduler.update

    def update(result: StepResult) -> object:
        caught_up.append(result.num_caught_up)
        return settle(result)

    stepping.scheduler.update = update  # type: ignore[method-assign, assignment]
    for number in range(LONGEST_GAP * 2 + 10):
        stepping.scheduler.drafts.is_on = number >= LONGEST_GAP * 2
        stepping.step()
    assert [count for count in caught_up if count] == [LONGEST_GAP]


@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_sequences_draft_from_all_they_know(folder: Path, device_name: str, depth: int) -> None:
    stepping = FedStepping(folder, device_name, depth=depth, num_blocks=14)
    stepping.answer([text(length, length) for length in (10, 30, 40, 50)], max_tokens=40)
    assert stepping.scheduler.counters.num_preemptions > 0
    drafted = stepping.take_drafted()
    assert len(drafted) > 40
    assert {each.first for each in drafted} == {1}
    assert all(len(each.drafts) == K for each in drafted)
