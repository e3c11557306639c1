"""The kernels on a GPU: real shapes against their twins in higher precision, captured, compiled, without waiting."""

import itertools
import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from proposers.base import ProposeInput
from proposers.ngram import NgramProposer
from server.kernels import paged_attention as attention_module
from server.kernels import reference
from server.kernels.attention_tiling import Splits
from server.kernels.gumbel_argmax import gumbel_argmax
from server.kernels.invariant_linear import invariant_linear
from server.kernels.invariant_mean import invariant_mean
from server.kernels.kv_write import write_kv
from server.kernels.ngram_lookup import ngram_lookup
from server.kernels.noise import Stream, gumbel
from server.kernels.paged_attention import paged_attention
from server.kernels.penalties import penalise
from server.kernels.rejection import Method, verify_drafts
from server.kernels.truncate import truncate
from tests.fakes.drafts import draft_inputs
from tests.fakes.kernel_inputs import AttentionInputs, attention_inputs, starting_at
from tests.fakes.truncation import check_truncated

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]

DEVICE = "cuda"
SCALING = 0.1

MAX_ERROR = {
    torch.float32: 1e-5,  # three products of tf32, each exact to 2^-22, and sums in another order
    torch.float16: 1e-3,  # weights and output are rounded to 2^-11
    torch.bfloat16: 6e-3,  # weights and output are rounded to 2^-8
}
"""Largest |out - expected| / |expected| (Frobenius) by the query's type, against float64 on the same inputs."""


@dataclass(frozen=True, slots=True)
class Case:
    """A shape of attention: `rows` as (context, query tokens)."""

    name: str
    rows: list[tuple[int, int]]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 32
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    padding: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> AttentionInputs:
        return attention_inputs(
            self.rows,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            device=DEVICE,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            padding=self.padding,
        )


LENGTHS = [1, 2, 31, 32, 33, 64, 65, 127, 500, 512, 1000, 2048, 3001, 5000, 8191, 8192]

