"""Settings that may change while a proposer drafts: it must know how."""

import pytest
import torch

from proposers.base import TargetView
from proposers.config import Reconfigurable
from proposers.registry import config_class, known_proposers

TARGET = TargetView(512, torch.device("cpu"), num_slots=2)


@pytest.mark.parametrize("method", known_proposers())
def test_what_is_changeable_is_a_setting(method: str) -> None:
    section = config_class(method)
    assert section.changeable <= section.model_fields.keys() - {"method", "num_speculative_tokens"}


@pytest.mark.parametrize("method", [method for method in known_proposers() if config_class(method).changeable])
def test_who_declares_it_takes_it_on(method: str) -> None:
    settings = config_class(method).model_validate({"method": method})
    proposer = settings.build(TARGET)
    assert isinstance(proposer, Reconfigurable)
    proposer.reconfigure(settings)
