"""The C++ attention operators against their twin, and against themselves in other company."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from server.kernels import cpu_attention
from server.kernels.reference import attention, attention_mask
from server.model.cache import cache_root

F32, BF16, F8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn

TOLERANCES = {
    # A score of 20, the largest here, is off by some 20 * 2^-22 after up to 256 products, its weight by as
    # much relative to itself, and the values that are weighed have size 1.
    (F32, F32): (1e-5, 1e-5),
    # What the cache holds is exact in float32, so nothing more is lost.
    (F32, BF16): (1e-5, 1e-5),
    (F32, F8): (1e-5, 1e-5),
    # The result is rounded to 8 bits (2^-9 of it); weights are rounded to 8 bits before they meet the
    # values where the CPU multiplies bfloat16: 2^-9 of a sum of values of size 1, whose errors mostly cancel.
    (BF16, BF16): (2**-8, 4e-3),
    (BF16, F32): (2**-8, 4e-3),
    (BF16, F8): (2**-8, 4e-3),
}
"""Relative and absolute, by the types of the query and of the cache."""

POISON = 3.0e38
"""In every slot that nobody may read: one touch, weighted by however little, would show."""


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    if not cpu_attention.load(cache_root() / "kernels"):
        pytest.skip("no C++ compiler")


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Shape:
    """A batch: rows of (positions, query tokens, which come last), and the model they are for."""

    rows: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 32
    query_dtype: torch.dtype = F32
    kv_dtype: torch.dtype = F32
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    starts: tuple[int, ...] | None = None

    def __str__(self) -> str:
        changed = (f"{name}={value}" for name, value in vars(self).items() if value != getattr(Shape, name, None))
        return " ".join(changed).replace("torch.", "")


class Batch:
    """Random numbers in that shape, in blocks that lie anywhere, behind a layer that is a strided view."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape = shape
        lengths = [length for length, _ in shape.rows]
        num_blocks = [-(-length // shape.block_size) for length in lengths]
        poison = min(POISON, torch.finfo(shape.kv_dtype).max)
        layers = torch.full(
            (sum(num_blocks) + 2, 3, shape.kv_heads, shape.block_size, 2 * shape.head_dim), poison, dtype=shape.kv_dtype
        )
        self.layer = layers[:, 1]
        order = (1 + torch.randperm(sum(num_blocks), generator=generator)).tolist()
        # Rows take their slots from the end; the table names no block behind a row's own.
        self.table = torch.full((len(lengths) + 1, max(num_blocks) + 1), -1, dtype=torch.int32)
        self.slots = torch.arange(len(lengths), 0, -1)
        self.num_query = torch.tensor([count for _, count in shape.rows])
        self.first_token = self.num_query.cumsum(0) - self.num_query
        self.kv: list[Tensor] = []
        for slot, length, count in zip(self.slots.tolist(), lengths, num_blocks, strict=True):
            blocks = torch.tensor([order.pop() for _ in range(count)])
            self.table[slot, :count] = blocks
            kv = torch.randn(length, shape.kv_heads, 2 * shape.head_dim, generator=generator).to(shape.kv_dtype)
            places = torch.arange(length)
            self.layer[blocks[places // shape.block_size], :, places % shape.block_size] = kv
            self.kv.append(kv)
        self.positions = torch.cat([torch.arange(length - count, length) for length, count in shape.rows])
        query = torch.randn(shape.heads, len(self.positions), shape.head_dim, generator=generator)
        self.query = (2 * query).to(shape.query_dtype).transpose(0, 1)
        self.sinks = torch.linspace(-2, 4, shape.heads) if shape.has_sinks else None
        self.starts = None
        if shape.starts is not None:
            self.starts = torch.zeros(len(self.table), dtype=torch.int64)
            self.starts[self.slots] = torch.tensor(shape.starts)
            self.layer[0] = torch.nan
            for slot, start in zip(self.slots.tolist(), shape.starts, strict=True):
                self.table[slot, : start // shape.block_size] = 0  # one touch would show

    def attend(self, **changes: Any) -> Tensor:
        """By the operator."""
        names = ("query", "layer", "first_token", "num_query", "slots", "positions")
        arguments = {name: getattr(self, name) for name in names} | {"block_table": self.table, "scaling": 0.125}
        options = {"sliding_window": self.shape.window, "softcap": self.shape.softcap, "sinks": self.sinks}
        options["starts"] = self.starts
        return cpu_attention.paged_attention(**(arguments | options | changes))

    def expected(self) -> Tensor:
        """By the twin, row by row in float64."""
        outputs = []
        rows = zip(self.kv, self.first_token.tolist(), self.num_query.tolist(), self.slots, strict=True)
        for kv, first, count, slot in rows:
            tokens = slice(first, first + count)
            start = None if self.starts is None else self.starts[slot, None]
            mask = attention_mask(self.positions[None, tokens], len(kv), self.shape.window, start)
            key, value = kv.double().transpose(0, 1)[None].chunk(2, -1)
            query = self.query[tokens].double().transpose(0, 1)[None]
            options = {"softcap": self.shape.softcap, "sinks": self.sinks}
            outputs.append(attention(query, key, value, mask, 0.125, **options)[0].transpose(0, 1))  # type: ignore[arg-type]
        return torch.cat(outputs)


def in_all_types(*shapes: Shape) -> list[Shape]:
    return [replace(shape, query_dtype=query, kv_dtype=kv) for shape in shapes for query, kv in TOLERANCES]


SHAPES = [
    # Around the borders of the groups of 16 keys, the blocks of 32, the tiles of 64 and the spans of 512.
    *in_all_types(Shape(tuple((n, 1) for n in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)))),
    *in_all_types(Shape(tuple((n, 1) for n in (511, 512, 513, 1023, 1024, 1025, 1537)))),
    # Verification of drafts, across the same borders; the batch is ragged.
    *in_all_types(Shape(tuple((n, q) for n in (16, 65, 129, 515) for q in (1, 2, 5, 16)))),
    # Prefill: several tiles of queries, first chunks and later ones, mixed with decoding.
    *in_all_types(Shape(((100, 100), (600, 90), (77, 1), (49, 49), (700, 3)))),
    # How many query heads share a KV head; 9 over 3 is SmolLM2's.
    *in_all_types(*(Shape(((70, 4), (530, 1)), heads=q, kv_heads=kv) for q, kv in ((1, 1), (4, 4), (9, 3), (14, 2)))),
    *in_all_types(*(Shape(((70, 40), (530, 1)), heads=q, kv_heads=1) for q in (2, 8, 16, 100))),
    # Head sizes that are no multiple of a vector, of a block of vectors, or of the pairs' square.
    *in_all_types(*(Shape(((40, 40), (530, 1)), head_dim=d) for d in (16, 32, 48, 80, 96, 112, 128, 192, 256))),
    *in_all_types(*(Shape(((513, 9), (47, 1)), block_size=size) for size in (16, 48, 64, 240, 256))),
    # Windows within a tile, within and across spans, longer than the row; chunks that outrun them.
    *in_all_types(*(Shape(((700, 5), (1100, 1), (200, 150), (3, 1)), window=w) for w in (1, 5, 64, 100, 600, 5000))),
    *in_all_types(Shape(((700, 5), (40, 40)), softcap=5.0), Shape(((700, 5), (40, 40)), has_sinks=True)),
    *in_all_types(Shape(((700, 5), (40, 40)), window=100, softcap=5.0, has_sinks=True)),
    # Starts at, before and behind the borders of groups, blocks, tiles and spans; at a row's last token, and behind it.
    *in_all_types(Shape(tuple((1100, 1) for _ in range(9)), starts=(0, 1, 15, 16, 95, 511, 512, 1099, 1100))),
    *in_all_types(Shape(((700, 150), (700, 5), (49, 49), (600, 6)), starts=(600, 694, 17, 599), block_size=16)),
    *in_all_types(Shape(((700, 150), (700, 5), (40, 3)), starts=(600, 650, 39), window=20, softcap=5.0)),
    *in_all_types(Shape(((700, 150), (700, 5), (40, 3)), starts=(600, 20, 39), window=100, has_sinks=True)),
]


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_equals_its_twin(shape: Shape) -> None:
    batch = Batch(shape)
    output = batch.attend()
    assert (output.dtype, output.shape) == (shape.query_dtype, batch.query.shape)
    rtol, atol = TOLERANCES[shape.query_dtype, shape.kv_dtype]
    torch.testing.assert_close(output.double(), batch.expected(), rtol=rtol, atol=atol)


SMOLLM2 = Shape((), heads=9, kv_heads=3)
MODELS = [
    replace(shape, query_dtype=dtype, kv_dtype=dtype)
    for dtype in (F32, BF16)
    for shape in (SMOLLM2, replace(SMOLLM2, window=90, softcap=20.0, has_sinks=True))
] + [replace(SMOLLM2, query_dtype=BF16, kv_dtype=F8)]
LONG = (1100, 1100)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("start", [None, 300])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_company_changes_no_bit(model: Shape, start: int | None) -> None:
    """Alone, among others, in chunks, with drafts, on one thread or two: the same token, the same bits."""
    alone = Batch(replace(model, rows=(LONG,), starts=None if start is None else (start,)))
    whole = alone.attend()

    def pieces(ends: Sequence[int]) -> Tensor:
        begins = [0, *ends[:-1]]
        parts = []
        for begin, end in zip(begins, ends, strict=True):
            one_row = {"first_token": torch.zeros(1).long(), "num_query": torch.tensor([end - begin])}
            tokens = slice(begin, end)
            parts.append(alone.attend(query=alone.query[tokens], positions=alone.positions[tokens], **one_row))
        return torch.cat(parts)

    assert torch.equal(pieces((1, 2, 7, 64, 200, 513, 1099, 1100)), whole)
    assert torch.equal(pieces(range(1000, 1101))[1000:], whole[1000:])  # token by token, as decoding does
    torch.set_num_threads(1)
    assert torch.equal(alone.attend(), whole)
    torch.set_num_threads(2)
    starts = None if start is None else (699, start, 5, 0)
    among = Batch(replace(model, rows=((700, 1), LONG, (3, 3), (1300, 6)), starts=starts))
    among.layer[among.table[3, :35].long()] = alone.layer[alone.table[1, :35].long()]
    among.query[1:1101] = alone.query
    assert torch.equal(among.attend()[1:1101], whole)


@pytest.mark.parametrize("window", [None, 70])
def test_padding_is_harmless(window: int | None) -> None:
    """Tokens of position 0 behind a row's own, in the row or not."""
    batch = Batch(Shape(((600, 2), (65, 65), (530, 1)), window=window))
    plain = batch.attend()
    counts = [(2, 6), (65, 70), (1, 6)]
    real = torch.cat([torch.arange(padded) < count for count, padded in counts])
    query = torch.full((len(real), 4, 64), 7.0)
    query[real] = batch.query
    positions = torch.zeros(len(real), dtype=torch.int64)
    positions[real] = batch.positions
    padded = torch.tensor([count for _, count in counts])
    layout = {"query": query, "positions": positions, "first_token": padded.cumsum(0) - padded}
    inside = batch.attend(num_query=padded, **layout)
    assert torch.equal(inside[real], plain)
    assert torch.isfinite(inside).all()
    outside = batch.attend(**layout)
    assert torch.equal(outside[real], plain)
    assert outside[~real].count_nonzero() == 0


def test_a_start_is_as_if_nothing_had_been_before() -> None:
    """Keys below it do not count; tokens below it, padding among them, come to 0."""
    batch = Batch(Shape(((600, 200), (70, 70)), starts=(512, 0)))
    output = batch.attend()
    assert output[: 512 - 400].count_nonzero() == 0
    assert torch.equal(output[200:], batch.attend(starts=None)[200:])
    moved = {"positions": batch.positions.clone(), "block_table": batch.table.clone()}
    moved["positions"][:200] -= 512
    moved["block_table"][2, :3] = batch.table[2, 16:19]
    one_row = {"first_token": torch.tensor([112]), "num_query": torch.tensor([88]), "slots": batch.slots[:1]}
    assert torch.equal(batch.attend(**moved, **one_row, starts=None)[112:200], output[112:200])


def test_rows_without_tokens_and_steps_without_rows() -> None:
    batch = Batch(Shape(((20, 3), (20, 1))))
    kept = batch.attend(num_query=torch.tensor([3, 0]))
    assert torch.equal(kept[:3], batch.attend()[:3])
    assert kept[3:].count_nonzero() == 0
    nothing = torch.zeros(0, dtype=torch.int64)
    empty = batch.attend(
        query=batch.query[:0], first_token=nothing, num_query=nothing, slots=nothing, positions=nothing
    )
    assert empty.shape == (0, 4, 64)


def test_a_broken_query_stays_with_itself() -> None:
    """NaN comes out where it went in, so that the runner sees it, and nowhere else."""
    batch = Batch(Shape(((600, 3), (65, 65)), query_dtype=BF16, kv_dtype=BF16))
    plain = batch.attend()
    query = batch.query.clone()
    query[1, 2, 5] = torch.nan
    broken = batch.attend(query=query)
    assert broken[1, 2].isnan().all()
    broken[1, 2] = plain[1, 2]
    assert torch.equal(broken, plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": torch.tensor([17, 18, 64])}, "slot 2 reads position 64, but has 2 blocks of 32"),
        ({"positions": torch.tensor([17, -1, 19])}, "position of token 1 is negative"),
        ({"positions": torch.tensor([17, 18])}, "positions must have 3 elements"),
        ({"positions": torch.arange(3, dtype=torch.int32)}, "positions must be contiguous int64"),
        ({"block_table": torch.full((3, 2), 9)}, "slot 2 names block 9 of 4"),
        ({"slots": torch.tensor([2, 3])}, "row 1 is in slot 3"),
        ({"num_query": torch.tensor([3, 1])}, "row 1 has 1 tokens from 3 on, of 3"),
        ({"query": torch.zeros(3, 4, 64, dtype=torch.float16)}, "query must be float32 or bfloat16"),
        ({"layer": torch.zeros(4, 2, 32, 128).half()}, "layer must be float32, bfloat16 or float8_e4m3fn"),
        ({"query": torch.zeros(3, 3, 64)}, "3 heads cannot share 2 KV heads"),
        ({"query": torch.zeros(3, 4, 32)}, "layer must have 4 dimensions, the last of them 64"),
        ({"query": torch.zeros(3, 64, 4).transpose(1, 2)}, "query must be contiguous in its last dimension"),
        ({"query": torch.zeros(3, 4, 24), "layer": torch.zeros(4, 2, 32, 48)}, "head_dim is 24"),
        ({"layer": torch.zeros(4, 2, 8, 128)}, "block size is 8"),
        ({"sinks": torch.zeros(3)}, "sinks must be a float32 number per head"),
        ({"starts": torch.zeros(2).long()}, "starts must have 3 elements"),
        ({"starts": torch.tensor([0, 0, -1])}, "slot 2 starts at -1"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Tensor], message: str) -> None:
    batch = Batch(Shape(((20, 3), (20, 0))))
    with pytest.raises(RuntimeError, match=message):
        batch.attend(**changes)


BLOCKS, OFFSETS = torch.tensor([2, 0, 1, 0]), torch.tensor([5, 0, 31, 0])


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("num_tokens", [4, 8000])
@pytest.mark.parametrize("kv_dtype", cpu_attention.KV_DTYPES)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_is_written_can_be_read(dtype: torch.dtype, kv_dtype: torch.dtype, num_tokens: int) -> None:
    """Converted as torch converts, from strided views into a strided view, next to what was there."""
    generator = torch.Generator().manual_seed(0)
    merged = torch.randn(num_tokens, 3, 4, 48, generator=generator).to(dtype)  # as a merged projection leaves them
    key, value = merged[:, :, 1], merged[:, :, 3]
    places = torch.randperm(260 * 32, generator=generator)[:num_tokens]
    before = torch.randn(260, 2, 3, 32, 96, generator=generator).to(kv_dtype)
    kv, expected = before.clone(), before.clone()
    cpu_attention.write_kv(kv[:, 1], key, value, places // 32, places % 32)
    expected[places // 32, 1, :, places % 32] = torch.cat((key, value), -1).to(kv_dtype)
    assert torch.equal(kv.float(), expected.float())


@pytest.mark.parametrize("kv_dtype", cpu_attention.KV_DTYPES)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_nothing_infinite_is_stored(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, largest, -largest, 1.0, -0.0, 2e-40]).to(dtype).repeat(2)
    kv = torch.ones(1, 1, 16, 32, dtype=kv_dtype)
    row = values.view(1, 1, 16)
    cpu_attention.write_kv(kv, row, row, torch.zeros(1).long(), torch.zeros(1).long())
    cap = torch.finfo(kv_dtype).max
    expected = torch.nan_to_num(values.float(), 0.0, 0.0, 0.0).clamp(-cap, cap).to(kv_dtype)
    assert torch.equal(kv[0, 0, 0].view(2, 16).float(), expected.float().expand(2, 16))
    assert (kv[0, 0, 1:].float() == 1).all()


def test_every_number_of_8_bits_is_rounded_to_and_read() -> None:
    """All of bfloat16, whose ties and subnormal numbers are among them, in a cache of float8."""
    numbers = torch.arange(1 << 16).to(torch.uint16).view(BF16)
    key = numbers.view(-1, 1, 16)
    kv = torch.zeros(len(key), 1, 16, 32, dtype=F8)
    cpu_attention.write_kv(kv, key, key, torch.arange(len(key)), torch.zeros(len(key)).long())
    stored = torch.nan_to_num(numbers.float(), 0.0, 0.0, 0.0).clamp(-448, 448).to(F8)
    assert torch.equal(kv[:, 0, 0, :16].flatten().view(torch.uint8), stored.view(torch.uint8))
    row = torch.arange(len(key))
    query = torch.zeros(len(key), 1, 16)
    read = cpu_attention.paged_attention(query, kv, row, row * 0 + 1, row, row * 0, row[:, None], 1.0)
    assert torch.equal(read.flatten(), stored.float())


@pytest.mark.parametrize(
    ("blocks", "offsets", "message"),
    [
        ([0, 3], [0, 0], "token 1 goes to slot 0 of block 3, which does not exist"),
        ([0, 1], [0, 32], "token 1 goes to slot 32 of block 1, which does not exist"),
        ([-1, 1], [0, 3], "token 0 goes to slot 0 of block -1, which does not exist"),
        ([0], [0], "blocks must have 2 elements"),
    ],
)
def test_nothing_is_written_where_there_is_nothing(blocks: list[int], offsets: list[int], message: str) -> None:
    kv, key = torch.zeros(3, 2, 32, 32), torch.ones(2, 2, 16)
    with pytest.raises(RuntimeError, match=message):
        cpu_attention.write_kv(kv, key, key, torch.tensor(blocks), torch.tensor(offsets))
    assert kv.count_nonzero() == 0


def test_torch_knows_what_the_operators_do() -> None:
    """Schemas, declared mutation and shapes are those of the real thing."""
    batch = Batch(Shape(((70, 4), (530, 1)), query_dtype=BF16, kv_dtype=BF16, window=64, starts=(3, 500)))
    layout = (batch.first_token, batch.num_query, batch.slots, batch.positions, batch.table)
    arguments = (batch.query, batch.layer.contiguous(), *layout, 0.125, 64, None, None, batch.starts)
    torch.library.opcheck(torch.ops.outrider.cpu_paged_attention.default, arguments)
    key = torch.randn(4, 2, 64)
    torch.library.opcheck(
        torch.ops.outrider.cpu_write_kv.default, (batch.layer.contiguous(), key, key, BLOCKS, OFFSETS)
    )


def test_they_can_be_compiled_into_one_graph() -> None:
    """Writing to a layer's view is seen by the attention behind it."""
    batch = Batch(Shape(((70, 3), (33, 1)), query_dtype=BF16, kv_dtype=BF16))
    slots = batch.slots.repeat_interleave(batch.num_query)
    blocks, offsets = batch.table[slots, batch.positions // 32].long(), batch.positions % 32
    layers = torch.stack((batch.layer, batch.layer), 1)
    key = torch.randn(4, 2, 64).bfloat16()

    def step(layers: Tensor, query: Tensor) -> Tensor:
        layer = layers[:, 1]
        cpu_attention.write_kv(layer, key, 2 * key, blocks, offsets)
        return 2 * batch.attend(query=query, layer=layer)

    expected_layers, compiled_layers = layers.clone(), layers.clone()
    expected = step(expected_layers, batch.query)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(compiled_layers, batch.query), expected)
    assert torch.equal(compiled_layers, expected_layers)