CASES = [
    Case("decode, 8B, one row", [(2000, 1)]),
    Case("decode, 8B, every edge of a tile", [(length, 1) for length in LENGTHS]),
    Case("decode, 8B, full batch", [(700 + 13 * i, 1) for i in range(64)]),
    Case("decode, 9 heads on 3", [(length, 1) for length in LENGTHS], heads=9, kv_heads=3, head_dim=64),
    Case("decode, one head each", [(length, 1) for length in LENGTHS], heads=8, kv_heads=8, head_dim=64),
    Case("verify 5 drafts", [(max(6, length), 6) for length in LENGTHS]),
    Case("verify 5 drafts, shorter rows beside", [(1000, 6), (800, 1), (77, 3), (6, 6)]),
    Case("verify 15 drafts, 16 heads on each", [(3000, 16), (16, 16)], heads=32, kv_heads=2),
    Case("padding behind the drafts", [(1000, 2), (40, 2)], padding=4),
    Case("small blocks", [(1000, 4), (15, 4)], block_size=16),
    Case("blocks that are no power of two", [(1000, 4), (47, 4)], block_size=48),
    Case("large blocks", [(1000, 4), (255, 4)], block_size=256),
    Case("heads of 80", [(1000, 4), (33, 4)], heads=8, kv_heads=8, head_dim=80),
    Case("heads of 256", [(1000, 4), (33, 4)], heads=16, kv_heads=8, head_dim=256),
    Case("float16", [(1000, 6), (33, 1)], dtype=torch.float16),
    Case("float32", [(1000, 6), (33, 1)], dtype=torch.float32),
    Case("float32, heads of 64", [(1000, 1), (33, 1)], heads=9, kv_heads=3, head_dim=64, dtype=torch.float32),
    Case("float8 cache", [(1000, 6), (33, 1)], kv_dtype=torch.float8_e4m3fn),
    Case("float8 cache with less mantissa", [(1000, 6), (33, 1)], kv_dtype=torch.float8_e5m2),
    Case("bfloat16 cache of a float32 model", [(1000, 6)], dtype=torch.float32, kv_dtype=torch.bfloat16),
    Case("window", [(5000, 1), (100, 1)], options={"sliding_window": 1024}),
    Case("window in verification", [(5000, 6), (100, 6)], options={"sliding_window": 128}, padding=2),
    Case("softcap and window, heads of 256", [(5000, 2)], 8, 4, 256, options={"softcap": 50.0, "sliding_window": 4096}),
    Case("sinks and window", [(5000, 1), (9, 1)], 64, 8, 64, options={"sinks": True, "sliding_window": 128}),
    Case("starts", [(5000, 1), (2000, 1), (100, 1), (8192, 1)], options={"starts": (4000, 1999, 17, 0)}),
    Case("starts, verification", [(5000, 6), (2000, 6), (100, 6)], options={"starts": (4990, 1996, 200)}, padding=2),
    Case("starts, prompt", [(3000, 3000), (600, 600)], options={"starts": (2000, 7)}),
    Case("prompt, 8B", [(2048, 2048)]),
    Case("prompts of several lengths", [(513, 513), (17, 17), (2000, 2000), (128, 128)]),
    Case("chunk of a long prompt", [(8192, 2048)]),
    Case("longest chunk", [(8192, 8192)], heads=8, kv_heads=2),
    Case("short chunk of a long prompt", [(8000, 40)]),
    Case("prompt, 9 heads on 3", [(1999, 1999)], heads=9, kv_heads=3, head_dim=64),
    Case("prompt, heads of 256, window", [(3000, 3000)], 8, 4, 256, options={"sliding_window": 1024}),
    Case("prompt, softcap", [(1500, 1500)], options={"softcap": 30.0}),
    Case("prompt, sinks", [(1500, 1500)], 64, 8, 64, options={"sinks": True}),
    Case("prompt, float32", [(1000, 700)], dtype=torch.float32),
    Case("prompt, float32, heads of 256", [(500, 300)], 4, 2, 256, dtype=torch.float32),
    Case("prompt, float16", [(1000, 700)], dtype=torch.float16),
    Case("prompt, float8 cache", [(1000, 700)], kv_dtype=torch.float8_e4m3fn),
]


def attend(inputs: AttentionInputs, out: Tensor | None = None, **options: Any) -> Tensor:
    """The kernel's output; NaN where it does not write."""
    out = torch.full_like(inputs.query, torch.nan) if out is None else out
    arguments = {"max_num_query": inputs.max_num_query, "context_bound": inputs.context_bound, "scaling": SCALING}
    paged_attention(inputs.query, inputs.layer, out, **(inputs.rows() | arguments | options))
    return out


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def replayed(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `run`, which has been run before, as the kernels' compilation cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def test_nothing_is_interpreted() -> None:
    assert "TRITON_INTERPRET" not in os.environ


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_equals_its_twin_and_itself(case: Case) -> None:
    inputs = case.inputs()
    options = dict(case.options)
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-2, 3, case.heads, device=DEVICE)
    if "starts" in options:
        inputs, options["starts"] = starting_at(inputs, options["starts"])
    found = attend(inputs, **options)
    expected = inputs.expected(SCALING, torch.float64, **options)
    assert torch.equal(found.isnan(), expected.isnan()), "read poison, or left a token out"
    is_real = ~expected[:, 0, 0].isnan()
    error = relative_error(found[is_real], expected[is_real])
    assert error < MAX_ERROR[case.dtype], f"{case.name}: {error:.2e}"
    assert all(torch.equal(attend(inputs, **options)[is_real], found[is_real]) for _ in range(3)), "a race"


