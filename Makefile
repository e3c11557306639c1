# Shorthands. VENV= uses another environment; TORCH_INDEX_URL= is described in scripts/install.
export VENV ?= .venv

.PHONY: install demo check protos test test-full test-gpu

install:
	scripts/install dev

demo:
	$(VENV)/bin/outrider demo

check:
	scripts/check

protos:
	$(VENV)/bin/python scripts/protos.py

test:
	$(VENV)/bin/pytest

test-full:
	$(VENV)/bin/pytest -m "full or not full"

test-gpu:
	$(VENV)/bin/pytest -m gpu
