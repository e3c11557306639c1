"""What `outrider bench engine` makes of timings, and its shapes."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from server.commands.bench_device import copy_bandwidth, device_name
from server.commands.bench_engine_rounds import Round, Row
from server.commands.bench_shapes import SHAPES, write_shape
from server.engine.protocol import Finished, FinishReason, SpeculationStats, Timing
from server.model.footprint import Footprint
from server.model.support import check_config


def finished(ttft_s: float, decode_s: float, num_tokens: int, num_accepted: int = 0) -> Finished:
    timing = Timing(ttft_s=ttft_s, decode_s=decode_s, total_s=ttft_s + decode_s)
    speculation = SpeculationStats(num_draft_tokens=2 * num_accepted, num_accepted_draft_tokens=num_accepted)
    return Finished(0, FinishReason.LENGTH, None, 8, num_tokens, 0, timing, speculation)


def test_decoding_begins_with_the_latest_first_token() -> None:
    measured = Round.of([finished(1.0, 10.0, 9), finished(3.0, 9.0, 9)])
    assert (measured.ttft_s, measured.decode_s) == (3.0, 9.0)
    assert (measured.num_steps, measured.num_tokens) == (8, 18)


def test_with_speculation_steps_are_fewer_than_tokens() -> None:
    measured = Round.of([finished(0.0, 5.0, 11, num_accepted=5), finished(0.0, 4.0, 11, num_accepted=6)])
    assert measured.num_steps == 5
    assert (measured.num_drafts, measured.num_accepted) == (22, 11)


def test_a_row_has_medians_and_the_distance_to_the_floor() -> None:
    rounds = [Round(0.5, decode_s, 10, 22, 0, 0) for decode_s in (1.0, 4.0, 2.0)]
    report = Row(batch=2, input_len=100, rounds=rounds, floor_s=0.05).report()
    assert report["step_ms"] == {"median": 200.0, "min": 100.0, "max": 400.0, "all": [100.0, 400.0, 200.0]}
    assert report["tokens_per_s"] == 10.0, "of (22 - 2) tokens in 2 s"
    assert report["prefill_tokens_per_s"] == 400.0
    assert report["step_per_floor"] == pytest.approx(4.0)
    assert (report["tokens_per_step"], report["acceptance_rate"]) == (1.0, None)
    json.dumps(report)


def test_accepted_drafts_show_as_tokens_per_step() -> None:
    report = Row(batch=1, input_len=1, rounds=[Round(0.1, 1.0, 4, 9, 8, 4)], floor_s=0.1).report()
    assert (report["tokens_per_step"], report["acceptance_rate"]) == (2.0, 0.5)
    assert report["step_per_floor"] == pytest.approx(2.5), "a step, not a token"


def test_one_token_each_is_a_prefill_alone() -> None:
    report = Row(batch=2, input_len=8, rounds=[Round(0.1, 0.0, 0, 2, 0, 0)], floor_s=0.1).report()
    assert (report["step_ms"], report["tokens_per_s"], report["step_per_floor"]) == (None, None, None)
    assert report["prefill_tokens_per_s"] == 160.0


@pytest.mark.parametrize(
    ("shape", "num_parameters", "num_read", "kv_token_nbytes"),
    [
        ("135m", 134_515_008, 134_515_008, 23_040),
        ("1b", 1_235_814_400, 1_235_814_400, 32_768),
        ("8b", 8_030_261_248, 7_504_924_672, 131_072),
    ],
)
def test_shapes_are_those_of_the_public_models(
    shape: str, num_parameters: int, num_read: int, kv_token_nbytes: int, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(write_shape(shape, tmp_path))
    check_config(config, trusts_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert config.num_hidden_layers * config.num_key_value_heads * head_dim * 2 * 2 == kv_token_nbytes
    footprint = Footprint.of(model, kv_token_nbytes)
    assert footprint.weight_nbytes == 2 * num_read
    assert footprint.step_nbytes(3, 10.5) == 2 * num_read + 31.5 * kv_token_nbytes
    assert set(SHAPES) >= {shape}


def test_the_device_is_named_and_its_copies_are_timed() -> None:
    assert device_name("cpu")
    assert copy_bandwidth("cpu", nbytes=1 << 20) > 1e8