@pytest.mark.parametrize("fewest", [1, 2, 8, 64])
@pytest.mark.parametrize("is_merged_at_once", [True, False], ids=["at_once", "after"])
@pytest.mark.parametrize(
    ("num_query", "options"), [(1, {}), (6, {}), (1, {"sinks": True, "sliding_window": 3000})], ids=str
)
def test_any_number_of_splits_gives_the_same(
    num_query: int, options: dict[str, Any], is_merged_at_once: bool, fewest: int
) -> None:
    """And the same bits again: with arrivals given, programs wait for none and merge what others stored."""
    inputs = Case("", [(max(num_query, length), num_query) for length in LENGTHS]).inputs()
    if options.get("sinks"):
        options = {**options, "sinks": torch.linspace(-2, 3, 32, device=DEVICE)}
    arrivals = torch.zeros(len(LENGTHS), 32, dtype=torch.int32, device=DEVICE) if is_merged_at_once else None
    with patch.object(attention_module, "choose_splits", lambda *_: Splits(fewest, max(8, fewest))):
        found = [attend(inputs, arrivals=arrivals, **options) for _ in range(20)]
    expected = inputs.expected(SCALING, torch.float64, **options)
    assert relative_error(found[0], expected) < MAX_ERROR[torch.bfloat16]
    assert all(torch.equal(again, found[0]) for again in found[1:]), "a race"
    assert arrivals is None or not arrivals.any(), "the next launch starts from zero"


@pytest.mark.parametrize("options", [{}, {"sinks": True, "sliding_window": 700}], ids=str)
def test_splits_of_a_fixed_span(options: dict[str, Any]) -> None:
    inputs = Case("", [(max(6, length), 6) for length in LENGTHS]).inputs()
    if options.get("sinks"):
        options = {**options, "sinks": torch.linspace(-2, 3, 32, device=DEVICE)}
    expected = inputs.expected(SCALING, torch.float64, **options)
    assert relative_error(attend(inputs, split_span=512, **options), expected) < MAX_ERROR[torch.bfloat16]


def test_with_a_fixed_span_a_row_does_not_depend_on_its_batch() -> None:
    """Bit for bit: what a batch-invariant mode rests on."""
    inputs = Case("", [(300 + 61 * i, 1) for i in range(64)]).inputs()
    together = attend(inputs, split_span=512)
    for count in (1, 2, 7, 33):
        rows = {name: x[:count] for name, x in inputs.rows().items() if name not in ("positions", "block_table")}
        alone = attend(inputs, split_span=512, context_bound=300 + 61 * count, **rows)
        assert torch.equal(alone[:count], together[:count])
        assert alone[count:].isnan().all()


@pytest.mark.parametrize("case", [Case("8B", [(1500, 700)]), Case("", [(1500, 700)], 9, 3, 64)], ids=["8B", "SmolLM2"])
def test_with_a_fixed_span_a_token_does_not_depend_on_its_chunk(case: Case) -> None:
    """Bit for bit: alone, in verification and in chunks of any length, beside tokens before and behind it."""
    inputs = case.inputs()
    together = attend(inputs, split_span=512)
    for first, count in ((0, 1), (699, 1), (333, 1), (100, 6), (223, 6), (128, 40), (37, 300), (0, 699)):
        rows = {"first_token": inputs.first_token + first, "num_query": torch.full_like(inputs.num_query, count)}
        for bound in (inputs.context_bound, 8192):
            part = attend(inputs, split_span=512, max_num_query=count, context_bound=bound, **rows)
            tokens = slice(first, first + count)
            assert torch.equal(part[tokens], together[tokens]), f"{count} tokens from {first}"


def test_rows_may_start_anywhere_in_their_tensors() -> None:
    """A step attends its short rows and its long ones by slices of the same tensors, aligned to 8 bytes."""
    inputs = Case("", [(100, 1), (200, 1), (90, 40)]).inputs()
    out = torch.full_like(inputs.query, torch.nan)
    rows = inputs.rows()
    for start, end, longest in ((0, 2, 1), (2, 3, 40)):
        part = {name: rows[name][start:end] for name in ("first_token", "num_query", "slots")}
        attend(inputs, out, max_num_query=longest, **part)
    assert relative_error(out, inputs.expected(SCALING, torch.float64)) < MAX_ERROR[torch.bfloat16]


