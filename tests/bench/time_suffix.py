"""What suffix decoding costs the step thread, and how much of a text it foresees.

    python -m tests.bench.time_suffix [FILE ...]

Each file, the scheduler's and the engine's sources if none is given, is cut into words. The first half is the prompt;
the rest is generated as if a model said exactly that, so a draft is right as far as the text goes on like it.
"""

import argparse
import platform
import re
import time
import tracemalloc
from pathlib import Path

from proposers.base import SequenceText
from proposers.suffix import CATCH_UP, SuffixConfig, SuffixProposer
from proposers.suffix_automaton import ROOT, SuffixAutomaton

DEFAULT_FILES = ("server/scheduler/scheduler.py", "server/engine/engine.py")
MAX_DRAFTS = 8


def words_of(path: Path, known: dict[str, int]) -> list[int]:
    """A file as ids of its words and signs."""
    return [known.setdefault(word, len(known)) for word in re.findall(r"\w+|\s+|[^\w\s]", path.read_text("utf-8"))]


def replay(token_ids: list[int], *, num_cached: int) -> str:
    """Draft through the second half of a text. Args: num_cached: earlier outputs kept, as the setting says."""
    config = SuffixConfig(method="suffix", suffix_decoding_max_cached_requests=num_cached)
    proposer = SuffixProposer(config)
    place = len(token_ids) // 2
    proposer.start(0, SequenceText(tuple(token_ids[:place]), place, ""))
    for _ in range(0, place, CATCH_UP):
        proposer.extend(0, [])
    extend_s = propose_s = 0.0
    num_steps = num_drafted = num_right = 0
    while place < len(token_ids):
        started_s = time.perf_counter()
        drafts = proposer.propose(0, MAX_DRAFTS)
        propose_s += time.perf_counter() - started_s
        right = 0
        while right < len(drafts) and token_ids[place + right : place + right + 1] == drafts[right : right + 1]:
            right += 1
        new = token_ids[place : place + right + 1]
        started_s = time.perf_counter()
        proposer.extend(0, new)
        extend_s += time.perf_counter() - started_s
        place += len(new)
        num_steps, num_drafted, num_right = num_steps + 1, num_drafted + len(drafts), num_right + right
    num_tokens = len(token_ids) - len(token_ids) // 2
    return (
        f"earlier outputs {num_cached}: {extend_s / num_tokens * 1e6:.1f} us a token taken in, "
        f"{propose_s / num_steps * 1e6:.1f} us a draft, {num_tokens / num_steps:.2f} tokens a step, "
        f"{num_right / max(1, num_drafted):.0%} of {num_drafted} drafts right"
    )


def nbytes_per_token(token_ids: list[int]) -> float:
    """Of the index of one text."""
    tracemalloc.start()
    automaton, last = SuffixAutomaton(24), ROOT
    for token_id in token_ids:
        last = automaton.extend(last, token_id)
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return nbytes / len(token_ids)


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[Path(name) for name in DEFAULT_FILES], metavar="FILE")
    known: dict[str, int] = {}
    token_ids = [token_id for path in parser.parse_args().files for token_id in words_of(path, known)]
    print(f"{len(token_ids)} words, {len(known)} of them different; Python {platform.python_version()}")
    print(f"{nbytes_per_token(token_ids):.0f} bytes a token")
    for num_cached in (0, 10_000):
        print(replay(token_ids, num_cached=num_cached))


if __name__ == "__main__":
    main()
