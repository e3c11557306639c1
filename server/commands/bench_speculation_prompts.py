"""What `outrider bench speculation` sends: text that repeats itself, text that does not, and no text at all."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from pydoc_data.topics import topics

from clients.workload import Prompt, random_prompts
from server.preprocess import Preprocessor, TextPrompt

_REPEATED = 16
"""Tokens that are said again and again."""
_CHARACTERS_PER_TOKEN = 16
"""More than any tokenizer makes of prose."""


def repeated_prompts(preprocessor: Preprocessor, *, input_len: int, output_len: int, seed: int) -> Iterator[Prompt]:
    """Endless prompts of a few words each, over and over."""
    for prompt in text_prompts(preprocessor, input_len=_REPEATED, output_len=output_len, seed=seed):
        assert prompt.token_ids is not None
        yield Prompt(
            token_ids=tuple(itertools.islice(itertools.cycle(prompt.token_ids), input_len)), max_tokens=output_len
        )


def text_prompts(preprocessor: Preprocessor, *, input_len: int, output_len: int, seed: int) -> Iterator[Prompt]:
    """Endless passages of the Python reference, which every Python brings: prose with examples of code.

    Raises: InvalidRequest if the model has no tokenizer; when iterated.
    """
    source = random.Random(seed)
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    while True:
        first = source.randrange(len(paragraphs))
        following = (paragraphs[(first + i) % len(paragraphs)] for i in itertools.count())
        text = next(following)
        while len(text) < input_len * _CHARACTERS_PER_TOKEN:
            text += "\n\n" + next(following)
        token_ids = preprocessor.tokenize(TextPrompt(text))
        if len(token_ids) >= input_len:
            yield Prompt(token_ids=tuple(token_ids[:input_len]), max_tokens=output_len)


def _random_prompts(preprocessor: Preprocessor, *, input_len: int, output_len: int, seed: int) -> Iterator[Prompt]:
    return random_prompts(
        input_len=input_len,
        output_len=output_len,
        prefix_len=0,
        vocab_size=preprocessor.model_info.vocab_size,
        seed=seed,
    )


PROMPTS: Mapping[str, Callable[..., Iterator[Prompt]]] = {
    "repeat": repeated_prompts,
    "text": text_prompts,
    "random": _random_prompts,
}
"""Of each workload; all take a Preprocessor, input_len, output_len and seed."""
