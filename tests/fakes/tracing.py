"""What tests of traced code share: a tracer that remembers nothing, and requests that meet all of it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._dynamo.utils import counters

from server.request import Request, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@contextmanager
def nothing_traced() -> Iterator[None]:
    """Before and after."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def requests(count: int) -> list[Request]:
    """Prompts of many lengths, some of which repeat themselves."""
    prompts = [tuple(range(3 + i, 4 + 2 * i)) * (1 + i % 3) for i in range(count)]
    return [Request(request_id=f"r{i}", prompt_token_ids=prompt, sampling=GREEDY) for i, prompt in enumerate(prompts)]
