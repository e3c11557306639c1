"""Masks of guided rows: by position, with drafts, at the end, and when a grammar becomes too much."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from server.guidance.compiler import GrammarCompiler
from server.guidance.grammar import Grammar
from server.guidance.masks import MaskJob, MaskWriter
from server.guidance.params import StructuredOutputsParams
from server.plan import PlanRow, RowResult, SequenceStart
from server.request import Request, SamplingParams
from server.tokenizer import Tokenizer
from server.worker.guided import GuidedRows
from server.worker.host_drafts import RankedDraft
from server.worker.slot_info import SlotInfo, has_rules, masks_early_stops
from server.worker.stop_bits import StopBits
from server.worker.token_masks import StandingMasks, TokenMasks
from tests.fakes.tokenizers import tiny_tokenizer
from tests.fakes.worker_state import decode_row, flight_on

VOCAB = 512
NUM_WORDS = VOCAB // 32
EOS = 2
PROMPT = (5, 6, 7)
ALL = set(range(VOCAB))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=VOCAB, eos_token_ids=[EOS])


@pytest.fixture(scope="module")
def digits(tokenizer: Tokenizer) -> list[int]:
    """The tokens 0 to 9."""
    found = [tokenizer.encode(str(i), add_special_tokens=False) for i in range(10)]
    assert all(len(token_ids) == 1 for token_ids in found)
    return [token_ids[0] for token_ids in found]


def allowed(bits: npt.NDArray[Any]) -> set[int]:
    """Of [words] bits."""
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def allowed_by(masks: TokenMasks | None) -> list[list[set[int]]]:
    assert masks is not None
    return [[allowed(position) for position in row] for row in masks.bits.numpy()]


def compiled(compiler: GrammarCompiler, regex: str) -> Grammar:
    return compiler.compile(StructuredOutputsParams(regex=regex))


def started(grammar: Grammar | None, *, slot: int = 0, output: tuple[int, ...] = (), **sampling: Any) -> SequenceStart:
    params = SamplingParams(max_tokens=50, **sampling)
    request = Request(
        request_id=f"r{slot}",
        prompt_token_ids=PROMPT,
        sampling=params,
        stop_token_ids=frozenset((EOS, *params.stop_token_ids)),
        grammar=grammar,
    )
    return SequenceStart(slot, request, 1, PROMPT + output, len(PROMPT), 0, (1,), 4)


def row_of(slot: int, num_drafts: int = 0) -> PlanRow:
    return decode_row(slot, 10, num_drafts)


def result_of(slot: int, *token_ids: int) -> RowResult:
    return RowResult(slot, 0, token_ids)


def test_each_job_has_its_masks_and_matchers_stay_where_they_are(compiler: GrammarCompiler, digits: list[int]) -> None:
    one, two = compiled(compiler, "1[23]"), compiled(compiler, "[0-9]")
    jobs = [
        MaskJob(one.start(), [digits[1], digits[3], EOS, digits[0]]),
        MaskJob(two.start(), []),
        MaskJob(one.start(), [digits[2], digits[3]]),
    ]
    masks = np.zeros((3, 5, NUM_WORDS), np.uint32)
    for _ in range(2):
        MaskWriter().write(jobs, masks)
        by_job = [[allowed(mask) for mask in job] for job in masks]
        assert by_job[0] == [{digits[1]}, {digits[2], digits[3]}, {EOS}, ALL, ALL]
        assert by_job[1] == [set(digits), ALL, ALL, ALL, ALL]
        assert by_job[2] == [{digits[1]}, ALL, ALL, ALL, ALL]
    assert [job.matcher.error() for job in jobs] == [None] * 3


def test_rows_are_masked_by_what_was_generated(compiler: GrammarCompiler, digits: list[int]) -> None:
    guided, flight = GuidedRows(VOCAB), flight_on("cpu", 1 << 20)
    guided.start(started(compiled(compiler, "12+"), slot=0))
    guided.start(started(None, slot=1))
    guided.start(started(compiled(compiler, "34(5|67)"), slot=2, output=(digits[3],)))
    rows = [row_of(0), row_of(1), row_of(2, 2)]
    guided.settle(rows[:2], [result_of(0, digits[1]), result_of(1, 9)], {0: RankedDraft([digits[9]], 0)})
    host_drafts = {2: RankedDraft([digits[4], digits[6], digits[7]], 0)}
    masks = guided.stage(rows, host_drafts, flight)
    flight.send()
    assert masks is not None
    assert masks.rows.tolist() == [0, 2]
    assert masks.errors == {}
    assert allowed_by(masks) == [[{digits[2]}, ALL, ALL], [{digits[4]}, {digits[5], digits[6]}, {digits[7]}]]
    guided.settle(rows, [result_of(0, digits[2]), result_of(1, 9), result_of(2, digits[4], digits[5])], {})
    masks = guided.stage(rows[:2], {}, flight)
    assert allowed_by(masks) == [[{digits[2], EOS}]]
    masks = guided.stage([row_of(2)], {}, flight)
    assert allowed_by(masks) == [[{EOS}]]
    guided.start(started(None, slot=0))
    assert guided.stage(rows[:2], {}, flight) is None


@pytest.mark.parametrize(
    ("device", "host", "taken"),
    [((0, [1]), (1, [2]), 1), ((1, [1]), (0, [2]), 2), ((0, []), (1, [2]), 2), ((1, [1]), None, 1)],
    ids=["device first", "host first", "device has none", "host has none"],
)
def test_the_drafts_are_those_that_will_be_verified(
    compiler: GrammarCompiler, digits: list[int], device: Any, host: Any, taken: int
) -> None:
    guided, flight = GuidedRows(VOCAB), flight_on("cpu", 1 << 20)
    guided.start(started(compiled(compiler, "0(1a|2b)")))

    def draft(of: Any) -> RankedDraft:
        return RankedDraft([digits[i] for i in of[1]], of[0])

    result = RowResult(0, 0, (digits[0],), num_next_drafts=len(device[1]))
    guided.settle([row_of(0)], [result], {0: draft((device[0], [*device[1], 9]))})  # 9 is none of the drafts
    masks = guided.stage([row_of(0, 1)], {} if host is None else {0: draft(host)}, flight)
    assert allowed_by(masks)[0][0] == {digits[1], digits[2]}
    assert len(allowed_by(masks)[0][1]) == 1
    guided.settle([row_of(0, 1)], [result_of(0, digits[taken])], {})
    assert allowed_by(guided.stage([row_of(0)], {}, flight))[0][0] == allowed_by(masks)[0][1]


def test_a_stop_id_ends_the_text_and_is_none_of_it(compiler: GrammarCompiler, digits: list[int]) -> None:
    """What a step brought behind it does not matter: the scheduler cuts it off."""
    guided, flight = GuidedRows(VOCAB), flight_on("cpu", 1 << 20)
    guided.start(started(compiled(compiler, "1+")))
    guided.settle([row_of(0, 2)], [result_of(0, digits[1], EOS, 300)], {})
    masks = guided.stage([row_of(0)], {}, flight)
    assert masks is not None
    assert masks.errors == {}


def test_what_a_grammar_does_not_allow_is_the_row_s_error(compiler: GrammarCompiler, digits: list[int]) -> None:
    guided, flight = GuidedRows(VOCAB), flight_on("cpu", 1 << 20)
    grammar = compiled(compiler, "8(9|8)")
    for slot in range(3):
        guided.start(started(grammar, slot=slot))
    rows = [row_of(slot, slot) for slot in range(3)]
    guided.settle(rows, [result_of(slot, digits[8 if slot == 1 else 7]) for slot in range(3)], {})
    masks = guided.stage(rows, {2: RankedDraft([digits[8]] * 2, 0)}, flight)
    assert masks is not None
    assert set(masks.errors) == {0, 2}
    assert "cannot be followed" in masks.errors[0]
    assert allowed_by(masks) == [[ALL] * 3, [{digits[8], digits[9]}, ALL, ALL], [ALL] * 3]


@pytest.mark.parametrize(
    ("text", "sampling", "expected"),
    [
        ("", {}, "2"),
        ("2", {}, "2 EOS"),
        ("2", {"stop_token_ids": [99]}, "2 EOS stop"),
        ("", {"stop_token_ids": [99]}, "2"),
        ("2", {"min_tokens": 2}, "2"),
        ("22", {"min_tokens": 2}, "2 EOS"),
        ("2", {"ignore_eos": True}, "2"),
        ("2", {"ignore_eos": True, "stop_token_ids": [99]}, "2 stop"),
        ("2", {"ignore_eos": True, "stop_token_ids": [99, EOS]}, "2 EOS stop"),
        ("222", {"ignore_eos": True, "min_tokens": 40}, "EOS"),
        ("222", {"ignore_eos": True, "min_tokens": 40, "stop_token_ids": [99]}, "EOS stop"),
    ],
)
def test_stop_ids_follow_where_the_text_may_end(
    compiler: GrammarCompiler, digits: list[int], text: str, sampling: dict[str, Any], expected: str
) -> None:
    names = {"2": digits[2], "EOS": EOS, "stop": 99}
    guided = GuidedRows(VOCAB)
    output = tuple(digits[int(digit)] for digit in text)
    guided.start(started(compiled(compiler, "2{1,3}"), output=output, **sampling))
    masks = guided.stage([row_of(0)], {}, flight_on("cpu", 1 << 20))
    assert allowed_by(masks) == [[{names[name] for name in expected.split()}]]


def test_a_minimum_counts_by_position(compiler: GrammarCompiler, digits: list[int]) -> None:
    guided = GuidedRows(VOCAB)
    guided.start(started(compiled(compiler, "2{1,9}"), output=(digits[2],), min_tokens=3))
    masks = guided.stage([row_of(0, 3)], {0: RankedDraft([digits[2]] * 3, 0)}, flight_on("cpu", 1 << 20))
    assert allowed_by(masks) == [[{digits[2]}, {digits[2]}, {digits[2], EOS}, {digits[2], EOS}]]


def test_a_stop_id_that_is_text_does_not_cut_a_text_short(compiler: GrammarCompiler, digits: list[int]) -> None:
    guided, flight = GuidedRows(VOCAB), flight_on("cpu", 1 << 20)
    guided.start(started(compiled(compiler, "1?21?"), stop_token_ids=[digits[1]]))
    assert allowed_by(guided.stage([row_of(0)], {}, flight)) == [[{digits[2]}]]
    guided.settle([row_of(0)], [result_of(0, digits[2])], {})
    assert allowed_by(guided.stage([row_of(0)], {}, flight)) == [[{digits[1], EOS}]]


def test_captured_steps_do_for_a_grammar_but_not_for_rules_besides(compiler: GrammarCompiler) -> None:
    assert SlotInfo.of(started(compiled(compiler, "a"))).is_plain
    assert not SlotInfo.of(started(compiled(compiler, "a"), logit_bias={5: 1.0})).is_plain


def test_masks_stand_for_the_rows_of_one_step(kernel_device: str) -> None:
    """Others, and all of a step without masks, are left alone; one with fewer positions than there is room for, too."""
    standing = StandingMasks(4, 3, VOCAB, torch.device(kernel_device))
    none, all_but_5 = np.zeros(VOCAB // 32, np.int32), np.full(VOCAB // 32, -1, np.int32)
    all_but_5[0] = ~(1 << 5)

    def allowed_after(masks: TokenMasks | None) -> list[list[int]]:
        """How many tokens are left, by row and position."""
        standing.put(masks)
        logits = torch.zeros(3, 2, VOCAB, device=kernel_device)
        standing.apply(logits)
        return (logits == 0).sum(-1).tolist()

    def masks_of(rows: list[int], *bits: npt.NDArray[np.int32]) -> TokenMasks:
        words = torch.from_numpy(np.stack(bits)).view(len(rows), -1, VOCAB // 32)
        return TokenMasks(torch.tensor(rows, device=kernel_device), words.to(kernel_device), {})

    assert allowed_after(None) == [[VOCAB] * 2] * 3
    assert allowed_after(masks_of([2, 0], none, all_but_5, all_but_5, none)) == [
        [VOCAB - 1, 0],
        [VOCAB, VOCAB],
        [0, VOCAB - 1],
    ]
    assert allowed_after(masks_of([1], all_but_5)) == [[VOCAB] * 2, [VOCAB - 1, VOCAB], [VOCAB] * 2]
    assert allowed_after(None) == [[VOCAB] * 2] * 3


def test_a_minimum_is_kept_by_masks_alone(compiler: GrammarCompiler) -> None:
    """Otherwise nothing would be left where a grammar ends before it."""
    assert masks_early_stops(started(None, min_tokens=3).request)
    assert not has_rules(started(compiled(compiler, "a"), min_tokens=3).request)


def test_bits_of_high_ids(compiler: GrammarCompiler) -> None:
    """Bit 31 is the sign of the words that travel."""
    stops = StopBits(started(compiled(compiler, "a"), stop_token_ids=[31, 511]).request, NUM_WORDS)
    masks = np.zeros((1, NUM_WORDS), np.uint32)
    masks[0, 0] = 1 << EOS
    stops.apply(masks, 0)
    assert allowed(masks[0]) == {EOS, 31, 511}


def test_masks_reach_their_rows(compiler: GrammarCompiler, digits: list[int], device_name: str) -> None:
    guided, flight = GuidedRows(VOCAB), flight_on(device_name, 1 << 20)
    guided.start(started(compiled(compiler, "[12]"), slot=1))
    masks = guided.stage([row_of(0), row_of(1)], {}, flight)
    flight.send()
    assert masks is not None
    logits = torch.zeros(2, 2, VOCAB, device=device_name)
    masks.apply(logits)
    assert torch.isfinite(logits[0]).all()
    assert torch.isfinite(logits[1, 1]).all()
    assert torch.isfinite(logits[1, 0]).nonzero()[:, 0].tolist() == sorted([digits[1], digits[2]])
