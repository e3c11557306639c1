"""The blocking client of servers that share the work: the asyncio one, on an event loop in a thread of its own.

with BlockingDisaggregatedClient(prefill=["a:50051"], decode=["c:50051"]) as client:
    for delta in client.generate("Once upon a time", max_tokens=32):
        print(delta.text, end="")
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from clients.disaggregated import DEFAULT_MIN_PROMPT_TOKENS, DisaggregatedClient, DisaggregatedGeneration
from clients.metadata import Metadata
from clients.nodes import DEFAULT_HANG_TIMEOUT_S
from clients.outputs import Delta, Event, Finished, GenerationOutput, Started
from clients.requests import GenerateOptions
from clients.retry import DEFAULT_RETRY, RetryPolicy

_Item = TypeVar("_Item")


class _LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="outrider-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _Item]) -> _Item:
        """Run it there; an interrupt here cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class BlockingDisaggregatedGeneration:
    """One generation under way, see DisaggregatedGeneration; read by one thread, once."""

    def __init__(self, generation: DisaggregatedGeneration, thread: _LoopThread) -> None:
        self._generation = generation
        self._thread = thread

    @property
    def started(self) -> Started | None:
        """What the first node said when it began; None before that."""
        return self._generation.started

    @property
    def finished(self) -> dict[int, Finished]:
        """The choices that have ended so far, by index."""
        return self._generation.finished

    @property
    def output(self) -> GenerationOutput:
        """The choices that have ended so far, whole."""
        return self._generation.output

    def __iter__(self) -> Iterator[Delta]:
        return self._items(aiter(self._generation))

    def events(self) -> Iterator[Event]:
        """Iterates over everything the servers say, in its order, in place of the deltas alone."""
        return self._items(self._generation.events())

    def result(self) -> GenerationOutput:
        """Read to the end; everything the request produced."""
        return self._thread.run(self._generation.result())

    def text(self) -> str:
        """Read to the end; the text of the first choice."""
        return self.result().text

    def cancel(self) -> None:
        """End the call that is live; may be called from any thread."""
        self._thread.loop.call_soon_threadsafe(self._generation.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def _items(self, items: AsyncIterator[_Item]) -> Iterator[_Item]:
        async def read() -> _Item | None:
            return await anext(items, None)

        try:
            while (item := self._thread.run(read())) is not None:
                yield item
        finally:
            self.cancel()


class BlockingDisaggregatedClient:
    """A client of prefill nodes and decode nodes, shared by any number of threads; see DisaggregatedClient."""

    def __init__(
        self,
        *,
        prefill: Iterable[str],
        decode: Iterable[str],
        min_prompt_tokens: int = DEFAULT_MIN_PROMPT_TOKENS,
        remembers_prompts: bool = True,
        retry: RetryPolicy = DEFAULT_RETRY,
        hang_timeout_s: float = DEFAULT_HANG_TIMEOUT_S,
    ) -> None:
        """Args: see DisaggregatedClient."""
        self._thread = _LoopThread()

        async def connect() -> DisaggregatedClient:
            return DisaggregatedClient(
                prefill=prefill,
                decode=decode,
                min_prompt_tokens=min_prompt_tokens,
                remembers_prompts=remembers_prompts,
                retry=retry,
                hang_timeout_s=hang_timeout_s,
            )

        self._client = self._thread.run(connect())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is live and disconnect."""
        self._thread.run(self._client.close())
        self._thread.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> BlockingDisaggregatedGeneration:
        """Begin a generation from text, `token_ids` or `messages`; see DisaggregatedClient.generate."""

        async def begin() -> DisaggregatedGeneration:
            return self._client.generate(prompt, timeout_s=timeout_s, metadata=metadata, **options)

        return BlockingDisaggregatedGeneration(self._thread.run(begin()), self._thread)
