"""Keep the weights of a Megatron-Core model in host memory, and put them back bit for bit.

>>> import torch
>>> model = torch.nn.Linear(2, 1)
>>> tree = model_tree(model)
>>> version_1 = snapshot(tree)
>>> _ = model.weight.data.zero_()
>>> with swapped(tree, version_1):
...     bool(model.weight.any())
True
>>> bool(model.weight.any())
False
"""

from __future__ import annotations

from mcore_snap.agreement import agree
from mcore_snap.comparison import Comparison, LeafDifference, bitwise_equal, compare
from mcore_snap.digests import fingerprint, verify
from mcore_snap.errors import (
    Corrupt,
    FrozenError,
    NotReady,
    NotResident,
    OutOfHostMemory,
    SnapError,
    StructureMismatch,
)
from mcore_snap.host_memory import HostMemory, default_memory
from mcore_snap.loading import load
from mcore_snap.megatron.rollback import rollback
from mcore_snap.megatron.tree import model_tree
from mcore_snap.memory_stats import HostMemoryStats
from mcore_snap.naming import named_leaves, named_parameters
from mcore_snap.nodes import ChunkTree, ModelTree, NamedLeaves
from mcore_snap.pending import PendingSnapshot, fence, snapshot_async
from mcore_snap.snapshots import as_numpy, snapshot, thaw
from mcore_snap.swapping import swapped

__all__ = [
    "ChunkTree",
    "Comparison",
    "Corrupt",
    "FrozenError",
    "HostMemory",
    "HostMemoryStats",
    "LeafDifference",
    "ModelTree",
    "NamedLeaves",
    "NotReady",
    "NotResident",
    "OutOfHostMemory",
    "PendingSnapshot",
    "SnapError",
    "StructureMismatch",
    "agree",
    "as_numpy",
    "bitwise_equal",
    "compare",
    "default_memory",
    "fence",
    "fingerprint",
    "load",
    "model_tree",
    "named_leaves",
    "named_parameters",
    "rollback",
    "snapshot",
    "snapshot_async",
    "swapped",
    "thaw",
    "verify",
]
