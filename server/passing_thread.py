"""Runs work on a thread that ends with it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Result = TypeVar("_Result")


def run_in_passing_thread(work: Callable[[], _Result], name: str) -> _Result:
    """The result of `work`, done on a thread of its own; or what it raises.

    For what computes with torch beside the step thread: OpenMP's pool of threads belongs to the thread that uses
    it and lasts as long. With two pools for one set of cores none spins at its barriers any more, which makes a
    step on the CPU a third longer.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        return future.result()
    finally:
        if future.done():  # not so after an interrupt, which must not wait for it
            thread.join()
