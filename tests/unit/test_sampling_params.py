"""Sampling parameters of another type are refused by name, as the offline API hands them over unseen."""

from typing import Any

import numpy as np
import pytest

from server.errors import InvalidRequest
from server.request import SamplingParams


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"n": "2"}, "n: must be an integer, got '2'"),
        ({"n": True}, "n: must be an integer, got True"),
        ({"top_k": 1.5}, "top_k: must be an integer, got 1.5"),
        ({"seed": "x"}, "seed: must be an integer, got 'x'"),
        ({"min_tokens": None}, "min_tokens: must be an integer, got None"),
        ({"temperature": "hot"}, "temperature: must be a number, got 'hot'"),
        ({"top_p": None}, "top_p: must be a number, got None"),
        ({"ignore_eos": 1}, "ignore_eos: must be true or false, got 1"),
        ({"stop": 5}, "stop: must be a list, got 5"),
        ({"stop": ["a", 5]}, "stop[1]: must be text, got 5"),
        ({"bad_words": "abc"}, "bad_words: must be a list, got 'abc'"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids[0]: must be an integer, got 'x'"),
        ({"stop_token_ids": None}, "stop_token_ids: must be a list, got None"),
        ({"allowed_token_ids": [1, 2.5]}, "allowed_token_ids[1]: must be an integer, got 2.5"),
        ({"logit_bias": [1]}, "logit_bias: must be a mapping from token ids to numbers, got [1]"),
        ({"logit_bias": {"a": 1}}, "logit_bias: must be a mapping from token ids to numbers, got {'a': 1}"),
        ({"n": "2", "stop": 5}, "n: must be an integer, got '2'; stop: must be a list, got 5"),
    ],
)
def test_another_type_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**values)
    assert str(caught.value) == words


def test_whatever_is_such_a_number_or_list_will_do() -> None:
    values: dict[str, Any] = {"seed": np.int64(3), "temperature": 0, "top_p": np.float32(0.5)}
    params = SamplingParams(**values, stop_token_ids=np.array([1, 2]), stop="a", bad_words=(w for w in "xy"))  # type: ignore[arg-type]
    assert (params.seed, params.temperature, params.top_p) == (3, 0, 0.5)
    assert (params.stop_token_ids, params.stop, params.bad_words) == ((1, 2), ("a",), ("x", "y"))
