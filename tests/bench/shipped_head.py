"""Drafting with the head shipped for a model against no drafts: offline, one request at a time, by turns.

    python -m tests.bench.shipped_head --prompts FILE [--temperature 0.8] [--pairs 20]

Each side is a process of its own, which stands still while the other one runs. A pair is one prompt, held out or
hand-written. Answers end where the model ends them; those of fewer than 24 tokens on either side do not count.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from transformers import AutoTokenizer

from proposers.training.prompt_file import prompt_ids, read_prompts
from server.model.resolve import pull
from tests.bench.contestants import Worker
from tests.bench.paired import interleave, median_ratio
from tests.bench.sample import Sample

OUTPUT_LEN, MIN_OUTPUT_LEN, MAX_INPUT_LEN = 128, 24, 224


def main() -> None:
    """Measure and print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--pairs", type=int, default=20, metavar="N")
    args = parser.parse_args()
    model = str(pull(args.model))
    prompts = iter(_prompts(model, args.prompts, 1 + args.pairs))
    with ExitStack() as stack, tempfile.TemporaryDirectory() as logs:
        sides = []
        for speculative in ("auto", None):
            log = Path(logs) / f"{speculative}.log"
            sides.append(Worker(sys.executable, "outrider", model, _options(speculative, args.temperature), log))
            stack.callback(sides[-1].close)
            sides[-1].pause()
        ours, theirs = sides
        pairs = interleave(ours, theirs, lambda: [next(prompts)], OUTPUT_LEN, args.pairs)
    _report([pair for pair in pairs if min(sample.num_tokens for sample in pair) >= MIN_OUTPUT_LEN])


def _options(speculative: str | None, temperature: float) -> dict[str, object]:
    return {
        "compile": "wait",
        "max_num_seqs": 1,
        "max_model_len": 1024,
        "speculative_config": speculative,
        "sampling": {"temperature": temperature, "ignore_eos": False},
    }


def _prompts(model: str, path: Path, count: int) -> Sequence[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    records = [record for record in read_prompts(path) if record.split != "train"]
    random.Random(5).shuffle(records)

    def short() -> Iterator[list[int]]:
        for record in records:
            ids = prompt_ids(record, tokenizer)
            if len(ids) <= MAX_INPUT_LEN:
                yield ids

    chosen = [ids for ids, _ in zip(short(), range(count), strict=False)]
    if len(chosen) < count:
        raise SystemExit(f"--pairs: {path} has {len(chosen)} prompts that are short enough, and one is to warm up")
    return chosen


def _report(pairs: Sequence[tuple[Sample, Sample]]) -> None:
    ratios = [ours.decode_tokens_per_s / theirs.decode_tokens_per_s for ours, theirs in pairs]
    rates = [statistics.median(side.decode_tokens_per_s for side in sides) for sides in zip(*pairs, strict=True)]
    ratio = median_ratio(ratios)
    print(
        f"{len(pairs)} pairs: {rates[0]:.1f} tokens/s with the head, {rates[1]:.1f} without; ratio {ratio.median:.2f} "
        f"(95% {ratio.low:.2f} to {ratio.high:.2f}), from {min(ratios):.2f} to {max(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
