"""What a client knows of a prompt without its tokenizer: what it begins with, which one it is, how long it may be."""

import hashlib

from protos.outrider.v1 import inference_pb2 as pb

KEY_BYTES = 1024
"""Prompts that begin with the same bytes are taken to share blocks: 256 tokens of ordinary text, or 256 ids."""
BYTES_PER_TOKEN = 4


def beginning_of(request: pb.GenerateRequest) -> bytes:
    """The same for requests that may share cached blocks of their prompts' beginnings."""
    return _digest(request, _prompt_bytes(request)[:KEY_BYTES])


def identity_of(request: pb.GenerateRequest) -> bytes:
    """The same for requests whose prompts are the same and share cached blocks."""
    return _digest(request, _prompt_bytes(request))


def estimated_tokens(request: pb.GenerateRequest) -> int:
    """How many tokens the prompt has: exact for ids, by its bytes for text."""
    return len(_prompt_bytes(request)) // BYTES_PER_TOKEN


def _prompt_bytes(request: pb.GenerateRequest) -> bytes:
    match request.WhichOneof("prompt"):
        case "token_ids":
            return b"".join(token_id.to_bytes(4, "little") for token_id in request.token_ids.ids)
        case "chat":
            return "".join(f"{message.role}\0{message.content}\0" for message in request.chat.messages).encode()
    return request.text.encode()


def _digest(request: pb.GenerateRequest, prompt: bytes) -> bytes:
    salt = request.cache_salt.encode()
    return hashlib.blake2b(len(salt).to_bytes(4, "little") + salt + prompt, digest_size=16).digest()
