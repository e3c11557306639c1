"""What integration tests share."""

import pytest

from server.tokenizer import Tokenizer
from tests.fakes.tokenizers import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tiny model's tokenizer."""
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
