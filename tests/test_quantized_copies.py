"""Quantized copies that layers of Transformer Engine keep of plain weights: none outlives what it was made of."""

import torch
from torch import nn

from mcore_snap import model_tree, snapshot, swapped
from mcore_snap.megatron.transformer_engine import ForgetCopies, keeps_copies
from mcore_snap.testing.raw_bytes import to_bytes


def test_quantized_copies_of_plain_weights_are_forgotten():
    """A layer that multiplies in fewer bits keeps its weight quantized for the microbatches that follow."""

    class Layer(nn.Linear):
        def __init__(self):
            super().__init__(6, 4)
            self._fp8_workspaces = {}

        def forward(self, x):
            copy = self._fp8_workspaces.setdefault("weight", self.weight.detach().round(decimals=1))
            return x @ copy.T

    model, x = nn.Sequential(Layer(), nn.Identity()), torch.ones(1, 6)
    assert keeps_copies(model.modules())
    assert not keeps_copies(model[1].modules())
    before = to_bytes(model(x))
    with torch.no_grad():
        model[0].weight.add_(1)
    assert to_bytes(model(x)) == before
    ForgetCopies(model)()
    assert to_bytes(model(x)) != before
    assert ForgetCopies(model) == ForgetCopies(model) != ForgetCopies(model[0])
    assert len({ForgetCopies(model), ForgetCopies(model)}) == 1

    tree = model_tree(model)
    kept, after = snapshot(tree), to_bytes(model(x))
    with torch.no_grad():
        model[0].weight.sub_(1)
    ForgetCopies(model)()
    assert to_bytes(model(x)) == before
    with swapped(tree, kept):
        assert to_bytes(model(x)) == after
    assert to_bytes(model(x)) == before
