"""Outrider through gRPC against other engines on the CPU, in interleaved pairs.

    python -m tests.bench.peers --model FOLDER --vllm-python ENV/bin/python
        --llama-python ENV/bin/python --gguf FILE --output report.json

Each side is loaded once per contest and stands still (SIGSTOP) while the other one runs. The
peers are measured in process, Outrider with its front and its client on the same cores. Every
number is over fresh prompts, greedy, to the full length.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from clients.workload import random_prompts
from server.commands.bench_device import device_name
from server.commands.bench_environment import describe_host, describe_run
from server.commands.flag_types import at_least, list_of
from server.host import cpu_count
from tests.bench.contestants import OutriderServer, Worker
from tests.bench.paired import interleave, median_ratio
from tests.bench.repetition import repeating_text
from tests.bench.sample import Prompts, Sample, Workload
from tests.bench.starts import measure_starts

_NGRAM = ("--speculative-config", '{"method": "ngram"}')
_NO_SPECULATION = ("--speculative-config", "none")
_STREAMS = 64


@dataclass(frozen=True, slots=True)
class Contest:
    """Outrider's server with `settings`, and who it is compared with on which workloads."""

    name: str
    settings: Sequence[str]
    peer: Callable[[Path], Worker]
    workloads: Sequence[Workload]
    has_repeating_text: bool = False


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the contests that were asked for, print a table of each, write the JSON."""
    args = _parser().parse_args(arguments)
    report: dict[str, Any] = {
        **describe_run(("torch", "transformers", "grpcio")),
        "host": {**describe_host(), "cpu": device_name("cpu"), "usable_cpus": cpu_count()},
        "contests": [],
        "starts": None,
    }
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        for contest in _contests(args):
            report["contests"].append(_run(contest, args, logs))
            _write(report, args.output)
        if args.starts:
            report["starts"] = measure_starts(args.model, shlex.split(args.serve_args), args.starts, logs)
            print("starts:", json.dumps(report["starts"]), flush=True)
            _write(report, args.output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with safetensors, for Outrider and vLLM")
    parser.add_argument("--vllm-python", metavar="FILE", help="interpreter that has vLLM's CPU build")
    parser.add_argument("--llama-python", metavar="FILE", help="interpreter that has llama-cpp-python")
    parser.add_argument("--gguf", metavar="FILE", help="the same model for llama.cpp")
    parser.add_argument("--offline", action="store_true", help=f"gRPC against the offline API at {_STREAMS} streams")
    parser.add_argument("--starts", type=int, default=0, metavar="N", help="cold and warm starts, N of each")
    parser.add_argument("--serve-args", default="", metavar="FLAGS", help="further flags of `outrider serve`")
    parser.add_argument("--pairs", type=at_least(1), default=9, metavar="N", help="of each workload (default: 9)")
    integers = list_of(int, "N")
    parser.add_argument("--batch-sizes", type=integers, default=[1, 4, 8, 16], metavar="N,...", help="of short prompts")
    parser.add_argument("--long-batch-sizes", type=integers, default=[1, 8], metavar="N,...", help="of long prompts")
    parser.add_argument("--input-len", type=at_least(1), default=64, metavar="TOKENS", help="of short prompts")
    parser.add_argument("--long-input-len", type=at_least(1), default=2000, metavar="TOKENS", help="of long prompts")
    parser.add_argument("--output-len", type=at_least(2), default=128, metavar="TOKENS", help="generated for each")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keeps what the processes say")
    parser.add_argument("--output", type=Path, metavar="FILE", help="report as JSON")
    return parser


def _contests(args: argparse.Namespace) -> Iterator[Contest]:
    extra = tuple(shlex.split(args.serve_args))
    short = [Workload(batch, args.input_len, args.output_len) for batch in args.batch_sizes]
    workloads = [*short, *(Workload(batch, args.long_input_len, args.output_len) for batch in args.long_batch_sizes)]
    longest = max(each.input_len for each in workloads) + args.output_len
    most = max(each.batch for each in workloads)

    def worker(python: str, engine: str, model: str, **options: object) -> Callable[[Path], Worker]:
        return lambda log: Worker(python, engine, model, options, log)

    if args.vllm_python:
        vllm = worker(args.vllm_python, "vllm", args.model, max_model_len=longest)
        yield Contest("vllm", (*_NO_SPECULATION, *extra), vllm, workloads)
    if args.llama_python:
        llama = worker(args.llama_python, "llama", args.gguf, max_model_len=longest, max_num_seqs=most)
        yield Contest("llama.cpp", (*_NO_SPECULATION, *extra), llama, workloads)
        alone = Workload(1, args.input_len, args.output_len)
        yield Contest("llama.cpp, ngram on text that repeats", (*_NGRAM, *extra), llama, [alone], True)
    if args.offline:
        offline = worker(sys.executable, "outrider", args.model, **_as_settings(extra))
        streams = [Workload(_STREAMS, args.input_len, args.output_len)]
        yield Contest("outrider offline", (*_NO_SPECULATION, *extra), offline, streams)


def _run(contest: Contest, args: argparse.Namespace, logs: Path) -> dict[str, Any]:
    name = contest.name.replace(",", "").replace(" ", "-")
    with ExitStack() as stack:
        # One loads at a time: a peer that tunes itself while loading must have the machine for itself.
        server = OutriderServer(args.model, contest.settings, logs / f"server-for-{name}.log")
        stack.callback(server.close)
        server.pause()
        peer = contest.peer(logs / f"{name}.log")
        stack.callback(peer.close)
        peer.pause()
        print(f"\noutrider (gRPC) against {contest.name} {json.dumps(peer.versions)}\n{_HEADING}", flush=True)
        rows = []
        for workload in contest.workloads:
            prompts = _repeating(server, workload) if contest.has_repeating_text else _random(server, workload)
            pairs = interleave(server, peer, prompts, workload.output_len, args.pairs)
            rows.append(_row(workload, pairs))
            print(_line(rows[-1]), flush=True)
    return {"name": contest.name, "settings": contest.settings, "versions": peer.versions, "rows": rows}


def _random(server: OutriderServer, workload: Workload) -> Callable[[], Prompts]:
    endless = random_prompts(
        input_len=workload.input_len,
        output_len=workload.output_len,
        prefix_len=0,
        vocab_size=server.model_info.vocab_size,
        seed=workload.batch,
    )
    return lambda: [prompt.token_ids or () for prompt in islice(endless, workload.batch)]


def _repeating(server: OutriderServer, workload: Workload) -> Callable[[], Prompts]:
    seeds = count()

    def prompts() -> Prompts:
        texts = [repeating_text(next(seeds), num_words=workload.input_len) for _ in range(workload.batch)]
        return [server.tokenize(text)[: workload.input_len] for text in texts]

    return prompts


def _row(workload: Workload, pairs: Sequence[tuple[Sample, Sample]]) -> dict[str, Any]:
    """Medians of both sides and of their ratios; a median ratio is no ratio of medians."""
    ours, theirs = zip(*pairs, strict=True)
    cpus = cpu_count()
    end_to_end = [a.tokens_per_s / b.tokens_per_s for a, b in pairs]
    without_client = [a.tokens_per_s_without_client(cpus) / b.tokens_per_s for a, b in pairs]
    return {
        "workload": asdict(workload),
        "decode_tokens_per_s": [
            statistics.median(each.decode_tokens_per_s for each in side) for side in (ours, theirs)
        ],
        "decode_ratio": asdict(median_ratio([a.decode_tokens_per_s / b.decode_tokens_per_s for a, b in pairs])),
        "end_to_end_ratio": asdict(median_ratio(end_to_end)),
        "end_to_end_ratio_without_client": asdict(median_ratio(without_client)),
        "client_cpu_share": statistics.median((each.client_cpu_s or 0.0) / each.wall_s for each in ours),
        "pairs": [[asdict(a), asdict(b)] for a, b in pairs],
    }


_HEADING = (
    f"{'batch':>5} {'tokens':>10} {'decode tok/s':>13} {'peer':>9} {'ratio':>6} {'95%':>13} "
    f"{'end to end':>10} {'95%':>13} {'less client':>11} {'client CPU':>10}"
)


def _line(row: dict[str, Any]) -> str:
    workload, decode, whole = row["workload"], row["decode_ratio"], row["end_to_end_ratio"]
    ours, theirs = row["decode_tokens_per_s"]
    return (
        f"{workload['batch']:>5} {workload['input_len']:>5} + {workload['output_len']:<3}{ours:>13.1f} {theirs:>9.1f} "
        f"{decode['median']:>6.2f} {decode['low']:>6.2f}-{decode['high']:<6.2f} "
        f"{whole['median']:>10.2f} {whole['low']:>6.2f}-{whole['high']:<6.2f} "
        f"{row['end_to_end_ratio_without_client']['median']:>11.2f} {row['client_cpu_share']:>10.0%}"
    )


def _as_settings(flags: Sequence[str]) -> dict[str, object]:
    """Flags of `outrider serve` as the offline API takes them."""
    from server.config_sources import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return vars(parser.parse_args(list(flags)))


def _write(report: dict[str, Any], output: Path | None) -> None:
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
