"""One request on the event loop's side: from scheduler outputs to stream events."""

import asyncio

from server.engine.detokenize import ChoiceText, Decoder
from server.engine.protocol import (
    Finished,
    FinishReason,
    PromptLogprobs,
    SpeculationStats,
    Started,
    Timing,
)
from server.engine.speculation_log import SpeculationLog
from server.engine.stream import Mailbox
from server.errors import InvalidRequest, OutriderError
from server.kv_handle import ChoiceState, KVHandle
from server.request import Request
from server.scheduler.outputs import SequenceOutput


class Choice:
    """Text, counts and times of one choice."""

    def __init__(self, decoder: Decoder, request: Request, index: int) -> None:
        self._request = request
        self.index = index
        self.text = ChoiceText(decoder, request.prompt_token_ids, request.sampling)
        self.is_finished = False
        if request.continuation is not None:
            self._resume(request.continuation.choices[index])
        self._num_cached = 0
        self._scheduled_s: float | None = None
        self._transfer_s = 0.0
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._speculation = SpeculationLog(request.speculation)

    def _resume(self, state: ChoiceState | None) -> None:
        """Go on where another node has stopped; the choice may have ended there."""
        if state is None:
            self.is_finished = True
            return
        try:
            self.text.resume(state)
        except InvalidRequest as error:
            raise error.under(f"continuation.choices[{self.index}]") from None

    def take_in(self, output: SequenceOutput) -> tuple[FinishReason, int | str | None] | None:
        """Add an output's tokens, left to right. Returns: why the choice ends, with what matched, if it does."""
        if output.token_ids:
            self._count(output)
        self._num_cached = output.num_cached_tokens
        self._scheduled_s = output.scheduled_s
        self._transfer_s = output.transfer_s
        last = len(output.token_ids) - 1
        for i, token_id in enumerate(output.token_ids):
            is_stop_token = i == last and output.finish_reason is FinishReason.STOP
            logprobs = output.logprobs[i] if output.logprobs else None
            stop = self.text.push(token_id, logprobs, is_stop_token=is_stop_token)
            if stop is not None:
                return FinishReason.STOP, stop
        if output.finish_reason is None:
            return None
        return output.finish_reason, output.stop_token_id

    def _count(self, output: SequenceOutput) -> None:
        if self._first_token_s is None:
            self._first_token_s = output.settled_s
        self._last_token_s = output.settled_s
        self._speculation.add(output.num_drafted, output.num_accepted, output.step_time)

    def finished(
        self,
        reason: FinishReason,
        stop_reason: int | str | None,
        now: float,
        state: ChoiceState | None = None,
        source: KVHandle | None = None,
    ) -> Finished:
        """The closing event. Args: state, source: of a choice that is handed on."""
        return Finished(
            index=self.index,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_completion_tokens=self.text.num_tokens,
            num_cached_tokens=self._num_cached,
            timing=self._timing(now),
            speculation=self._speculation.stats(),
            handed_on=None if state is None else self.text.handed_on(state),
            source=None if state is None else source,
        )

    def _timing(self, now: float) -> Timing:
        arrival = self._request.arrival_s
        scheduled, first, last = self._scheduled_s, self._first_token_s, self._last_token_s
        if scheduled is None:
            return Timing(queue_s=now - arrival, total_s=now - arrival)
        if first is None or last is None:
            return Timing(queue_s=scheduled - arrival, prefill_s=now - scheduled, total_s=now - arrival)
        return Timing(
            queue_s=scheduled - arrival,
            prefill_s=first - scheduled,
            decode_s=last - first,
            ttft_s=first - arrival,
            total_s=now - arrival,
            transfer_s=self._transfer_s,
        )


class LiveRequest:
    """A request between open() and its end; used from the event loop only.

    Before submit() it has a mailbox but no choices.

    Attributes:
        expiry: ends it at its deadline while it is not submitted; then the scheduler does.
    """

    def __init__(self, request_id: str, stream_interval: int = 1) -> None:
        self.mailbox = Mailbox(request_id, stream_interval)
        self.expiry: asyncio.TimerHandle | None = None
        self.is_started = False
        self.request: Request | None = None
        self._choices: list[Choice] = []
        self._source: KVHandle | None = None  # comes with one choice, which a stop string may have ended
        self._num_open = 0

    @property
    def is_submitted(self) -> bool:
        """Whether the engine has the tokenised request."""
        return self.request is not None

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return self.is_submitted and self._num_open == 0

    @property
    def is_handed_on(self) -> bool:
        """Whether another node is to go on with a choice."""
        return any(end.finish_reason is FinishReason.HANDED_ON for end in self.mailbox.finished)

    def submit(self, request: Request, decoder: Decoder) -> None:
        """Take in the tokenised request. Raises: InvalidRequest, if it goes on in a way that cannot be."""
        self._choices = [Choice(decoder, request, index) for index in range(request.sampling.n)]
        self._num_open = sum(not choice.is_finished for choice in self._choices)
        self.request = request

    def deliver(self, output: SequenceOutput) -> bool:
        """Turn an output into stream events.

        Returns: whether a stop string has ended the choice before the scheduler knows; what that still sends for it
            is dropped.
        """
        self._source = output.source or self._source
        choice = self._choices[output.choice]
        if choice.is_finished:
            return False
        if not self.is_started or output.prompt_logprobs:
            self._start(output)
        end = choice.take_in(output)
        # Whoever goes on with it streams what is held back here.
        is_final = end is not None and end[0] is not FinishReason.HANDED_ON
        piece = choice.text.take(is_final=is_final)
        if piece is not None:
            self.mailbox.put_piece(choice.index, piece)
        if end is None:
            return False
        self._finish(choice, *end, now=output.settled_s, state=output.handed_on)
        return output.finish_reason is None

    def _start(self, output: SequenceOutput) -> None:
        assert self.request is not None
        if not self.is_started:
            self.is_started = True
            num_prompt = len(self.request.prompt_token_ids)
            prompt_token_ids = self.request.prompt_token_ids if self.request.hands_on else ()
            self.mailbox.put_first(
                Started(self.request.request_id, num_prompt, output.num_cached_tokens, prompt_token_ids)
            )
        if output.prompt_logprobs:
            self.mailbox.put_first(PromptLogprobs(output.prompt_logprobs))

    def abort(self, now: float) -> None:
        """End every open choice, streaming what was held back; a request not yet tokenised has one."""
        if not self.is_submitted:
            no_tokens = (0, 0, 0)
            self.mailbox.put_finished(
                Finished(0, FinishReason.ABORT, None, *no_tokens, timing=Timing(), speculation=SpeculationStats())
            )
        for choice in self._choices:
            if not choice.is_finished:
                piece = choice.text.take(is_final=True)
                if piece is not None:
                    self.mailbox.put_piece(choice.index, piece)
                self._finish(choice, FinishReason.ABORT, None, now)
        self.mailbox.close()

    def break_off(self, error: OutriderError, now: float) -> None:
        """End with an error; what the open choices had come to is noted, but not streamed."""
        for choice in self._choices:
            if not choice.is_finished:
                self._close(choice)
                self.mailbox.finished.append(choice.finished(FinishReason.ABORT, None, now))
        self.mailbox.close(error)

    def _finish(
        self,
        choice: Choice,
        reason: FinishReason,
        stop_reason: int | str | None,
        now: float,
        state: ChoiceState | None = None,
    ) -> None:
        self._close(choice)
        self.mailbox.put_finished(choice.finished(reason, stop_reason, now, state, self._source))

    def _close(self, choice: Choice) -> None:
        choice.is_finished = True
        self._num_open -= 1
