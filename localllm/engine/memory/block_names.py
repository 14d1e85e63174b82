"""Names for the contents of full KV blocks: a keyed hash chain over token ids.

`h_i = H(h_{i-1} | tokens_i | spans_i)`, so equal names mean equal prefixes, not just equal blocks. The key is derived
from the model's fingerprint, and the root from the request's extras (LoRA, cache salt), each tagged with its kind so
that a salt "x" and an adapter "x" differ. Where the input is not a token's embedding, tokens are placeholders: a block
is named by the digests of the spans that touch it, and by where they begin. Blocks before a span keep their names.
The hash is keyed blake2b: a client who knows the scheme cannot forge a collision.
Does not know: blocks, requests, the pool.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

DIGEST_BYTES = 16


class InputSpan(NamedTuple):
    """Positions of a prompt whose input is not a token's embedding, but given with the request."""

    start: int
    length: int
    digest: str  # of the input: requests with equal inputs at equal positions can share blocks


class BlockHasher:
    """Names blocks.

    fingerprint: everything besides tokens that KV values depend on (weights, dtype, rope, block size).
    """

    def __init__(self, fingerprint: bytes, block_size: int) -> None:
        self.block_size = block_size
        key = blake2b(fingerprint, digest_size=32).digest()
        self._keyed = blake2b(key=key, digest_size=DIGEST_BYTES)  # copied: that takes a third of making a new one

    def root(self, extras: Iterable[tuple[str, str]] = ()) -> bytes:
        """Return the parent of a request's first block. `extras`: (kind, value) pairs."""
        digest = self._keyed.copy()
        for kind, value in sorted(extras):
            for part in (kind.encode(), value.encode()):
                digest.update(len(part).to_bytes(4, "little") + part)
        return digest.digest()

    def extend(self, hashes: list[bytes], root: bytes, token_ids: array[int], spans: Sequence[InputSpan] = ()) -> None:
        """Append to `hashes` one name per full block of `token_ids` (int32) that has none yet. spans: in order."""
        size = self.block_size
        full = len(token_ids) // size
        if len(hashes) >= full:
            return
        parent = hashes[-1] if hashes else root
        view = memoryview(token_ids)
        for block in range(len(hashes), full):
            digest = self._keyed.copy()
            digest.update(parent)
            digest.update(view[block * size : (block + 1) * size])
            for start, length, content in spans:
                if start < (block + 1) * size and start + length > block * size:
                    name = content.encode()
                    digest.update((start - block * size).to_bytes(8, "little", signed=True))
                    digest.update(len(name).to_bytes(4, "little") + name)
            parent = digest.digest()
            hashes.append(parent)
