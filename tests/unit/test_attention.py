"""Paged attention: either implementation against an explicit softmax, and blocks as storage."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from server.errors import ConfigError
from server.kernels import cpu_attention
from server.kernels.reference import attention, attention_mask
from server.model.attention import (
    ATTENTION_NAME,
    CPU_ATTENTION_NAME,
    CUDA_ATTENTION_NAME,
    AttentionGroup,
    AttentionStep,
    attention_name,
    paged_attention,
    paged_attention_cpu,
    paged_attention_cuda,
)
from server.worker.kv_tensors import KVGeometry, allocate_kv, num_blocks_for

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 16, 16


NEEDED_NAMES = {paged_attention_cpu: CPU_ATTENTION_NAME, paged_attention_cuda: CUDA_ATTENTION_NAME}


@pytest.fixture(params=[paged_attention, *NEEDED_NAMES])
def attend(request: pytest.FixtureRequest, device_name: str) -> Callable[..., tuple[Tensor, None]]:
    """Every implementation that the device has."""
    name = attention_name(torch.device(device_name), torch.float32, HEAD_DIM)
    if NEEDED_NAMES.get(request.param, name) != name:
        pytest.skip(f"{name} is what {device_name} has")
    return request.param  # type: ignore[no-any-return]


def rows_of(table: Tensor, num_query: int) -> dict[str, Tensor]:
    """The fields of a step in which row i is in slot i, padded to `num_query` tokens."""
    rows = torch.arange(len(table), device=table.device)
    return {
        "first_token": rows * num_query,
        "num_query": torch.full_like(rows, num_query),
        "slots": rows,
        "block_table": table,
    }


def slow_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    start: int = 0,
) -> Tensor:
    """One head, [num_query, d] against [length, d]; the queries are the last positions."""
    outputs = []
    for i, q in enumerate(query):
        position = len(keys) - len(query) + i
        first = start if window is None else max(start, position + 1 - window)
        if first > position:
            outputs.append(torch.zeros_like(q))
            continue
        scores = [float(q @ keys[j]) * scaling for j in range(first, position + 1)]
        if softcap is not None:
            scores = [softcap * math.tanh(score / softcap) for score in scores]
        total = sum(math.exp(score) for score in scores) + (0 if sinks is None else math.exp(float(sinks)))
        weights = torch.tensor([math.exp(score) / total for score in scores])
        outputs.append(weights @ values[first : position + 1])
    return torch.stack(outputs)


OPTIONS = [
    {},
    {"window": 5},
    {"softcap": 0.7},
    {"sinks": True},
    {"window": 3, "softcap": 2.0, "sinks": True},
    {"start": 2},
    {"start": 17, "softcap": 2.0, "sinks": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", [(20,), (3, 40), (17, 33, 1)], ids=str)
@pytest.mark.parametrize("num_query", [1, 3])
def test_paged_attention_equals_an_explicit_softmax(
    attend: Callable[..., tuple[Tensor, None]],
    device_name: str,
    lengths: tuple[int, ...],
    num_query: int,
    options: dict[str, float | bool],
) -> None:
    """Rows of several lengths whose blocks lie anywhere, padded as the runner pads them."""
    generator = torch.Generator().manual_seed(sum(lengths))
    num_blocks = sum(-(-length // BLOCK) for length in lengths)
    geometry = KVGeometry(2, KV_HEADS, HEAD_DIM, BLOCK, torch.float32)
    kv = allocate_kv(geometry, num_blocks + 1, torch.device("cpu"))
    kv.normal_(generator=generator)  # what earlier owners left
    order = (1 + torch.randperm(num_blocks, generator=generator)).tolist()
    max_blocks = max(-(-length // BLOCK) for length in lengths)
    table = torch.zeros(len(lengths), max_blocks, dtype=torch.int64)
    positions = torch.zeros(len(lengths), num_query, dtype=torch.int64)
    write_blocks, write_offsets, histories = [], [], []
    for row, length in enumerate(lengths):
        blocks = [order.pop() for _ in range(-(-length // BLOCK))]
        table[row, : len(blocks)] = torch.tensor(blocks)
        keys, values = (torch.randn(length, KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
        histories.append((keys, values))
        num_new = min(num_query, length)
        for position in range(length - num_new):
            kv[blocks[position // BLOCK], 1, :, position % BLOCK] = torch.cat((keys[position], values[position]), -1)
        for offset in range(num_query):
            position = length - num_new + offset if offset < num_new else 0
            positions[row, offset] = position
            write_blocks.append(blocks[position // BLOCK] if offset < num_new else 0)
            write_offsets.append(position % BLOCK)
    total = len(lengths) * num_query
    query = torch.randn(1, HEADS, total, HEAD_DIM, generator=generator)
    new_keys, new_values = (torch.randn(1, KV_HEADS, total, HEAD_DIM, generator=generator) for _ in range(2))
    for row, (keys, values) in enumerate(histories):
        for offset in range(min(num_query, len(keys))):
            position = int(positions[row, offset])
            new_keys[0, :, row * num_query + offset] = keys[position]
            new_values[0, :, row * num_query + offset] = values[position]
    sinks = torch.linspace(-1, 2, HEADS) if options.get("sinks") else None
    table, positions = table.to(device_name), positions.to(device_name)
    step = AttentionStep(
        write_blocks=torch.tensor(write_blocks, device=device_name),
        write_offsets=torch.tensor(write_offsets, device=device_name),
        positions=positions.flatten(),
        groups=(AttentionGroup(0, len(lengths), 0, num_query, max_blocks * BLOCK),),
        starts=torch.full_like(table[:, 0], options["start"]) if "start" in options else None,
        **rows_of(table, num_query),
    )
    window, softcap = options.get("window"), options.get("softcap")
    output, weights = attend(
        SimpleNamespace(kv_blocks=kv.to(device_name)[:, 1]),
        query.to(device_name),
        new_keys.to(device_name),
        new_values.to(device_name),
        None,
        attention_step=step,
        scaling=0.5,
        sliding_window=window,
        softcap=softcap,
        s_aux=None if sinks is None else sinks.to(device_name),
        an_argument_of_some_architecture=True,
    )
    assert weights is None
    assert output.shape == (1, total, HEADS, HEAD_DIM)
    for row, (keys, values) in enumerate(histories):
        num_new = min(num_query, len(keys))
        for head in range(HEADS):
            expected = slow_attention(
                query[0, head, row * num_query : row * num_query + num_new],
                keys[:, head // 2],
                values[:, head // 2],
                0.5,
                window,  # type: ignore[arg-type]
                softcap,
                None if sinks is None else sinks[head],
                options.get("start", 0),  # type: ignore[arg-type]
            )
            got = output[0, row * num_query : row * num_query + num_new, head].cpu()
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_nan_is_stored_as_zero(attend: Callable[..., tuple[Tensor, None]], device_name: str) -> None:
    """The block of a broken request may go to another one, which must not read NaN behind its mask."""
    kv = allocate_kv(KVGeometry(1, KV_HEADS, HEAD_DIM, BLOCK, torch.float32), 2, torch.device(device_name))
    one, zero = (
        torch.ones(1, dtype=torch.int64, device=device_name),
        torch.zeros(1, dtype=torch.int64, device=device_name),
    )
    values = torch.full((1, KV_HEADS, 1, HEAD_DIM), float("nan"), device=device_name)
    query = torch.ones(1, HEADS, 1, HEAD_DIM, device=device_name)
    step = AttentionStep(
        write_blocks=one,
        write_offsets=zero,
        positions=zero,
        groups=(AttentionGroup(0, 1, 0, 1, 1),),
        **rows_of(one[None], 1),
    )
    attend(SimpleNamespace(kv_blocks=kv[:, 0]), query, values, values, None, attention_step=step, scaling=1.0)
    assert torch.isfinite(kv).all()


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "is_built", "expected"),
    [
        ("cpu", torch.bfloat16, 64, True, CPU_ATTENTION_NAME),
        ("cpu", torch.bfloat16, 64, False, ATTENTION_NAME),
        ("cpu", torch.float16, 64, True, ATTENTION_NAME),
        ("cpu", torch.float32, 72, True, ATTENTION_NAME),
        ("meta", torch.bfloat16, 64, True, ATTENTION_NAME),
        ("cuda", torch.bfloat16, 64, True, CUDA_ATTENTION_NAME),
    ],
)
def test_operators_are_used_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, head_dim: int, is_built: bool, expected: str
) -> None:
    monkeypatch.setattr(cpu_attention, "load", lambda folder: is_built)
    assert attention_name(torch.device(device), dtype, head_dim) == expected


def test_the_mask_is_made_once_per_window() -> None:
    positions, index = torch.tensor([4, 5]), torch.zeros(2, dtype=torch.int64)
    group = AttentionGroup(0, 1, 0, 2, 6)
    fields = rows_of(torch.ones(1, 3, dtype=torch.int64), 2)
    step = AttentionStep(write_blocks=index, write_offsets=index, positions=positions, groups=(group,), **fields)
    assert step.mask(group, 16, None) is step.mask(group, 16, None)
    assert step.mask(group, 16, 2)[0, 0].int().tolist() == [[0, 0, 0, 1, 1] + [0] * 11, [0, 0, 0, 0, 1, 1] + [0] * 10]
    assert torch.equal(step.mask(group, 16, None), attention_mask(positions[None], BLOCK, None))


def test_arrivals_are_zeroed_once_per_step_and_number_of_heads() -> None:
    """Layers leave them zero for each other; another step, which may be captured, has its own."""
    index = torch.zeros(3, dtype=torch.int64)
    group = AttentionGroup(0, 3, 0, 1, 6)
    fields = rows_of(torch.ones(3, 3, dtype=torch.int64), 1)
    step = AttentionStep(write_blocks=index, write_offsets=index, positions=index, groups=(group,), **fields)
    arrivals = step.arrivals(HEADS)
    assert arrivals is step.arrivals(HEADS)
    assert torch.equal(arrivals, torch.zeros(3, HEADS, dtype=torch.int32))
    assert step.arrivals(2 * HEADS).shape == (3, 2 * HEADS)
    assert replace(step, groups=()).arrivals(HEADS) is not arrivals


def test_keys_in_a_narrower_type_are_widened() -> None:
    query, key, value = (torch.randn(1, 2, 1, 8) for _ in range(3))
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    narrow = attention(query, key.bfloat16(), value.bfloat16(), mask, 1.0)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow, value, rtol=1e-2, atol=1e-2)


def test_a_budget_buys_whole_blocks_and_at_least_two() -> None:
    geometry = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=8, block_size=16, dtype=torch.bfloat16)
    assert geometry.block_nbytes == 3 * 2 * 2 * 8 * 16 * 2
    assert num_blocks_for(geometry, 5 * geometry.block_nbytes + 1) == 5
    kv = allocate_kv(geometry, 5, torch.device("cpu"))
    assert kv.shape == (5, 3, 2, 16, 16)
    assert kv.is_contiguous()
    assert kv[0].nbytes == geometry.block_nbytes
    with pytest.raises(ConfigError, match=f"{2 * geometry.block_nbytes}"):
        num_blocks_for(geometry, 2 * geometry.block_nbytes - 1)
