"""Short hashes that are equal where something is equal, for ranks to compare. None is in a file: they may change."""

import hashlib
from collections.abc import Iterable

import torch


def checksum(tensor: torch.Tensor) -> bytes:
    """A checksum of a dense tensor's values; 16 bytes."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=16).digest()


def digest_of(*parts: bytes | str) -> str:
    """A hash of texts and bytes, in order, as 32 hexadecimal digits."""
    return _hash_of(parts, 16).hex()


def number_of(*parts: bytes | str) -> int:
    """A hash of texts and bytes, in order, as a number from 0 to 2**61 - 1."""
    return int.from_bytes(_hash_of(parts, 8), "big") >> 3


def _hash_of(parts: Iterable[bytes | str], num_bytes: int) -> bytes:
    found = hashlib.blake2b(digest_size=num_bytes)
    for part in parts:
        found.update(part if isinstance(part, bytes) else part.encode())
        found.update(b"\0")
    return found.digest()


def number_of_tensor(tensor: torch.Tensor) -> int:
    """Equal for tensors of one dtype, shape and values."""
    return number_of(str(tensor.dtype), str(tuple(tensor.shape)), checksum(tensor))
