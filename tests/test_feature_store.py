"""The store: one tensor a feature, one layer of it at a time, and fewer sequences as they leave."""

import pytest
import torch
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.rows import Rows
from tiered.forward.feature_store import FeatureStore
from tiered.forward.sizes import CallShape
from tiered.models.llada import LLaDA

BATCH, LENGTH = 3, 5


@pytest.fixture
def store(tiny_model: LLaDA) -> FeatureStore:
    """Keys of both layers; values and hidden states in a workspace of one."""
    features = {Feature.KEY: 2, Feature.VALUE: 1, Feature.HIDDEN: 1, Feature.ATTN_OUT: 2}
    sizes = CallShape(shape=tiny_model.shape, batch=BATCH, context=LENGTH, block_length=LENGTH, dtype="bfloat16")
    return FeatureStore(sizes, features, torch.device("cpu"))


def fill(store: FeatureStore, feature: Feature, layer: int) -> Tensor:
    """Another number in every sequence; returns a copy of what is stored."""
    view = store.view(feature, layer)
    view.copy_(torch.arange(1.0, len(view) + 1)[:, None, None, None].expand_as(view) + 10 * layer)
    return view.clone()


@pytest.mark.parametrize(
    ("feature", "heads", "elements"),
    [(Feature.KEY, 2, 8), (Feature.VALUE, 2, 8), (Feature.HIDDEN, 1, 32), (Feature.ATTN_OUT, 1, 32)],
)
def test_layout(store: FeatureStore, feature: Feature, heads: int, elements: int):
    for layer in range(2):
        view = store.view(feature, layer)
        assert view.shape == (BATCH, heads, LENGTH, elements)
        assert view.dtype == torch.bfloat16
        assert view.isnan().all()  # nothing is stored before it is written


def test_layers_are_apart_and_a_workspace_is_shared(store: FeatureStore):
    for feature, shared in ((Feature.KEY, False), (Feature.VALUE, True), (Feature.ATTN_OUT, False)):
        first = fill(store, feature, 0)
        second = fill(store, feature, 1)
        assert torch.equal(store.view(feature, 0), second if shared else first)
        assert torch.equal(store.view(feature, 1), second)
        same = store.view(feature, 0).data_ptr() == store.view(feature, 1).data_ptr()
        assert same is shared


def test_write(store: FeatureStore):
    before = fill(store, Feature.KEY, 0)
    other_layer, other_feature = fill(store, Feature.KEY, 1), fill(store, Feature.VALUE, 0)
    rows = Rows.at(torch.tensor([[4, 0], [1, 2], [3, 3]]), torch.tensor([[True, True], [True, False], [False, False]]))
    values = torch.full((BATCH, 2, 2, 8), -1.0, dtype=torch.bfloat16)
    store.write(Feature.KEY, 0, rows, values)
    expected = before.clone()
    for sequence, column in ((0, 4), (0, 0), (1, 1)):
        expected[sequence, :, column] = -1
    assert torch.equal(store.view(Feature.KEY, 0), expected)
    assert torch.equal(store.view(Feature.KEY, 1), other_layer)
    assert torch.equal(store.view(Feature.VALUE, 0), other_feature)


@pytest.mark.parametrize("kept", [[0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]])
def test_kept_sequences_move_together(store: FeatureStore, kept: list[int]):
    filled = {
        (feature, layer): fill(store, feature, layer)
        for feature in (Feature.KEY, Feature.ATTN_OUT)
        for layer in range(2)
    }
    places = {key: store.view(*key).data_ptr() for key in filled}
    store.keep(kept)
    for key, before in filled.items():
        assert torch.equal(store.view(*key), before[kept])
        assert store.view(*key).data_ptr() == places[key]  # in place, no second copy
    assert store.view(Feature.HIDDEN, 1).shape[0] == len(kept)


def test_keeping_twice(store: FeatureStore):
    before = fill(store, Feature.KEY, 0)
    store.keep([0, 2])
    store.keep([1])
    assert torch.equal(store.view(Feature.KEY, 0), before[[2]])
    store.write(Feature.KEY, 0, Rows.span(0, 1), torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16))
    assert (store.view(Feature.KEY, 0)[:, :, 0] == 0).all()
