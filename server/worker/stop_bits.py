"""Where a text that follows a grammar may end."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from server.request import Request


class StopBits:
    """Lets a request's stop ids follow exactly where its grammar lets the text end.

    Where the grammar has other tokens left, a minimum of tokens is kept, and EOS is not taken if it is to be
    ignored. Where it has none, every stop id may follow: nothing else can.
    """

    def __init__(self, request: Request, num_words: int) -> None:
        """Args: request: with a grammar."""
        assert request.grammar is not None
        sampling, eos_token_ids = request.sampling, set(request.grammar.eos_token_ids)
        ignored = eos_token_ids - set(sampling.stop_token_ids) if sampling.ignore_eos else set()
        self._word, self._bit = divmod(request.grammar.eos_token_ids[0], 32)
        self._at_end = _packed(request.stop_token_ids, num_words)
        self._before_end = _packed(request.stop_token_ids - ignored, num_words)
        self._min_tokens = sampling.min_tokens
        # What the grammar says of EOS is then all there is to say.
        self._is_plain = request.stop_token_ids == eos_token_ids and not ignored and not sampling.min_tokens

    def apply(self, masks: npt.NDArray[np.uint32], num_output: int) -> None:
        """Correct what a grammar says, in place.

        Args:
            masks: [positions, words], see MaskWriter.
            num_output: tokens generated before the first position.
        """
        if self._is_plain:
            return
        may_end = (masks[:, self._word] >> self._bit) & 1
        masks &= ~self._at_end
        for i in np.flatnonzero(may_end).tolist():
            if not masks[i].any():
                masks[i] = self._at_end
            elif num_output + i >= self._min_tokens:
                masks[i] |= self._before_end


def _packed(token_ids: Iterable[int], num_words: int) -> npt.NDArray[np.uint32]:
    words = np.zeros(num_words, np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words
