"""128-bit digests of trees: names, dtypes, shapes and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor

from mcore_snap.checking import check_leaves
from mcore_snap.errors import Corrupt, StructureMismatch
from mcore_snap.live_trees import read_once
from mcore_snap.registration import flatten, flatten_named
from mcore_snap.snapshots import frozen_entries
from mcore_snap.words import plain, spec_of, words

__all__ = ["combine", "digests_of", "fingerprint", "leaf_digests", "verify"]

_PIECE = 1 << 15
"""Elements hashed at a time: they stay in the cache between copy and hash, and torch copies up to
this many in the calling thread, so that no piece waits for a pool of threads."""

_STAGED = 1 << 24
"""Elements brought over from a device at a time: each time the host waits for it."""


def fingerprint(tree: Any) -> str:
    """Return a digest over the names, dtypes, shapes and bytes of all leaves, as 32 hex digits.

    Layout in memory does not count, so a model and a snapshot of it agree. The digest is XXH3-128:
    good against accidents, not against an adversary. Of a snapshot, the digest of each leaf is
    recorded, for `verify`.

    Raises:
        StructureMismatch: A leaf is of a kind that has no plain bytes.
        NotResident: A leaf's memory is not there.

    >>> fingerprint({"w": torch.zeros(2)}) == fingerprint({"w": torch.tensor([0.0, -0.0])})
    False
    """
    tree = read_once(tree)
    names, digests = leaf_digests(tree)
    for owner, digest in zip(frozen_entries(tree), digests, strict=True):
        if owner is not None and owner.recorded_digest is None:
            owner.record(digest)
    return combine(names, digests)


def verify(snap: Any) -> str:
    """Check a snapshot against the digests recorded by `fingerprint`, and return its fingerprint.

    The record travels with a pickled snapshot.

    Raises:
        Corrupt: Names the leaves whose bytes are others than recorded.
        StructureMismatch: A leaf has no record: it is of no snapshot, or `fingerprint` has not
            been called on it.

    >>> from mcore_snap import snapshot
    >>> kept = snapshot({"w": torch.zeros(2)})
    >>> fingerprint(kept) == verify(kept)
    True
    """
    names, digests = leaf_digests(snap)
    recorded = [None if owner is None else owner.recorded_digest for owner in frozen_entries(snap)]
    missing = [
        f"{name}: expected a recorded digest, found none; call fingerprint(snapshot) when it is taken"
        for name, known in zip(names, recorded, strict=True)
        if known is None
    ]
    if missing:
        raise StructureMismatch("the snapshot cannot be verified", missing)
    wrong = [
        f"{name}: expected {known}, found {digest}; drop the snapshot"
        for name, known, digest in zip(names, recorded, digests, strict=True)
        if known != digest
    ]
    if wrong:
        raise Corrupt("the snapshot's bytes are not those that were recorded", wrong)
    return combine(names, digests)


def leaf_digests(tree: Any) -> tuple[list[str], list[str]]:
    """Return the names of all leaves and the digest of each, in the order of flattening.

    Raises:
        StructureMismatch: A leaf is of a kind that has no plain bytes.
        NotResident: A leaf's memory is not there.

    >>> leaf_digests({"w": torch.zeros(2)})
    (["['w']"], ['...'])
    """
    tree = read_once(tree)
    leaves, treespec = flatten(tree)
    names = flatten_named(treespec)[1]
    check_leaves(leaves, names, "fingerprint")
    owners = frozen_entries(tree)
    sources = [leaf if owner is None else owner.private for leaf, owner in zip(leaves, owners, strict=True)]
    return names, digests_of(sources)


def digests_of(leaves: Iterable[Tensor]) -> list[str]:
    """Return the digest of each tensor: over dtype, shape and bytes."""
    return [_digest(leaf) for leaf in leaves]


def combine(names: Iterable[str], digests: Iterable[str]) -> str:
    """Return one digest over the names and digests of leaves: of all of them, the fingerprint.

    >>> combine(*leaf_digests([torch.zeros(2)])) == fingerprint([torch.zeros(2)])
    True
    """
    lines = (f"{name}\0{digest}" for name, digest in zip(names, digests, strict=True))
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


def _digest(tensor: Tensor) -> str:
    state = xxhash.xxh3_128(str(spec_of(tensor)).encode())
    for piece in _pieces(tensor):
        state.update(piece)
    return state.hexdigest()


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    # Through a small buffer: a numpy view of live memory would make its storage unresizable for
    # good, a frozen one refuses it, and an accelerator has none.
    flat = words(plain(tensor).resolve_conj().resolve_neg()).reshape(-1)
    if not tensor.is_cpu:
        for start in range(0, flat.numel(), _STAGED):
            yield flat[start : start + _STAGED].cpu().view(torch.uint8).numpy().data
        return
    buffer = torch.empty(min(_PIECE, flat.numel()), dtype=flat.dtype)
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE]
        target = buffer[: piece.numel()]
        target.copy_(piece)
        yield target.view(torch.uint8).numpy().data
