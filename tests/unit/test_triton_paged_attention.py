"""Paged attention's kernel against its twin, through Triton's interpreter where there is no GPU."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from server.kernels import attention_tiling
from server.kernels import paged_attention as module
from server.kernels.attention_tiling import MAX_SPLITS, Splits, choose_splits, choose_tiling, fills_device
from server.kernels.paged_attention import paged_attention
from server.model.attention import AttentionGroup, AttentionOptions, attend_by_tensors, attend_on_cuda
from tests.fakes.kernel_inputs import AttentionInputs, attention_inputs, starting_at
from tests.fakes.paged_steps import block_table, step_over

UNTOUCHED = 7.0


def attend(inputs: AttentionInputs, **options: Any) -> torch.Tensor:
    """The kernel's output; what it does not write is UNTOUCHED."""
    out = torch.full_like(inputs.query, UNTOUCHED)
    paged_attention(
        inputs.query,
        inputs.layer,
        out,
        **inputs.rows(),
        max_num_query=inputs.max_num_query,
        context_bound=inputs.context_bound,
        scaling=0.3,
        **options,
    )
    return out


def check(inputs: AttentionInputs, *, num_splits: int | None = None, **options: Any) -> None:
    splits = None if num_splits is None else Splits(num_splits, num_splits)
    forced = nullcontext() if splits is None else patch.object(module, "choose_splits", lambda *_: splits)
    with forced:
        out = attend(inputs, **options)
    for name in ("split_span", "arrivals"):
        options.pop(name, None)
    expected = inputs.expected(0.3, **options).nan_to_num(nan=UNTOUCHED)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)  # float32 sums in another order


def arrivals_for(inputs: AttentionInputs) -> torch.Tensor:
    rows, heads = inputs.first_token.shape[0], inputs.query.shape[1]
    return torch.zeros(rows, heads, dtype=torch.int32, device=inputs.query.device)


@pytest.mark.parametrize(("block_size", "num_splits"), [(16, None), (48, 1), (256, 4)])
@pytest.mark.parametrize("rows", [[(1, 1)], [(95, 1), (33, 1), (1, 1)], [(70, 5), (5, 5), (33, 1)]], ids=str)
def test_short_queries(
    kernel_device: str, rows: list[tuple[int, int]], block_size: int, num_splits: int | None
) -> None:
    inputs = attention_inputs(rows, heads=6, kv_heads=2, head_dim=16, block_size=block_size, device=kernel_device)
    check(inputs, num_splits=num_splits)


@pytest.mark.parametrize(
    "rows",
    [
        [(50, 50)],  # a prompt
        [(100, 40), (17, 17)],  # a later chunk, and rows of unequal length
        [(64, 32), (0, 0), (32, 32)],  # a row without tokens, and edges of tiles
    ],
    ids=str,
)
def test_long_queries(kernel_device: str, rows: list[tuple[int, int]]) -> None:
    inputs = attention_inputs(rows, heads=2, kv_heads=1, head_dim=16, block_size=16, device=kernel_device)
    check(inputs)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (7, 1), (16, 1)])
def test_query_heads_share_kv_heads(kernel_device: str, heads: int, kv_heads: int) -> None:
    inputs = attention_inputs(
        [(40, 3)], heads=heads, kv_heads=kv_heads, head_dim=16, block_size=16, device=kernel_device
    )
    check(inputs, num_splits=2)


@pytest.mark.parametrize("head_dim", [24, 64, 80, 256])
def test_head_sizes(kernel_device: str, head_dim: int) -> None:
    inputs = attention_inputs([(40, 2)], heads=2, kv_heads=1, head_dim=head_dim, block_size=16, device=kernel_device)
    check(inputs, num_splits=2)


OPTIONS: list[dict[str, Any]] = [
    {"sliding_window": 1},
    {"sliding_window": 20},
    {"softcap": 0.7},
    {"sinks": True},
    {"sliding_window": 40, "softcap": 2.0, "sinks": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("num_query", "num_splits"), [(2, 1), (2, 4), (37, None)])
def test_options(kernel_device: str, num_query: int, num_splits: int | None, options: dict[str, Any]) -> None:
    rows = [(130, num_query), (38, num_query)]
    inputs = attention_inputs(rows, heads=4, kv_heads=2, head_dim=16, block_size=16, device=kernel_device)
    if options.get("sinks"):
        options = {**options, "sinks": torch.linspace(-1, 2, 4, device=kernel_device)}
    check(inputs, num_splits=num_splits, **options)


@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"sliding_window": 40}, {"split_span": 128}], ids=str)
@pytest.mark.parametrize(("num_query", "num_splits"), [(2, 1), (2, 8), (37, None)])
def test_nothing_is_seen_or_read_below_a_start(
    kernel_device: str, num_query: int, num_splits: int | None, options: dict[str, Any]
) -> None:
    """Starts within tiles and at their edge, at a row's last token, behind all of them, and none."""
    rows = [(130, num_query), (200, num_query), (96, num_query), (40, num_query), (150, num_query)]
    inputs = attention_inputs(rows, heads=4, kv_heads=2, head_dim=16, block_size=16, device=kernel_device, padding=1)
    inputs, starts = starting_at(inputs, (95, 32, 95, 40, 0))
    if options.get("sinks"):
        options = {**options, "sinks": torch.linspace(-1, 2, 4, device=kernel_device)}
    check(inputs, num_splits=num_splits, starts=starts, **options)
    first = int(inputs.first_token[3])
    assert attend(inputs, starts=starts, **options)[first : first + num_query].count_nonzero() == 0


