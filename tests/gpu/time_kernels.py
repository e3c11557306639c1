"""How long the kernels take on this GPU, against the least they could.

`python -m tests.gpu.time_kernels [--only TABLE ...] [--sweep decode|prompt]`, from the repository root.

A time is the median over replays of a graph that holds one call for each of several input sets, divided by
their number: what a call costs inside a captured step, with inputs that come from memory and not from a cache.
The floor is the larger of bytes over bandwidth and operations over the matrix units' rate.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from triton.runtime.errors import OutOfResources

from proposers.base import ProposeInput
from proposers.ngram import NgramProposer
from server.kernels import paged_attention as attention_module
from server.kernels import reference, rejection_reference
from server.kernels.attention_tiling import SHORT_QUERY, Splits, Tiling, fills_device
from server.kernels.gumbel_argmax import gumbel_argmax
from server.kernels.kv_write import write_kv
from server.kernels.ngram_lookup import ngram_lookup
from server.kernels.noise import Stream, gumbel
from server.kernels.paged_attention import paged_attention
from server.kernels.penalties import penalise
from server.kernels.rejection import Method, verify_drafts
from server.kernels.truncate import truncate
from tests.fakes.drafts import draft_inputs

BYTES_PER_US = 4.26e6
"""An H200's copy bandwidth, bytes read plus written."""
FLOPS_PER_US = 780e6
"""Its bfloat16 rate on random data."""
CACHE_NBYTES = 3 * 60 * 2**20
"""Inputs that exceed this do not stay in its L2 from one replay to the next."""

BLOCK_SIZE = 32
EIGHT_B = (32, 8, 128)
SMOLLM2 = (9, 3, 64)
DTYPE = torch.bfloat16
DEVICE = "cuda"


def time_us(calls: list[Callable[[], object]], num_replays: int = 30) -> float:
    """Median time of one call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the inputs may still be in the making
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for i in range(num_replays + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 5:
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return float(statistics.median(times))


def report(name: str, time: float, nbytes: float, flops: float = 0, **others: float) -> None:
    """A line: what it is, time, bytes, floor and ratio, and the times of other ways to do it."""
    floor = max(nbytes / BYTES_PER_US, flops / FLOPS_PER_US)
    beside = "".join(f"   {key} {value:9.1f}" for key, value in others.items())
    print(
        f"{name:44s} {time:9.1f} us {nbytes / 1e6:9.1f} MB  floor {floor:8.1f}  x{time / floor:6.2f}{beside}",
        flush=True,
    )


class AttentionBench:
    """Rows of equal context and query, each over blocks of its own, in as many layers as outgrow the cache."""

    def __init__(self, shape: tuple[int, int, int], num_rows: int, context: int, num_query: int) -> None:
        self.heads, self.kv_heads, self.head_dim = shape
        self.num_rows, self.context, self.num_query = num_rows, context, num_query
        self.layer_nbytes = num_rows * context * self.kv_heads * 2 * self.head_dim * DTYPE.itemsize
        self.num_layers = min(32, max(2, -(-CACHE_NBYTES // self.layer_nbytes)))
        blocks_per_row = -(-context // BLOCK_SIZE)
        num_blocks = num_rows * blocks_per_row
        kv_shape = (num_blocks + 1, self.num_layers, self.kv_heads, BLOCK_SIZE, 2 * self.head_dim)
        self.kv = torch.randn(kv_shape, dtype=DTYPE, device=DEVICE)
        order = 1 + torch.randperm(num_blocks, device=DEVICE)
        self.table = order.view(num_rows, blocks_per_row).int()
        self.slots = torch.arange(num_rows, device=DEVICE)
        self.first_token = self.slots * num_query
        self.counts = torch.full_like(self.slots, num_query)
        self.positions = torch.arange(context - num_query, context, device=DEVICE).repeat(num_rows)
        self.query = torch.randn(num_rows * num_query, self.heads, self.head_dim, dtype=DTYPE, device=DEVICE)
        self.out = torch.empty_like(self.query)
        is_merged_at_once = num_query <= SHORT_QUERY and fills_device(num_rows, self.kv_heads, self.query.device)
        heads = torch.zeros(num_rows, self.heads, dtype=torch.int32, device=DEVICE)
        self.arrivals = heads if is_merged_at_once else None

    @property
    def nbytes(self) -> int:
        """K, V and query read, output written, once each."""
        return self.layer_nbytes + 2 * self.query.nbytes

    @property
    def flops(self) -> float:
        """Two products over the positions each query token sees."""
        seen = self.num_query * (self.context - (self.num_query - 1) / 2)
        return 4.0 * self.num_rows * self.heads * self.head_dim * seen

    def ours_us(self, *, context_bound: int | None = None, split_span: int | None = None) -> float:
        def call(layer: int) -> None:
            paged_attention(
                self.query,
                self.kv[:, layer],
                self.out,
                self.first_token,
                self.counts,
                self.slots,
                self.positions,
                self.table,
                max_num_query=self.num_query,
                context_bound=context_bound or self.context,
                scaling=self.head_dim**-0.5,
                split_span=split_span,
                arrivals=None if split_span else self.arrivals,
            )

        return time_us([lambda i=i: call(i) for i in range(self.num_layers)])  # type: ignore[misc]

    def sdpa_us(self) -> float:
        """torch's own on contiguous K and V, without a mask: for one query token, or a whole prompt."""
        assert self.num_query in (1, self.context)
        shape = (self.num_layers, 2, self.num_rows, self.kv_heads, self.context, self.head_dim)
        del self.kv
        kv = torch.randn(shape, dtype=DTYPE, device=DEVICE)
        query = self.query.view(self.num_rows, self.num_query, self.heads, self.head_dim).transpose(1, 2).contiguous()
        is_causal = self.num_query > 1

        def call(layer: int) -> Tensor:
            key, value = kv[layer].unbind()
            return scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)

        return time_us([lambda i=i: call(i) for i in range(self.num_layers)])  # type: ignore[misc]


