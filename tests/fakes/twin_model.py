"""A model that says the same as another one, in a vocabulary of its own."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def build_twin(folder: Path, of: Path, *, foreign: tuple[int, ...] = (), noise: float = 0.0, seed: int = 0) -> Path:
    """Write the tiny model `of` anew, its tokens under other ids.

    Args:
        foreign: tokens that are written otherwise, so that nobody knows them for the same.
        noise: added to the weights, in standard deviations of theirs.

    Returns: `folder`.
    """
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(of)
    vocab_size = model.config.vocab_size
    new_ids = torch.cat((torch.arange(3), 3 + torch.randperm(vocab_size - 3, generator=generator)))  # controls first
    order = new_ids.argsort()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight.copy_(layer.weight[order])
    model.save_pretrained(folder)
    for name in ("tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((of / name).read_bytes())
    tokenizer = json.loads((of / "tokenizer.json").read_text())
    vocabulary = {
        f"Ġnobody{token_id}" if token_id in foreign else token: int(new_ids[token_id])
        for token, token_id in tokenizer["model"]["vocab"].items()
    }
    tokenizer["model"] |= {"vocab": vocabulary, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder
