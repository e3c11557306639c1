"""How far a request has come, and the requests for the nodes that begin it and go on with it."""

from dataclasses import dataclass, field

from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1.disaggregation_pb2 import ChoiceState, KvHandle


@dataclass(slots=True)
class _Choice:
    """Attributes: handed_on: how it ended on the node that began it, if that handed it on."""

    token_ids: list[int] = field(default_factory=list)
    handed_on: pb.Finished | None = None
    has_ended: bool = False

    def state(self) -> ChoiceState:
        """For whoever goes on: as it was handed on, else what was delivered before its node was lost."""
        if self.has_ended:
            return ChoiceState(ended=True)
        if self.handed_on is not None and len(self.token_ids) == self.handed_on.handed_on.delivered_tokens:
            return self.handed_on.handed_on
        return ChoiceState(token_ids=self.token_ids, delivered_tokens=len(self.token_ids))


class Progress:
    """Collected from the messages of all nodes that had a part in a request; owned by its reader."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._prompt_token_ids = list(request.token_ids.ids)
        self._choices = [_Choice() for _ in range(max(1, request.sampling.n))]
        self._source: KvHandle | None = None
        self._request_id = request.request_id

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended for good."""
        return all(choice.has_ended for choice in self._choices)

    @property
    def request_id(self) -> str:
        """The request's id, once a node has begun."""
        return self._request_id

    @property
    def has_lease(self) -> bool:
        """Whether the node that began holds KV for the one that goes on."""
        return self._source is not None and bool(self._source.lease_id)

    @property
    def can_go_on(self) -> bool:
        """Whether another node could go on from what was delivered: it needs the prompt's ids.

        And log probabilities of the prompt, which come in parts, are reported by the node that begins.
        """
        return bool(self._prompt_token_ids) and not self._request.sampling.HasField("prompt_logprobs")

    def first_request(self) -> pb.GenerateRequest:
        """The request for a prefill node."""
        request = self._copy()
        request.hand_on = True
        return request

    def continuation(self) -> pb.GenerateRequest:
        """The request for a decode node: the prompt as ids, and how far each choice has come."""
        request = self._copy()
        request.request_id = self._request_id
        if request.WhichOneof("prompt") != "token_ids":
            request.token_ids.ids.extend(self._prompt_token_ids)
        request.continuation.choices.extend(choice.state() for choice in self._choices)
        if self._source is not None:
            request.continuation.source.CopyFrom(self._source)
        return request

    def forget(self) -> None:
        """The node that began was lost before it delivered anything; another one begins anew."""
        self._choices = [_Choice() for _ in self._choices]
        self._source = None

    def take_in(self, message: pb.GenerateResponse) -> None:
        """Note what a node says."""
        match message.WhichOneof("event"):
            case "started":
                self._request_id = message.started.request_id
                self._prompt_token_ids = self._prompt_token_ids or list(message.started.prompt_token_ids)
            case "delta":
                self._choices[message.delta.index].token_ids += message.delta.token_ids
            case "finished":
                self._end(message.finished)

    def complete(self, finished: pb.Finished) -> None:
        """Make the end of a choice on a decode node that of the whole choice.

        The prompt was computed, and its cached tokens found, where it began. All the time on the decode node lies
        behind the first token.
        """
        begun = self._choices[finished.index].handed_on
        if begun is None:
            return
        finished.usage.cached_tokens = begun.usage.cached_tokens
        rest_s, transfer_s = finished.timing.total_seconds, finished.timing.transfer_seconds
        finished.timing.CopyFrom(begun.timing)
        finished.timing.transfer_seconds = transfer_s
        finished.timing.decode_seconds += rest_s
        finished.timing.total_seconds += rest_s

    def _copy(self) -> pb.GenerateRequest:
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        return request

    def _end(self, finished: pb.Finished) -> None:
        choice = self._choices[finished.index]
        if finished.finish_reason != pb.FINISH_REASON_HANDED_ON:
            choice.has_ended = True
            return
        choice.handed_on = finished
        if finished.HasField("source"):
            self._source = finished.source