def time_attention() -> None:
    """Decoding, verification and prompts, beside SDPA where it does the same."""
    for name, shape in (("8B", EIGHT_B), ("SmolLM2", SMOLLM2)):
        for context, num_rows in itertools.product((512, 2048, 8192), (1, 4, 8, 16, 32, 64)):
            bench = AttentionBench(shape, num_rows, context, 1)
            far, fixed = bench.ours_us(context_bound=32_768), bench.ours_us(split_span=512)
            time = bench.ours_us()
            label = f"attention {name} decode batch {num_rows} context {context}"
            report(label, time, bench.nbytes, bench.flops, bound_32k=far, span_512=fixed, sdpa=bench.sdpa_us())
        for num_query, num_rows in itertools.product((6, 16), (1, 16, 64)):
            bench = AttentionBench(shape, num_rows, 2048, num_query)
            label = f"attention {name} {num_query} tokens batch {num_rows} context 2048"
            report(label, bench.ours_us(), bench.nbytes, bench.flops)
        for context in (512, 2048, 8192):
            bench = AttentionBench(shape, 1, context, context)
            label = f"attention {name} prompt {context}"
            report(label, bench.ours_us(), bench.nbytes, bench.flops, sdpa=bench.sdpa_us())
        for num_query, context in ((2048, 8192), (64, 8192)):
            bench = AttentionBench(shape, 1, context, num_query)
            report(f"attention {name} chunk {num_query} of {context}", bench.ours_us(), bench.nbytes, bench.flops)