@pytest.mark.parametrize("options", [{}, {"sliding_window": 8}], ids=str)
@pytest.mark.parametrize("num_query", [2, 20])
def test_padding_behind_a_row_s_tokens_does_no_harm(
    kernel_device: str, num_query: int, options: dict[str, Any]
) -> None:
    rows = [(60, num_query), (25, num_query)]
    inputs = attention_inputs(rows, heads=2, kv_heads=1, head_dim=16, block_size=16, device=kernel_device, padding=3)
    check(inputs, num_splits=2 if num_query == 2 else None, **options)


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_narrower_cache_is_converted_as_it_is_read(kernel_device: str, kv_dtype: torch.dtype) -> None:
    inputs = attention_inputs(
        [(40, 2)], heads=2, kv_heads=1, head_dim=16, block_size=16, device=kernel_device, kv_dtype=kv_dtype
    )
    check(inputs, num_splits=2)


def test_splits_beyond_the_context_add_nothing(kernel_device: str) -> None:
    """A captured launch is cut for the longest context that may come."""
    inputs = attention_inputs([(33, 1), (2, 1)], heads=2, kv_heads=1, head_dim=16, block_size=16, device=kernel_device)
    buffers: list[torch.Tensor] = []

    def untouched(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        buffers.append(torch.full(shape, UNTOUCHED, **options))
        return buffers[-1]

    with patch.object(torch, "empty", untouched):
        check(inputs, num_splits=16)
    partial, lse = buffers
    is_live = torch.zeros(2, 1, 16, 1, dtype=torch.bool, device=kernel_device)
    is_live[0, :, :2] = is_live[1, :, :1] = True  # tiles of 32 positions
    assert (partial == UNTOUCHED).all(-1, keepdim=True).eq(~is_live).all(), "they store no values"
    assert lse.isneginf().eq(~is_live[..., 0]).all()


@pytest.mark.parametrize(
    ("num_query", "splits", "options"),
    [
        (1, Splits(1, 4), {}),
        (5, Splits(1, 4), {"sliding_window": 100, "sinks": True}),
        (5, Splits(2, 8), {"softcap": 0.7}),
        (1, Splits(3, 4), {"sliding_window": 20}),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_merged_at_once", [True, False], ids=["at_once", "after"])
def test_a_row_is_split_by_its_own_length(
    kernel_device: str, is_merged_at_once: bool, num_query: int, splits: Splits, options: dict[str, Any]
) -> None:
    """One long row among short ones, in pieces of 64 positions at most where there are programs for that."""
    rows = [(33, num_query), (260, num_query), (0, 0), (5, num_query), (130, num_query)]
    inputs = attention_inputs(rows, heads=4, kv_heads=2, head_dim=16, block_size=16, device=kernel_device, padding=1)
    if options.get("sinks"):
        options = {**options, "sinks": torch.linspace(-1, 2, 4, device=kernel_device)}
    arrivals = arrivals_for(inputs) if is_merged_at_once else None
    shorter = patch.object(module, "LONGEST_SPLIT", 64)
    with shorter, patch.object(module, "choose_splits", lambda *_: splits):
        for _ in range(2):
            check(inputs, arrivals=arrivals, **options)
            assert arrivals is None or not arrivals.any(), "the next launch starts from zero"


@pytest.mark.parametrize(
    ("rows", "heads", "starts"),
    [([(200, 1)], 2, None), ([(20 + 7 * i, 1 + i % 5) for i in range(12)], 2, 5), ([(130, 16)], 16, 120)],
    ids=["one row", "many rows", "several tiles"],
)
def test_splits_are_merged_by_the_last_to_end(
    kernel_device: str, rows: list[tuple[int, int]], heads: int, starts: int | None
) -> None:
    inputs = attention_inputs(rows, heads=heads, kv_heads=1, head_dim=16, block_size=16, device=kernel_device)
    options: dict[str, Any] = {}
    if starts is not None:
        inputs, options["starts"] = starting_at(inputs, [starts * (1 + i) for i in range(len(rows))])
    with patch.object(module, "choose_splits", lambda *_: Splits(4, 4)):
        check(inputs, arrivals=arrivals_for(inputs), **options)


def test_rows_of_one_part_leave_nothing_to_merge(kernel_device: str) -> None:
    """What a row of one part finds goes straight to the output; programs of the other splits do nothing."""
    inputs = attention_inputs(
        [(200, 1), (64, 1)], heads=2, kv_heads=1, head_dim=16, block_size=16, device=kernel_device
    )
    buffers: list[torch.Tensor] = []

    def untouched(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        buffers.append(torch.full(shape, UNTOUCHED, **options))
        return buffers[-1]

    shorter = patch.object(module, "LONGEST_SPLIT", 64)
    splits = patch.object(module, "choose_splits", lambda *_: Splits(1, 8))
    with shorter, splits, patch.object(torch, "empty", untouched):
        check(inputs, arrivals=arrivals_for(inputs))
    partial, lse = buffers
    is_live = torch.zeros(2, 2, 8, dtype=torch.bool, device=kernel_device)
    is_live[0, :, :4] = True  # 7 tiles of 32 positions, two to a part
    assert lse.ne(UNTOUCHED).equal(is_live)
    assert partial.ne(UNTOUCHED).all(-1).equal(is_live)


def test_the_layers_of_a_step_share_their_arrivals(kernel_device: str) -> None:
    table = block_table(num_slots=3, num_blocks=4).to(kernel_device)
    pieces = [(0, 9, 1), (2, 55, 1), (1, 0, 1)]
    step = replace(step_over(pieces, table, 16), groups=(AttentionGroup(0, 3, 0, 1, 60),), starts=None)
    layer = torch.randn(13, 2, 16, 32, device=kernel_device)
    query, key, value = (torch.randn(3, heads, 16, device=kernel_device) for heads in (4, 2, 2))
    options = AttentionOptions(scaling=0.3, sliding_window=None, softcap=None, sinks=None)
    expected = attend_by_tensors(step, layer.clone(), query, key, value, options)
    given: list[torch.Tensor] = []

    def attending(*args: Any, **options: Any) -> None:
        given.append(options["arrivals"])
        paged_attention(*args, **options)

    splits = patch.object(module, "choose_splits", lambda *_: Splits(2, 2))
    filling = patch("server.model.attention.fills_device", lambda *_: True)
    with splits, filling, patch.object(module, "paged_attention", attending):
        for _ in range(2):
            found = attend_on_cuda(step, layer, query, key, value, options)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert given[0] is given[1] is step.arrivals(4)
    assert not given[0].any()


def test_rows_of_similar_length_are_one_launch(kernel_device: str) -> None:
    """Each has as many tokens as it has: nothing is written for a shorter one where the next begins."""
    pieces = [(0, 20, 1), (1, 9, 1), (2, 0, 5), (3, 4, 7), (4, 0, 17), (5, 12, 18), (6, 0, 31)]
    table = block_table(num_slots=len(pieces), num_blocks=4).to(kernel_device)
    step = step_over(pieces, table, 16)
    num_tokens = len(step.positions)
    layer = torch.randn(1 + table.numel(), 2, 16, 32, device=kernel_device)
    query, key, value = (torch.randn(num_tokens, heads, 16, device=kernel_device) for heads in (4, 2, 2))
    options = AttentionOptions(scaling=0.3, sliding_window=None, softcap=None, sinks=None)
    expected = attend_by_tensors(step, layer.clone(), query, key, value, options)
    with patch.object(module, "paged_attention", wraps=paged_attention) as launched:
        found = attend_on_cuda(step, layer, query, key, value, options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    given = [(len(launch.args[3]), launch.kwargs["max_num_query"]) for launch in launched.call_args_list]
    assert given == [(2, 1), (2, 7), (3, 31)]
    assert [launch.kwargs["context_bound"] for launch in launched.call_args_list] == [21, 11, 31]


def test_arrivals_that_do_not_fit_are_refused(kernel_device: str) -> None:
    inputs = attention_inputs([(20, 1)] * 3, heads=2, kv_heads=2, head_dim=16, block_size=16, device=kernel_device)
    with pytest.raises(ValueError, match="5 arrivals for 6"):
        attend(inputs, arrivals=arrivals_for(inputs).flatten()[:5])
    with pytest.raises(ValueError, match="second launch"):
        attend(inputs, arrivals=arrivals_for(inputs), split_span=128)


@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"sliding_window": 100, "sinks": True}], ids=str)
def test_splits_of_a_fixed_span(kernel_device: str, options: dict[str, Any]) -> None:
    """Some are empty: behind a short row's end, and in front of a window."""
    rows = [(300, 3), (20, 3), (257, 3)]
    inputs = attention_inputs(rows, heads=2, kv_heads=1, head_dim=16, block_size=16, device=kernel_device)
    if options.get("sinks"):
        options = {**options, "sinks": torch.linspace(-1, 2, 2, device=kernel_device)}
    check(inputs, split_span=128, **options)


@pytest.mark.parametrize("start", [None, 150])
def test_with_a_fixed_span_a_token_does_not_depend_on_what_is_beside_it(kernel_device: str, start: int | None) -> None:
    inputs = attention_inputs(
        [(300, 40), (200, 3)], heads=2, kv_heads=1, head_dim=16, block_size=16, device=kernel_device
    )
    starts = None
    if start is not None:
        inputs, starts = starting_at(inputs, (start, 0))
    together = attend(inputs, split_span=128, starts=starts)
    one = torch.ones_like(inputs.num_query[:1])
    for token in (0, 2, 39):  # of the prompt's last 40
        alone = replace(
            inputs,
            first_token=inputs.first_token[:1] + token,
            num_query=one,
            slots=inputs.slots[:1],
            max_num_query=1,
            context_bound=2048,
        )
        assert torch.equal(attend(alone, split_span=128, starts=starts)[token], together[token])


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("layer", lambda x: x[..., :-2], "holds no K and V"),
        ("query", lambda x: x.transpose(0, 2), "holds no K and V"),
        ("positions", lambda x: x[:-1], "positions is not one"),
        ("slots", lambda x: x[:-1], "differ in length"),
        ("positions", lambda x: x.repeat_interleave(2)[::2], "an index has gaps"),
    ],
)
def test_what_does_not_fit_is_refused(kernel_device: str, name: str, change: Any, reason: str) -> None:
    inputs = attention_inputs([(20, 3), (4, 3)], heads=2, kv_heads=1, head_dim=16, block_size=16, device=kernel_device)
    tensors: dict[str, Any] = {"query": inputs.query, "layer": inputs.layer, **inputs.rows()}
    tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=reason):
        paged_attention(**tensors, out=tensors["query"].clone(), max_num_query=3, context_bound=21, scaling=0.3)


