"""Every error that leaves a component, and what its receiver should do.

OutriderError
├── InvalidRequest      the caller's fault; `violations` name the fields
├── DuplicateRequest    the id is in use by a live request
├── WrongRole           ask a node of another role
├── Overloaded          try again after `retry_after_s`
├── DeadlineExceeded    the caller's deadline passed
├── RequestFailed       this request alone broke; `error_id` is in the log
├── EngineDead          the process must be restarted
├── ConfigError         a setting is wrong; the command exits with 2
└── ModelError          the model cannot be served; names cause and remedy
"""

from dataclasses import dataclass


class OutriderError(Exception):
    """Base of all errors that callers may see."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One refused value: the field's path in the request, and what would be accepted."""

    field: str
    description: str


class InvalidRequest(OutriderError):
    """The request can never succeed as it stands."""

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = violations

    @classmethod
    def of(cls, field: str, description: str) -> "InvalidRequest":
        """An error about one field."""
        return cls(FieldViolation(field, description))

    def under(self, path: str) -> "InvalidRequest":
        """The same, of fields below that path."""
        return InvalidRequest(*(FieldViolation(f"{path}.{v.field}", v.description) for v in self.violations))


class DuplicateRequest(OutriderError):
    """A live request already has this id; that one goes on unharmed."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request_id {request_id!r} is in use by a live request")
        self.request_id = request_id


class WrongRole(OutriderError):
    """This node does another part of disaggregated requests than was asked of it."""


class Overloaded(OutriderError):
    """The queue is full or the server is shutting down."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(OutriderError):
    """The caller's deadline passed before the request ended."""

    def __init__(self, request_id: str, phase: str) -> None:
        super().__init__(f"deadline of request {request_id!r} passed while {phase}")
        self.request_id = request_id
        self.phase = phase


class RequestFailed(OutriderError):
    """Something broke inside this request; others are not affected."""

    def __init__(self, message: str, *, error_id: str) -> None:
        super().__init__(f"{message} (error id {error_id})")
        self.error_id = error_id


class EngineDead(OutriderError):
    """The step thread has ended; nothing can be served until a restart."""


class ConfigError(OutriderError):
    """A setting is unknown, out of range or in contradiction with another."""


class ModelError(OutriderError):
    """The model is missing, gated, unsupported, broken or too big."""


def first_line(error: Exception) -> str:
    """What an error of somebody else's says, in a line."""
    return str(error).strip().split("\n")[0] or type(error).__name__
