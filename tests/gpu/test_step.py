"""The step on CUDA: it never waits for the device, and it can be captured."""

from pathlib import Path

import pytest
import torch

from proposers.ngram import NgramProposer
from server.config import ModelConfig
from server.model.head import LMHead
from server.model.loader import load_model
from server.plan import PlanRow, SequenceStart, StepPlan
from server.request import Request, SamplingParams
from server.worker.kv_tensors import KVGeometry, allocate_kv
from server.worker.runner import Runner
from server.worker.step_inputs import lay_out
from server.worker.transfer import Transfer
from tests.tiny_model import build_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]

DEVICE = torch.device("cuda", 0)
BLOCK_SIZE = 16
BLOCKS_PER_ROW = 8
K = 3
PROMPT = (5, 6, 7, 8, 9, 10) * 4

MIXED = (
    SamplingParams(temperature=0, max_tokens=40),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=7, max_tokens=40),
    SamplingParams(temperature=1.1, top_p=0.8, max_tokens=40),
    SamplingParams(temperature=0, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, max_tokens=40),
    SamplingParams(temperature=0.7, seed=1, logit_bias={4: 5.0}, allowed_token_ids=list(range(3, 200)), max_tokens=40),
    SamplingParams(temperature=0, logprobs=4, prompt_logprobs=2, min_tokens=8, max_tokens=40),
)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    """A runner of a tiny model in float32, drafting by n-gram."""
    loaded = load_model(ModelConfig(model=str(build_tiny_model(tmp_path))), DEVICE, torch.float32)
    geometry = KVGeometry(loaded.num_layers, loaded.num_kv_heads, loaded.head_dim, BLOCK_SIZE, torch.float32)
    kv = allocate_kv(geometry, 1 + BLOCKS_PER_ROW * len(MIXED), DEVICE)
    proposer = NgramProposer(K, 1, 3, takes_last=False)
    head = LMHead.of(loaded.model, loaded.config)
    return Runner(loaded.model, head, kv, num_slots=len(MIXED), max_tokens=128, proposer=proposer)


def _start(slot: int, sampling: SamplingParams) -> SequenceStart:
    request = Request(
        request_id=f"r{slot}",
        prompt_token_ids=PROMPT,
        sampling=sampling,
        stop_token_ids=frozenset({2}),
        bad_words_token_ids=((11, 12), (13,)),
    )
    blocks = tuple(range(1 + slot * BLOCKS_PER_ROW, 1 + (slot + 1) * BLOCKS_PER_ROW))
    return SequenceStart(slot, request, 1234 + slot, PROMPT, len(PROMPT), 0, blocks, K)


def _row(slot: int, num_query: int, num_drafts: int, bound: int, num_prompt_logprobs: int | None = None) -> PlanRow:
    return PlanRow(slot, slot, 0, num_query, num_drafts, bound, True, (), num_prompt_logprobs)


def _prefill(params: tuple[SamplingParams, ...]) -> StepPlan:
    length = len(PROMPT)
    rows = tuple(_row(slot, length, 0, length, p.prompt_logprobs) for slot, p in enumerate(params))
    return StepPlan(tuple(_start(slot, p) for slot, p in enumerate(params)), rows)


def _verify(num_rows: int, steps_before: int) -> StepPlan:
    """A verification made at depth 1, with every count at its upper bound."""
    bound = len(PROMPT) + (1 + K) * (steps_before + 1)
    return StepPlan((), tuple(_row(slot, 1 + K, K, bound) for slot in range(num_rows)))


def _plant_drafts(runner: Runner, num_rows: int) -> None:
    """Give each row K drafts, of which the first is what it would sample anyway."""
    state = [*runner.batch.tensors(), runner.kv]
    saved = [tensor.clone() for tensor in state]
    result = runner.settle(runner.launch(StepPlan((), tuple(_row(i, 1, 0, len(PROMPT) + 1) for i in range(num_rows)))))
    for tensor, before in zip(state, saved, strict=True):
        tensor.copy_(before)
    for row in result.rows:
        drafts = torch.tensor([row.token_ids[0], 17, 18], dtype=torch.int32, device=DEVICE)
        runner.batch.token_ids[row.seq_id, len(PROMPT) + 1 : len(PROMPT) + 1 + K] = drafts
        runner.batch.num_drafts[row.seq_id] = K


def test_launch_never_waits_for_the_device(runner: Runner) -> None:
    runner.settle(runner.launch(_prefill(MIXED)))  # loads kernels and handles, which synchronises
    runner.settle(runner.launch(_verify(len(MIXED), 0)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        handles = [runner.launch(_prefill(MIXED))]
        runner.batch.num_drafts.fill_(K)  # whatever stands behind the prompt is verified as drafts
        handles += [runner.launch(_verify(len(MIXED), i)) for i in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    results = [runner.settle(handle) for handle in handles]
    assert all(row.error is None and row.token_ids for result in results for row in result.rows)
    assert any(row.num_drafted for result in results for row in result.rows)


@pytest.mark.parametrize("sampling", MIXED[:3], ids=["greedy", "seeded", "unseeded"])
def test_captured_verification_equals_eager(runner: Runner, sampling: SamplingParams) -> None:
    num_rows = 4
    runner.settle(runner.launch(_prefill((sampling,) * num_rows)))
    _plant_drafts(runner, num_rows)
    inputs = lay_out(_verify(num_rows, 0).rows, runner.slots, K, Transfer(DEVICE))
    state = [*runner.batch.tensors(), runner.kv]
    before = [tensor.clone() for tensor in state]

    def restore() -> None:
        for tensor, saved in zip(state, before, strict=True):
            tensor.copy_(saved)

    with torch.inference_mode():
        eager = runner.step(inputs).sampled
        assert eager is not None
        expected = [eager.token_ids.clone(), eager.num_tokens.clone(), *(tensor.clone() for tensor in state)]
        restore()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            runner.step(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        restore()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = runner.step(inputs).sampled
        assert captured is not None
        for _ in range(2):
            restore()
            graph.replay()
            found = [captured.token_ids, captured.num_tokens, *state]
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert eager.num_drafted.tolist() == [K] * num_rows
    if sampling is not MIXED[2]:
        assert all(count >= 2 for count in expected[1].tolist()), "the first draft was the right one"
