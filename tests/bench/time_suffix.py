"""What suffix decoding costs the step thread, and how much of a text it foresees.

    python -m tests.bench.time_suffix [--rows N] [FILE ...]

Each file, the scheduler's and the engine's sources if none is given, is cut into words, and all of them into a piece
for each row of a batch. A quarter of a piece is the prompt; the rest is generated as if a model said exactly that, so
a draft is right as far as the text goes on like it. Given are the shortest of several passes over all.
"""

import argparse
import gc
import platform
import re
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from proposers.suffix import SuffixConfig, SuffixProposer
from proposers.suffix_automaton import ROOT, SuffixAutomaton
from server.plan import PlanRow, RowResult, SequenceStart, StepResult
from server.request import Request, SamplingParams
from server.worker.batch import BatchState
from server.worker.host_drafts import HostDrafting

DEFAULT_FILES = ("server/scheduler/scheduler.py", "server/engine/engine.py")
MAX_DRAFTS = 4
NUM_PASSES = 9


class Replay(NamedTuple):
    """A pass over all pieces; a row's step is one of num_row_steps."""

    spent_s: float
    num_row_steps: int
    num_tokens: int
    num_drafted: int


def words_of(path: Path, known: dict[str, int]) -> list[int]:
    """A file as ids of its words and signs."""
    return [known.setdefault(word, len(known)) for word in re.findall(r"\w+|\s+|[^\w\s]", path.read_text("utf-8"))]


def replay(pieces: Sequence[Sequence[int]], *, num_cached: int, proposes: bool) -> Replay:
    """Go through pieces of a text, one a row. Args: num_cached: earlier outputs kept, as the setting says."""
    config = SuffixConfig(
        method="suffix", num_speculative_tokens=MAX_DRAFTS, suffix_decoding_max_cached_requests=num_cached
    )
    batch = BatchState(len(pieces), 64, 16, MAX_DRAFTS, torch.device("cpu"))
    drafting = HostDrafting([(0, SuffixProposer(config))], batch, 1 << 20, are_alone=True)
    places = [len(piece) // 4 for piece in pieces]
    for slot, piece in enumerate(pieces):
        prompt = tuple(piece[: places[slot]])
        request = Request(request_id=str(slot), prompt_token_ids=prompt, sampling=SamplingParams())
        drafting.start(SequenceStart(slot, request, 0, prompt, len(prompt), 0, (), MAX_DRAFTS))
    spent_s, num_row_steps, num_tokens, num_drafted = 0.0, 0, 0, 0
    while slots := [slot for slot, piece in enumerate(pieces) if places[slot] < len(piece)]:
        rows, results = [], []
        for slot in slots:
            draft = drafting.pending.pop(slot, None)
            ids, following = () if draft is None else draft.token_ids, pieces[slot][places[slot] :]
            right = next(
                (i for i, pair in enumerate(zip(ids, following, strict=False)) if pair[0] != pair[1]), len(ids)
            )
            new = tuple(following[: right + 1])
            places[slot] += len(new)
            num_tokens, num_drafted = num_tokens + len(new), num_drafted + len(ids)
            rows.append(PlanRow(slot, slot, 0, 1 + len(ids), len(ids), places[slot], is_sampling=True))
            results.append(RowResult(slot, 0, new, len(ids)))
        result = StepResult(tuple(results))
        started_s = time.perf_counter()
        drafting.advance(rows, result, proposes=proposes)
        spent_s += time.perf_counter() - started_s
        num_row_steps += len(slots)
    return Replay(spent_s, num_row_steps, num_tokens, num_drafted)


def report(pieces: Sequence[Sequence[int]], *, num_cached: int) -> str:
    """A line of both kinds of passes."""
    on, off = (
        min(replay(pieces, num_cached=num_cached, proposes=proposes) for _ in range(NUM_PASSES))
        for proposes in (True, False)
    )
    return (
        f"earlier outputs {num_cached}: {on.spent_s / on.num_row_steps * 1e6:.1f} us a row and step, "
        f"{on.num_tokens / on.num_row_steps:.2f} tokens a step, "
        f"{(on.num_tokens - on.num_row_steps) / max(1, on.num_drafted):.0%} of {on.num_drafted} drafts right; "
        f"{off.spent_s / off.num_row_steps * 1e6:.2f} us with drafts off"
    )


def nbytes_per_token(token_ids: list[int]) -> float:
    """Of the index of one text."""
    tracemalloc.start()
    automaton = SuffixAutomaton(24)
    automaton.extend(ROOT, token_ids)
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return nbytes / len(token_ids)


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[Path(name) for name in DEFAULT_FILES], metavar="FILE")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="rows of the batch")
    args = parser.parse_args()
    known: dict[str, int] = {}
    token_ids = [token_id for path in args.files for token_id in words_of(path, known)]
    size = -(-len(token_ids) // args.rows)
    pieces = [token_ids[first : first + size] for first in range(0, len(token_ids), size)]
    print(f"{len(token_ids)} words, {len(known)} of them different; Python {platform.python_version()}")
    print(f"{nbytes_per_token(token_ids):.0f} bytes a token")
    gc.freeze()  # as a server does
    for num_cached in (0, 10_000):
        print(report(pieces, num_cached=num_cached))


if __name__ == "__main__":
    main()
