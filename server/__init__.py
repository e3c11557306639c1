"""Outrider, an inference server for large language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server.guidance.params import StructuredOutputsParams
    from server.llm import LLM
    from server.request import SamplingParams

__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams"]


def __getattr__(name: str) -> Any:
    """Import the offline API when it is asked for, so that the command line starts fast."""
    if name == "LLM":
        from server.llm import LLM

        return LLM
    if name == "SamplingParams":
        from server.request import SamplingParams

        return SamplingParams
    if name == "StructuredOutputsParams":
        from server.guidance.params import StructuredOutputsParams

        return StructuredOutputsParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