def time_kv_write() -> None:
    """One layer's K and V of a step's tokens."""
    for num_tokens in (1, 64, 2048, 8192):
        kv = torch.zeros(400, 32, 8, BLOCK_SIZE, 256, dtype=DTYPE, device=DEVICE)
        new = torch.randn(8, num_tokens, 8, 128, dtype=DTYPE, device=DEVICE)
        place = torch.randperm(400 * BLOCK_SIZE, device=DEVICE)[:num_tokens]
        blocks, offsets = place // BLOCK_SIZE, place % BLOCK_SIZE

        def call(layer: int, new: Tensor = new, kv: Tensor = kv, blocks: Tensor = blocks, at: Tensor = offsets) -> None:
            write_kv(kv[:, layer], new[layer % 8], new[(layer + 1) % 8], blocks, at)

        time = time_us([lambda i=i, call=call: call(i) for i in range(32)])  # type: ignore[misc]
        report(f"kv write 8B {num_tokens} tokens", time, 4 * new[0].nbytes)


def time_sampling() -> None:
    """Rows of logits in float32, beside the tensor operations."""
    for vocab_size, num_rows in itertools.product((49_152, 128_256), (1, 8, 64, 384)):
        num_sets = max(2, min(32, CACHE_NBYTES // (4 * num_rows * vocab_size)))
        logits = torch.randn(num_sets, num_rows, 1, vocab_size, device=DEVICE)
        key = torch.arange(num_rows, device=DEVICE)
        temperature = torch.full((num_rows,), 0.7, device=DEVICE)
        zero = torch.zeros_like(temperature)

        def twin(i: int, logits: Tensor = logits, key: Tensor = key, temperature: Tensor = temperature) -> Tensor:
            noise = gumbel(key[:, None], key[:, None], Stream.TARGET, logits.shape[-1])
            return (logits[i] / temperature[:, None, None] + noise).argmax(-1)

        def of(rows: Tensor, logits: Tensor = logits, key: Tensor = key) -> list[Callable[[], object]]:
            return [lambda x=x: gumbel_argmax(x, key, key, rows, Stream.TARGET) for x in logits]  # type: ignore[misc]

        report(
            f"gumbel argmax {num_rows} x {vocab_size}",
            time_us(of(temperature)),
            logits[0].nbytes,
            greedy=time_us(of(zero)),
            torch_argmax=time_us([lambda x=x: x.argmax(-1) for x in logits]),  # type: ignore[misc]
            torch_noise=time_us([lambda i=i, twin=twin: twin(i) for i in range(num_sets)]),  # type: ignore[misc]
        )


def time_lookup() -> None:
    """Texts that match a token or two everywhere."""
    for length, num_rows in itertools.product((2048, 8192, 131_072), (1, 64)):
        token_ids = torch.randint(40, (num_rows, length + 16), device=DEVICE, dtype=torch.int32)
        slots = torch.arange(num_rows, device=DEVICE)
        num_tokens = torch.full_like(slots, length)
        inputs = ProposeInput(token_ids, slots, num_tokens, torch.full_like(slots, 5).int(), length)
        proposer = NgramProposer(5, 2, 4, takes_last=False, device=torch.device(DEVICE))

        rule = torch.tensor([2, 4, 0], dtype=torch.int32, device=DEVICE)

        def call(inputs: ProposeInput = inputs, rule: Tensor = rule) -> object:
            tensors = (inputs.token_ids, inputs.slots, inputs.num_tokens, inputs.max_drafts)
            return ngram_lookup(*tensors, inputs.max_num_tokens, rule, 5)

        twin_us = time_us([lambda inputs=inputs, proposer=proposer: proposer.propose_eagerly(inputs)])  # type: ignore[misc]
        report(f"n-gram lookup {num_rows} x {length}", time_us([call] * 4), 4 * num_rows * length, torch=twin_us)


def in_place_us(function: Callable[[Tensor], object], logits: Tensor) -> float:
    """Time of a function on a fresh copy of each of several [M, Q, vocab], less that of the copy."""
    work = torch.empty_like(logits[0])
    copying = time_us([lambda x=x: work.copy_(x) for x in logits])  # type: ignore[misc]
    return time_us([lambda x=x: function(work.copy_(x)) for x in logits]) - copying  # type: ignore[misc]


def peaked_logits(num_rows: int, num_positions: int, vocab_size: int) -> Tensor:
    """As a model's: 0.95 of the mass in some 40 tokens; several sets."""
    num_sets = max(2, min(8, CACHE_NBYTES // (4 * num_rows * num_positions * vocab_size)))
    logits = 2 * torch.randn(num_sets, num_rows, num_positions, vocab_size, device=DEVICE)
    logits[..., torch.randperm(vocab_size, device=DEVICE)[:100]] += torch.linspace(14, 4, 100, device=DEVICE)
    return logits


def time_penalties() -> None:
    """Rows of 8,192 tokens, half of them the prompt; neutral: none has penalties."""
    vocab_size, length = 128_256, 8192
    for num_rows, num_positions in ((1, 1), (64, 1), (64, 6)):
        logits = peaked_logits(num_rows, num_positions, vocab_size)
        token_ids = (torch.rand(num_rows, length + 8, device=DEVICE) ** 3 * 49_000).int()
        slots = torch.arange(num_rows, device=DEVICE)
        num_tokens, num_prompt = torch.full_like(slots, length), torch.full_like(slots, length // 2)
        counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=DEVICE)
        one, some = torch.ones(num_rows, device=DEVICE), torch.full((num_rows,), 0.3, device=DEVICE)
        rows = (token_ids, slots, num_tokens, num_prompt, one + some, some, some)
        neutral = (*rows[:4], one, 0 * one, 0 * one)
        num_distinct = int(token_ids[0].unique().numel())
        report(
            f"penalties {num_rows} x {num_positions} x {length}",
            in_place_us(lambda x, rows=rows, counts=counts: penalise(x, *rows, counts), logits),  # type: ignore[call-arg, misc]
            8 * num_rows * (length + num_positions * num_distinct),
            neutral=in_place_us(lambda x, rows=neutral, counts=counts: penalise(x, *rows, counts), logits),  # type: ignore[call-arg, misc]
            torch=in_place_us(lambda x, rows=rows: reference.penalise(x, *rows), logits),  # type: ignore[misc]
        )


def time_truncation() -> None:
    """Peaked rows, and flat ones where top-p keeps a large part of the vocabulary; read once and written once."""
    for vocab_size, (num_rows, num_positions) in itertools.product(
        (49_152, 128_256), ((1, 1), (8, 1), (64, 1), (64, 6))
    ):
        logits = peaked_logits(num_rows, num_positions, vocab_size)
        slots = torch.arange(num_rows, device=DEVICE)

        def of(temperature: float, min_p: float, top_k: int, top_p: float, slots: Tensor = slots) -> tuple[Tensor, ...]:
            column = torch.ones(slots.shape[0], device=DEVICE)
            return slots, temperature * column, min_p * column, torch.full_like(slots, top_k), top_p * column

        def time(rows: tuple[Tensor, ...], logits: Tensor = logits) -> float:
            return in_place_us(lambda x: truncate(x, *rows), logits)

        def twin(x: Tensor, rows: tuple[Tensor, ...] = of(0.7, 0.0, 50, 0.95)) -> Tensor:
            return reference.restrict(x.div_(rows[1][:, None, None]), rows[3], rows[4], None)

        report(
            f"truncation {num_rows} x {num_positions} x {vocab_size}",
            time(of(0.7, 0.0, 50, 0.95)),
            2 * logits[0].nbytes,
            neutral=time(of(1.0, 0.0, 0, 1.0)),
            temperature=time(of(0.7, 0.0, 0, 1.0)),
            min_p=time(of(0.7, 0.05, 0, 1.0)),
            top_k=time(of(0.7, 0.0, 50, 1.0)),
            top_p=time(of(0.7, 0.0, 0, 0.95)),
            flat=time(of(1.0, 0.0, 0, 0.95), logits / 8),
            torch=in_place_us(twin, logits),
        )


def time_verification() -> None:
    """Five drafts each, with a whole distribution or without; logits read once, weights written once."""
    for num_rows, drafter in itertools.product((1, 64), ("one-hot", "full")):
        inputs = draft_inputs(num_rows, 5, 128_256, drafter, DEVICE, torch.float32)
        nbytes = 4 * num_rows * 128_256 * (7 + 5 * (drafter == "full"))
        times = {
            method: time_us([lambda inputs=inputs, method=method: verify_drafts(**inputs, method=method)] * 2)  # type: ignore[misc]
            for method in (Method.STANDARD, Method.BLOCK)
        }
        twin = time_us([lambda inputs=inputs: rejection_reference.verify_drafts(**inputs, method=Method.STANDARD)] * 2)  # type: ignore[misc]
        label = f"verification {num_rows} x 5 x 128256 {drafter}"
        report(label, times[Method.STANDARD], nbytes, block=times[Method.BLOCK], torch=twin)


def forced(name: str, choice: object) -> AbstractContextManager[object]:
    """Attention with a given tiling or number of splits."""
    return patch.object(attention_module, name, lambda *_: choice)


def sweep_decode() -> None:
    """Short queries by tiling and number of splits: what attention_tiling should choose."""
    shapes = [(EIGHT_B, 1, 2048, 1), (EIGHT_B, 16, 2048, 1), (EIGHT_B, 64, 2048, 1), (EIGHT_B, 64, 2048, 6)]
    shapes += [(SMOLLM2, 1, 2048, 1), (SMOLLM2, 64, 2048, 1)]
    for shape, num_rows, context, num_query in shapes:
        bench = AttentionBench(shape, num_rows, context, num_query)
        floor = bench.nbytes / BYTES_PER_US
        block_m = 16 if num_query == 1 else 32
        for block_n, num_warps, num_stages in itertools.product((32, 64, 128), (4, 8), (3, 5, 7)):
            found = {}
            tiling = Tiling(block_m, block_n, num_warps, num_stages)
            for num_splits in (1, 2, 4, 8, 16, 32):
                splits = forced("choose_splits", Splits(num_splits, num_splits))
                with splits, forced("choose_tiling", tiling), suppress(OutOfResources):  # of shared memory
                    found[num_splits] = bench.ours_us()
            times = " ".join(f"{splits}:{time:.1f}" for splits, time in found.items())
            print(f"{shape} x{num_rows} ctx {context} q {num_query} {tiling}: {times} (floor {floor:.1f})", flush=True)


def sweep_prompt() -> None:
    """Long queries by tiling."""
    for shape, context in ((EIGHT_B, 8192), (SMOLLM2, 8192)):
        bench = AttentionBench(shape, 1, context, context)
        for block_m, block_n, num_stages in itertools.product((64, 128), (32, 64, 128), (3, 5)):
            tiling = Tiling(block_m, block_n, block_m // 16, num_stages)
            time = float("nan")
            with forced("choose_tiling", tiling), suppress(OutOfResources):
                time = bench.ours_us()
            print(
                f"{shape} prompt {context} {tiling}: {time:.1f} us, {bench.flops / time / 1e6:.0f} TFLOP/s", flush=True
            )


TABLES = {
    "attention": time_attention,
    "kv_write": time_kv_write,
    "sampling": time_sampling,
    "lookup": time_lookup,
    "penalties": time_penalties,
    "truncation": time_truncation,
    "verification": time_verification,
}
SWEEPS = {"decode": sweep_decode, "prompt": sweep_prompt}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), help="tables to print")
    parser.add_argument("--sweep", choices=SWEEPS, help="time attention's tilings instead")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if arguments.sweep:
        SWEEPS[arguments.sweep]()
        return
    for name in arguments.only:
        TABLES[name]()


if __name__ == "__main__":
    main()