@pytest.mark.parametrize("is_merged_at_once", [True, False], ids=["at_once", "after"])
def test_a_captured_launch_follows_the_lengths(is_merged_at_once: bool) -> None:
    """Captured for contexts up to 8,192; replayed for whatever the tensors say by then."""
    long, short = (Case("", [(n, 4) for n in lengths]).inputs() for lengths in ((8192, 5000, 4, 900), (33, 70, 64, 4)))
    blocks = short.block_table.shape[1]
    short_table = torch.zeros_like(long.block_table)
    short_table[:, :blocks] = short.block_table
    inputs = deepcopy(long)
    out = torch.empty_like(long.query)
    arrivals = torch.zeros(4, 32, dtype=torch.int32, device=DEVICE) if is_merged_at_once else None
    graph = replayed(partial(attend, inputs, out, arrivals=arrivals))
    graph.replay()
    assert torch.equal(out, attend(long, arrivals=arrivals))
    inputs.layer[: short.layer.shape[0]] = short.layer
    inputs.query.copy_(short.query)
    inputs.block_table.copy_(short_table)
    inputs.slots.copy_(short.slots)
    inputs.positions.copy_(short.positions)
    graph.replay()
    assert relative_error(out, short.expected(SCALING, torch.float64)) < MAX_ERROR[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kv_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_kv_is_rounded_as_the_twin_rounds_it(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    num_tokens, num_blocks, heads, head_dim, block_size = 3000, 200, 8, 128, 32
    generator = torch.Generator(DEVICE).manual_seed(1)
    kv = torch.randn(2, heads, num_tokens, head_dim, generator=generator, device=DEVICE) * 100
    kv[0, 0, :100] = torch.nan
    kv[1, 1, :100] = -torch.inf
    key, value = kv.to(dtype).transpose(1, 2)
    place = torch.randperm(num_blocks * block_size, generator=generator, device=DEVICE)[:num_tokens]
    layers = [
        torch.zeros(num_blocks, 2, heads, block_size, 2 * head_dim, device=DEVICE).to(kv_dtype)[:, 1] for _ in "ab"
    ]
    write_kv(layers[0], key, value, place // block_size, place % block_size)
    reference.write_kv(layers[1], key, value, place // block_size, place % block_size)
    assert torch.equal(layers[0].float(), layers[1].float())
    assert layers[0].float().isfinite().all()
    assert layers[0].float().any()


def sampling_rows(num_rows: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    key = torch.randint(2**63 - 1, (num_rows,), generator=generator)
    position = torch.randint(10_000, (num_rows,), generator=generator)
    return key.to(DEVICE), position.to(DEVICE), torch.full((num_rows,), temperature, device=DEVICE)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.3])
@pytest.mark.parametrize("vocab_size", [49_152, 128_256])
@pytest.mark.parametrize(("num_rows", "num_positions"), [(1, 1), (64, 6)])
def test_gumbel_draws_equal_the_twin(num_rows: int, num_positions: int, vocab_size: int, temperature: float) -> None:
    generator = torch.Generator(DEVICE).manual_seed(2)
    logits = 3 * torch.randn(num_rows, num_positions, vocab_size, generator=generator, device=DEVICE)
    key, position, temperatures = sampling_rows(num_rows, temperature)
    found, _ = gumbel_argmax(logits, key, position, temperatures, Stream.TARGET)
    positions = position[:, None] + torch.arange(num_positions, device=DEVICE)
    scores = logits
    if temperature > 0:
        scores = logits / temperature + gumbel(key[:, None].expand_as(positions), positions, Stream.TARGET, vocab_size)
    gap = scores.amax(-1) - scores.gather(-1, found[..., None])[..., 0]
    assert gap.max() < 1e-5, "another token only where rounding decides"
    assert (found != scores.argmax(-1)).sum() <= 1
    if temperature == 0:
        assert torch.equal(found, scores.argmax(-1))


def test_rows_of_nan_end_and_stay_inside_the_vocabulary() -> None:
    logits = torch.full((4, 2, 50_000), torch.nan, device=DEVICE)
    found, _ = gumbel_argmax(logits, *sampling_rows(4, 1.0), Stream.TARGET)
    assert found.tolist() == [[0, 0]] * 4


def penalty_rows(num_rows: int, num_positions: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Contexts up to 8,192 tokens, a quarter of the rows without penalties: the kernel's arguments but the first."""
    generator = torch.Generator(DEVICE).manual_seed(num_rows)

    def random(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(num_rows + 2, generator=generator, device=DEVICE)

    token_ids = (random(0, 1)[:, None] ** 3 * torch.rand(1, 8300, device=DEVICE) * 49_000).int()
    num_tokens = random(1, 8192).long()
    slots = torch.randperm(num_rows + 2, generator=generator, device=DEVICE)[:num_rows]
    penalties = random(0.5, 2), random(-1, 1), random(-1, 1)
    for column, neutral in zip(penalties, (1, 0, 0), strict=True):
        column[::4] = neutral
    return token_ids, slots, num_tokens, (num_tokens * random(0, 1)).long().clamp(min=1), *penalties


@pytest.mark.parametrize("vocab_size", [49_152, 128_256])
@pytest.mark.parametrize(("num_rows", "num_positions"), [(1, 1), (64, 6)])
def test_penalties_equal_the_twin(num_rows: int, num_positions: int, vocab_size: int) -> None:
    rows = penalty_rows(num_rows, num_positions)
    logits = torch.randn(num_rows, num_positions, vocab_size, device=DEVICE)
    expected, counts = logits.clone(), torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=DEVICE)
    reference.penalise(expected, *rows)
    for _ in range(2):
        found = logits.clone()
        penalise(found, *rows, counts)
        assert torch.equal(found, expected)
        assert not counts.any()


def truncation_rows(num_rows: int) -> tuple[Tensor, ...]:
    """Every combination of parameters, in turn: the kernel's arguments but the first."""
    combinations = itertools.product((0.7, 1.0), (0.0, 0.05), (0, 1, 40, 3000), (1.0, 0.9, 0.95))
    columns = zip(*itertools.islice(itertools.cycle(combinations), num_rows), strict=True)
    dtypes = (torch.float32, torch.float32, torch.int64, torch.float32)
    slots = torch.arange(num_rows, device=DEVICE)
    return slots, *(torch.tensor(x, dtype=t, device=DEVICE) for x, t in zip(columns, dtypes, strict=True))


@pytest.mark.parametrize("scale", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("vocab_size", [49_152, 128_256])
@pytest.mark.parametrize(("num_rows", "num_positions"), [(1, 1), (64, 6)])
def test_truncation_keeps_what_the_twin_keeps(num_rows: int, num_positions: int, vocab_size: int, scale: float) -> None:
    generator = torch.Generator(DEVICE).manual_seed(num_rows)
    logits = scale * torch.randn(num_rows, num_positions, vocab_size, generator=generator, device=DEVICE)
    logits = logits.bfloat16().float()  # ties
    rows = truncation_rows(num_rows)
    found, again = logits.clone(), logits.clone()
    truncate(found, *rows)
    check_truncated(found, logits, *rows)
    truncate(again, *rows)
    assert torch.equal(again, found), "a race"


def test_broken_rows_do_not_hang_and_can_be_told() -> None:
    rows = truncation_rows(48)
    logits = torch.full((48, 1, 128_256), torch.nan, device=DEVICE)
    truncate(logits, *rows)
    assert logits.isnan().all()
    logits = torch.full((48, 1, 128_256), -torch.inf, device=DEVICE)
    truncate(logits, *rows)
    assert (logits == -torch.inf).all()


@pytest.mark.parametrize("takes_last", [False, True])
@pytest.mark.parametrize("num_rows", [1, 64])
def test_lookup_equals_the_proposer(num_rows: int, takes_last: bool) -> None:
    generator = torch.Generator(DEVICE).manual_seed(num_rows)
    inputs = lookup_inputs(num_rows, generator)
    twin = NgramProposer(5, 2, 4, takes_last=takes_last, device=torch.device(DEVICE)).propose_eagerly(inputs)
    ids, counts = lookup(inputs, lookup_rule(takes_last=takes_last))
    assert torch.equal(ids, twin.ids)
    assert torch.equal(counts, twin.counts)
    assert counts.any()


def lookup_inputs(num_rows: int, generator: torch.Generator) -> ProposeInput:
    """Texts up to 8,192 tokens of an alphabet small enough to repeat itself."""
    token_ids = torch.randint(40, (num_rows + 3, 8300), generator=generator, device=DEVICE, dtype=torch.int32)
    return ProposeInput(
        token_ids=token_ids,
        slots=torch.randperm(num_rows + 3, generator=generator, device=DEVICE)[:num_rows],
        num_tokens=torch.randint(1, 8193, (num_rows,), generator=generator, device=DEVICE),
        max_drafts=torch.randint(1, 6, (num_rows,), generator=generator, device=DEVICE, dtype=torch.int32),
        max_num_tokens=8192,
    )


def lookup_rule(*, takes_last: bool) -> Tensor:
    return torch.tensor([2, 4, takes_last], dtype=torch.int32, device=DEVICE)


def lookup(inputs: ProposeInput, rule: Tensor) -> tuple[Tensor, Tensor]:
    tensors = (inputs.token_ids, inputs.slots, inputs.num_tokens, inputs.max_drafts)
    ids, counts = ngram_lookup(*tensors, inputs.max_num_tokens, rule, 5)
    return ids, counts


def test_no_launch_waits_and_all_can_be_captured() -> None:
    inputs = Case("", [(1000, 6)] * 4).inputs()
    logits = torch.randn(4, 6, 50_000, device=DEVICE)
    rows = sampling_rows(4, 1.0)
    texts, rule = lookup_inputs(4, torch.Generator(DEVICE).manual_seed(1)), lookup_rule(takes_last=False)
    layer = torch.zeros_like(inputs.layer)
    key = torch.randn(24, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    places = torch.arange(24, device=DEVICE)
    out = torch.empty_like(inputs.query)
    chosen, drafted = torch.empty(4, 6, dtype=torch.int64, device=DEVICE), torch.empty(4, 5, device=DEVICE).int()
    processed, counts = torch.empty_like(logits), torch.zeros(4, 50_000, dtype=torch.int32, device=DEVICE)
    penalties, truncation = penalty_rows(4, 6), truncation_rows(16)
    truncation = (truncation[0][12:], *truncation[1:])
    drafts, kept = draft_inputs(4, 5, 50_000, "full", DEVICE, torch.float32), texts.slots.new_zeros(4)
    weight = torch.randn(1024, 128, device=DEVICE, dtype=torch.bfloat16)
    products = torch.empty(24, 8, 1024, device=DEVICE, dtype=torch.bfloat16)

    def step() -> None:
        write_kv(layer, key, key, places % 8, places)
        attend(inputs, out)
        chosen.copy_(gumbel_argmax(logits, *rows, Stream.TARGET)[0])
        drafted.copy_(lookup(texts, rule)[0])
        penalise(processed.copy_(logits), *penalties, counts)
        truncate(processed, *truncation)
        kept.copy_(verify_drafts(**drafts, method=Method.BLOCK)[0])
        products.copy_(invariant_linear(key, weight) * invariant_mean(key))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    results = [layer, out, chosen, drafted, processed, products, kept]
    eager = [x.clone() for x in results]
    graph = replayed(step)
    for x in results:
        x.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, eager, strict=True))
