"""When a failed call is worth another attempt."""

from dataclasses import dataclass

from clients.errors import OutriderClientError, OverloadedError, UnavailableError


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """Retries calls that the server did not begin: it was not there, or asked for a pause.

    Attributes:
        max_attempts: the first one included; 1 never retries.
        initial_backoff_s: pause after the first failure where the server gave no hint, doubled each time.
        max_backoff_s: the longest pause; a hint above it is not waited for.
    """

    max_attempts: int = 4
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 5.0

    def pause_s(self, error: OutriderClientError, num_attempts: int, remaining_s: float | None) -> float | None:
        """Seconds to wait before the next attempt, None to give up.

        Args:
            num_attempts: attempts made so far.
            remaining_s: until the caller's deadline, None without one.
        """
        if num_attempts >= self.max_attempts:
            return None
        if isinstance(error, OverloadedError):
            pause_s = error.retry_after_s
        elif isinstance(error, UnavailableError):
            pause_s = min(self.initial_backoff_s * 2 ** (num_attempts - 1), self.max_backoff_s)
        else:
            return None
        is_too_long = pause_s > self.max_backoff_s or (remaining_s is not None and pause_s >= remaining_s)
        return None if is_too_long else pause_s


DEFAULT_RETRY = RetryPolicy()
