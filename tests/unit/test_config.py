"""Settings by name: defaults, ranges, and what a refusal says."""

from typing import Any, cast

import pytest
from pydantic import ValidationError

from server.config import FLAT_SECTIONS, SETTING_NAMES, CacheConfig, Config, SchedulerConfig
from server.config_values import accepts_none, parse_byte_count
from server.errors import ConfigError


def _refusal(**settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_kwargs(**settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_those_of_the_sections() -> None:
    assert Config.from_kwargs() == Config()
    assert Config().speculative == "auto"
    assert Config().model.model == "smollm2-135m"


def test_settings_reach_their_sections() -> None:
    config = Config.from_kwargs(model="m", block_size=16, max_num_seqs=3, port=0, metrics_port=0, max_model_len=99)
    assert (config.model.model, config.cache.block_size, config.scheduler.max_num_seqs) == ("m", 16, 3)
    assert (config.server.port, config.observability.metrics_port, config.model.max_model_len) == (0, 0, 99)


def test_names_are_unique_and_described() -> None:
    assert len(set(SETTING_NAMES)) == len(SETTING_NAMES)
    undescribed = [n for s in FLAT_SECTIONS.values() for n, field in s.model_fields.items() if not field.description]
    assert undescribed == []


def test_flat_names_every_setting() -> None:
    assert tuple(Config().flat()) == SETTING_NAMES
    again = Config.from_kwargs(speculative_config={"method": "ngram", "match": "last"})
    assert Config.from_kwargs(**again.flat()) == again


def test_frozen_and_keyword_only() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        setattr(SchedulerConfig(), "max_num_seqs", 2)  # noqa: B010 mypy knows it is frozen
    with pytest.raises(TypeError, match="positional"):
        cast("Any", CacheConfig)(32)


def test_unknown_name_points_at_the_nearest() -> None:
    assert _refusal(max_num_seq=1) == "max_num_seq: no such setting; did you mean max_num_seqs? (from argument)"
    assert "did you mean" not in _refusal(zzzzzz=1)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("block_size", 20, "must be an integer >= 16 and <= 256 and a multiple of 16, got 20"),
        ("block_size", 272, "<= 256"),
        ("block_size", True, "must be an integer >= 16"),
        ("block_size", "many", "got 'many'"),
        ("max_num_seqs", None, "must be an integer >= 1 and <= 4096, got None"),
        ("max_num_seqs", 1.5, "got 1.5"),
        ("max_model_len", 1, "must be an integer >= 2, or none, got 1"),
        ("gpu_memory_utilization", 0, "must be a number > 0 and <= 1, got 0"),
        ("gpu_memory_utilization", float("nan"), "got nan"),
        ("shutdown_timeout_seconds", "inf", "must be a number >= 0, got 'inf'"),
        ("watermark", 1, "must be a number >= 0 and < 1, got 1"),
        ("port", 65536, "must be an integer >= 0 and <= 65535, got 65536"),
        ("dtype", "int8", "must be one of auto, bfloat16, float16, float32, got 'int8'"),
        ("pipeline_depth", 2, "must be one of auto, 0, 1, got 2"),
        ("pipeline_depth", True, "got True"),
        ("device", "gpu", "must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        ("device", "cuda:x", "got 'cuda:x'"),
        ("enable_prefix_caching", "perhaps", "must be true or false, got 'perhaps'"),
        ("served_model_name", 3, "must be text, or none, got 3"),
        ("kv_cache_memory_bytes", "2 parsecs", "must be a number of bytes, such as"),
        ("kv_cache_memory_bytes", "0", "must be an integer >= 1, or none, got '0'"),
        ("max_message_bytes", "4GiB", "<= 2147483647, got '4GiB'"),
        (
            "speculative_config",
            "{",
            'must be a JSON object such as {"method": "ngram"}, a list of them, auto or none, got \'{\'',
        ),
        ("speculative_config", "3", "must be a mapping, a list of them, auto or none, got '3'"),
        ("speculative_config", [1], "must be a mapping, a list of them, auto or none, got [1]"),
    ],
)
def test_refusal_names_field_value_and_limits(name: str, value: object, words: str) -> None:
    message = _refusal(**{name: value})
    assert message.startswith(f"{name}: ")
    assert words in message
    assert message.endswith("(from argument)")


def test_every_problem_is_named_at_once() -> None:
    message = _refusal(block_size=1, port=-1, speculative_config={"method": "magic"}, no_such=1)
    assert all(name in message for name in ("block_size:", "port:", "speculative_config.method:", "no_such:"))


def test_long_values_are_cut() -> None:
    assert len(_refusal(speculative_config="x" * 10_000)) < 300


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("1e9", 10**9),
        ("1.5GB", 1_500_000_000),
        ("16k", 16_000),
        ("1_000", 1000),
        ("7", 7),
        (7, 7),
    ],
)
def test_byte_counts(text: object, nbytes: int) -> None:
    assert parse_byte_count(text) == nbytes
    assert Config.from_kwargs(kv_cache_memory_bytes=text).cache.kv_cache_memory_bytes == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e", "1.5.5", "5 m b", "inf", "0x10"])
def test_what_is_no_byte_count(text: str) -> None:
    with pytest.raises(ValueError, match="number of bytes"):
        parse_byte_count(text)


def test_none_as_text_unsets_whatever_may_be_unset() -> None:
    optional = [n for s in FLAT_SECTIONS.values() for n, field in s.model_fields.items() if accepts_none(field)]
    flat = Config.from_kwargs(**dict.fromkeys(optional, "none")).flat()
    assert {flat[name] for name in optional} == {None}
    assert "got 'none'" in _refusal(block_size="none")


@pytest.mark.parametrize("endpoint", ["collector:4317", "http://127.0.0.1:4317/", "https://[::1]:4317"])
def test_endpoints_of_a_collector(endpoint: str) -> None:
    assert Config.from_kwargs(otlp_endpoint=endpoint).observability.otlp_endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint", ["notaurl", "http://collector", "ftp://collector:1", "collector:port", "http://c:1/v1/traces", "::1:1"]
)
def test_what_is_no_endpoint(endpoint: str) -> None:
    assert "otlp_endpoint: must be HOST:PORT, http://HOST:PORT or https://HOST:PORT" in _refusal(otlp_endpoint=endpoint)


@pytest.mark.parametrize("depth", ["auto", 0, 1])
def test_pipeline_depth_as_text(depth: object) -> None:
    assert Config.from_kwargs(pipeline_depth=str(depth)).scheduler.pipeline_depth == depth
