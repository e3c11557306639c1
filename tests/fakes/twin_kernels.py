"""The worker's CUDA path on the CPU: kernels by their eager twins, captured segments by running them again.

What a graph replays is what was captured, so a replay here runs the same functions of the same tensors, and leaves
what they make at the place where the first run left it. One flight must do for all steps: at pipeline depth 0.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from proposers.base import ProposeInput
from proposers.ngram import NgramProposer
from server.kernels import jit, reference, rejection_reference, token_mask_reference
from server.kernels.noise import Stream, gumbel
from server.model.attention import ATTENTION_NAME
from server.worker.buckets import Bucket
from server.worker.results import StepOutputs
from server.worker.target import TargetOutputs


def gumbel_argmax(
    logits: Tensor,
    key: Tensor,
    position: Tensor,
    temperature: Tensor,
    stream: int,
    noise_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See kernels.gumbel_argmax."""
    places = position[:, None] + torch.arange(logits.shape[1])
    vocabulary = logits.shape[2] if noise_ids is None else noise_ids
    noise = gumbel(key[:, None].expand_as(places), places, Stream(stream), vocabulary)
    factor = temperature[:, None, None]
    scores = torch.where(factor > 0, logits / torch.where(factor > 0, factor, 1.0) + noise, logits)
    best, ids = torch.where(scores.isnan(), torch.inf, scores).max(-1)
    return ids, best


def truncate(logits: Tensor, slots: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """See kernels.truncate."""
    rows = (temperature[slots] > 0).nonzero()[:, 0]
    own = slots[rows]
    scaled = logits[rows] / temperature[own][:, None, None]
    logits[rows] = reference.restrict(scaled, top_k=top_k[own], top_p=top_p[own], min_p=min_p[own])


def ngram_lookup(
    token_ids: Tensor,
    slots: Tensor,
    num_tokens: Tensor,
    max_drafts: Tensor,
    max_num_tokens: int,
    rule: Tensor,
    num_drafts: int,
) -> tuple[Tensor, Tensor]:
    """See kernels.ngram_lookup."""
    shortest, longest, takes_last = rule.tolist()
    twin = NgramProposer(num_drafts, shortest, longest, takes_last=bool(takes_last), device=slots.device)
    draft = twin.propose_eagerly(ProposeInput(token_ids, slots, num_tokens, max_drafts, max_num_tokens))
    return draft.ids, draft.counts


class ReplayedGraphs:
    """Stands in for StepGraphs. Attributes: num_replays: of second segments, by whether they drafted."""

    num_replays: dict[bool, int]

    def __init__(self, _: torch.device) -> None:
        self._steps: dict[Bucket, tuple[Callable[[], TargetOutputs], TargetOutputs, dict[bool, Any]]] = {}
        type(self).num_replays = {False: 0, True: 0}

    def capture(
        self,
        bucket: Bucket,
        first: Callable[[], TargetOutputs],
        seconds: Mapping[bool, Callable[[TargetOutputs], StepOutputs]],
    ) -> None:
        """Keep the segments, and where their first run leaves what it makes."""
        target = first()
        self._steps[bucket] = first, target, {drafts: (second, second(target)) for drafts, second in seconds.items()}

    def replay_first(self, bucket: Bucket) -> TargetOutputs:
        """Run it again."""
        first, target, _ = self._steps[bucket]
        _put(target, first())
        return target

    def replay_second(self, bucket: Bucket, *, drafts: bool) -> StepOutputs:
        """Run it again, on what the first has left."""
        _, target, seconds = self._steps[bucket]
        drafts = drafts if drafts in seconds else not drafts
        self.num_replays[drafts] += 1
        second, outputs = seconds[drafts]
        _put(outputs, second(target))
        return outputs  # type: ignore[no-any-return]


def _put(place: Any, found: Any) -> None:
    """Tensors where others are."""
    if isinstance(place, Tensor):
        place.copy_(found)
    elif isinstance(place, Mapping):
        for name, value in place.items():
            _put(value, found[name])
    elif isinstance(place, (TargetOutputs, StepOutputs)):
        for field in fields(place):
            _put(getattr(place, field.name), getattr(found, field.name))


@contextmanager
def as_on_cuda() -> Iterator[type[ReplayedGraphs]]:
    """Engines that are built now run on the CPU as they do on CUDA, but for attention."""
    twins: dict[str, object] = {
        "server.worker.target.look_up_tokens": reference.look_up_tokens,
        "server.worker.sampler.gumbel_argmax": gumbel_argmax,
        "server.worker.sampler.truncate": truncate,
        "server.worker.rejection.gumbel_argmax": gumbel_argmax,
        "server.worker.rejection.verify_drafts": rejection_reference.verify_drafts,
        "server.worker.logits.penalise": lambda *arguments: reference.penalise(*arguments[:-1]),
        "server.worker.token_masks.token_mask": token_mask_reference,
        "server.worker.warm_up.mask_tokens": token_mask_reference.mask_tokens,
        "proposers.draft_sampling.gumbel_argmax": gumbel_argmax,
        "proposers.ngram.ngram_lookup": ngram_lookup,
        "server.model.loader.attention_name": lambda *_, **__: ATTENTION_NAME,
        "proposers.eagle_network.attention_name": lambda *_, **__: ATTENTION_NAME,
        "server.worker.runner.StepGraphs": ReplayedGraphs,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(jit, "is_available", lambda _: True))
        for name, twin in twins.items():
            stack.enter_context(patch(name, twin))
        yield ReplayedGraphs