def test_a_span_that_does_not_hold_whole_tiles_is_refused(kernel_device: str) -> None:
    inputs = attention_inputs([(20, 1)], heads=2, kv_heads=1, head_dim=16, block_size=16, device=kernel_device)
    with pytest.raises(ValueError, match="multiple of 128"):
        attend(inputs, split_span=100)


def test_splits_give_each_multiprocessor_a_program() -> None:
    """An H200's 132, and 8 KV heads; long rows get more, up to a wave for each and eight for all."""
    device = torch.device("cpu")
    with patch.object(attention_tiling, "num_multiprocessors", lambda _: 132):
        found = {rows: choose_splits(8 * rows, 8, 1, 8192, 64, device) for rows in (1, 2, 4, 8, 16, 32, 64, 256)}
        assert found == {
            1: Splits(16, 16),
            2: Splits(8, 8),
            4: Splits(4, 8),
            8: Splits(2, 8),
            16: Splits(1, 8),
            32: Splits(1, 4),
            64: Splits(1, 2),
            256: Splits(1, 1),
        }
        assert choose_splits(8, 8, 1, 129, 64, device) == Splits(3, 4), "no split without a tile"
        assert choose_splits(128, 8, 1, 1024, 64, device) == Splits(1, 1), "no row is long enough"
        assert choose_splits(64, 8, 5, 131_072, 64, device) == Splits(2, 16)
        assert choose_splits(1, 1, 1, 131_072, 64, device).most == MAX_SPLITS
        assert choose_splits(24, 24, 17, 131_072, 64, device) == Splits(4, 4), "prompts are split alike"
        for rows in range(1, 40):
            if fills_device(rows, 8, device):
                assert choose_splits(8 * rows, 8, 1, 8192, 64, device).fewest == 1
        assert [fills_device(rows, 8, device) for rows in (8, 9)] == [False, True]


def test_tiles_are_what_a_product_of_tiles_takes() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for head_dim in (64, 128, 256):
            for rows in (1, 16, 24, 96, 8192):
                tiling = choose_tiling(rows, head_dim, dtype)
                assert 16 <= tiling.block_m <= 128
                assert tiling.block_m.bit_count() == tiling.block_n.bit_count() == 1
