"""The arguments of a decoder layer, as tensors and back."""

import pytest
import torch
from torch import Tensor

from server.model.attention import AttentionGroup, AttentionStep
from server.model.layer_call import LayerCall


def _arguments(num_tokens: int, starts: Tensor | None = None) -> dict[str, object]:
    tokens, rows = torch.arange(num_tokens), torch.arange(1)
    step = AttentionStep(
        write_blocks=tokens,
        write_offsets=tokens + 1,
        positions=tokens + 2,
        first_token=rows,
        num_query=rows + 3,
        slots=rows + 4,
        block_table=rows[None],
        groups=(AttentionGroup(0, 1, 0, num_tokens, num_tokens),),
        starts=starts,
    )
    cos_and_sin = (torch.ones(1, num_tokens, 4), torch.zeros(1, num_tokens, 4))
    return {"attention_mask": None, "use_cache": False, "position_embeddings": cos_and_sin, "attention_step": step}


def test_flatten_and_rebuild() -> None:
    call = LayerCall.of(_arguments(3))
    arguments = _arguments(5)
    tensors = call.flatten(arguments)
    assert len(tensors) == len(call.tensors) == 9
    rebuilt = call.rebuild(tensors)
    assert rebuilt.keys() == arguments.keys()
    assert rebuilt["attention_mask"] is None
    assert rebuilt["use_cache"] is False
    assert all(a is b for a, b in zip(rebuilt["position_embeddings"], arguments["position_embeddings"], strict=True))  # type: ignore[call-overload]
    step = rebuilt["attention_step"]
    assert isinstance(step, AttentionStep)
    assert step.positions is arguments["attention_step"].positions  # type: ignore[attr-defined]
    assert step.groups == ()
    assert step.starts is None


def test_a_step_with_starts_is_a_call_of_its_own_kind() -> None:
    starts = torch.zeros(9, dtype=torch.int64)
    call = LayerCall.of(_arguments(3, starts))
    assert call.rebuild(call.flatten(_arguments(3, starts)))["attention_step"].starts is starts
    with pytest.raises(ValueError, match="was called with"):
        LayerCall.of(_arguments(3)).flatten(_arguments(3, starts))


def test_calls_of_another_kind_are_refused() -> None:
    call = LayerCall.of(_arguments(3))
    with pytest.raises(ValueError, match="attention_mask"):
        call.flatten({**_arguments(3), "attention_mask": torch.zeros(1)})
    with pytest.raises(ValueError, match="was called with"):
        call.flatten({"attention_mask": None})
    with pytest.raises(TypeError, match="past_key_values of a decoder layer is a object"):
        LayerCall.of({"past_key_values": object()})
