"""Short numbers that are equal where something is equal, for ranks to compare."""

import hashlib

import torch


def checksum(tensor: torch.Tensor) -> bytes:
    """A checksum of a dense tensor's values; 16 bytes."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=16).digest()


def number_of(*parts: bytes | str) -> int:
    """A hash of texts and bytes, in order, as a number from 0 to 2**61 - 1."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part if isinstance(part, bytes) else part.encode())
        found.update(b"\0")
    return int.from_bytes(found.digest(), "big") >> 3
