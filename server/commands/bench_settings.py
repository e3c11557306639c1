"""The model and the engine under a benchmark that runs in this process."""

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.commands.bench_shapes import SHAPES, write_shape
from server.config_sources import ResolvedConfig, add_arguments, resolve
from server.errors import ConfigError
from server.request import ModelInfo
from server.speculative_config import SPECULATIVE_CONFIG

_SECTIONS = ("model", "cache", "scheduler")


def add_settings(parser: argparse.ArgumentParser, *, takes_several: bool = False) -> None:
    """Add --shape and the settings of model and engine. Args: takes_several: see add_arguments."""
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        metavar="{" + ",".join(SHAPES) + "}",
        help="a public architecture with random weights, in place of MODEL",
    )
    add_arguments(parser, _SECTIONS, takes_several=takes_several)


@contextmanager
def given_settings(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """What was given, for `resolve_compiled`; the folder of a shape lives as long as it is used.

    Raises: ConfigError for a shape and a model.
    """
    settings: dict[str, object] = vars(args)
    if args.shape is None:
        yield settings
        return
    if taken := [name for name in ("model", "load_format") if name in settings]:
        raise ConfigError(f"{taken[0]}: --shape brings its own; give one of the two")
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        model = str(write_shape(args.shape, Path(folder)))
        yield {"served_model_name": args.shape, **settings, "model": model, "load_format": "dummy"}


def resolve_compiled(settings: dict[str, object]) -> ResolvedConfig:
    """The settings of all sources; what is measured is the final form, without drafts, unless asked otherwise.

    Raises: ConfigError.
    """
    sources = resolve(settings, os.environ).sources
    ours = {"compile": "wait", SPECULATIVE_CONFIG: None}
    ours = {name: value for name, value in ours.items() if sources[name] == "default"}
    return resolve({**settings, **ours}, os.environ)


def check_capacity(info: ModelInfo, max_num_seqs: int, *, flag: str, batch: int, num_tokens: int, lengths: str) -> None:
    """Refuse what would be cut short, wait or be preempted: the table would not show it.

    Args:
        flag: that gave `batch`, the most sequences at a time.
        num_tokens: of the longest. lengths: the flags that it comes from.
    Raises: ConfigError.
    """
    if batch > max_num_seqs:
        raise ConfigError(f"{flag}: {batch} sequences do not run together; raise --max-num-seqs")
    if num_tokens > info.max_model_len:
        raise ConfigError(f"{lengths} is {num_tokens} tokens, and {info.served_model_name} takes {info.max_model_len}")
    num_blocks = batch * -(-num_tokens // info.block_size)
    if num_blocks > info.num_kv_blocks:
        raise ConfigError(
            f"{flag}: {batch} sequences of {num_tokens} tokens need {num_blocks} KV blocks, and there are "
            f"{info.num_kv_blocks}; raise --kv-cache-memory-bytes"
        )
