"""Options of Polestar: allowed values, errors of bad ones, and the options of the mechanism."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tiered.core.features import Feature
from tiered.models.shape import ModelShape
from tiered.offload.codec_bytes import Codec
from tiered.policies.polestar.cache import HiddenCache
from tiered.policies.polestar.members import Members
from tiered.policies.polestar.policy import Polestar, PolestarWindow
from tiered.policies.registry import PRESETS, make_policy


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"clusters": 0}, ValueError, "clusters = 0"),
        ({"clusters": 2.0}, TypeError, "clusters = 2.0"),
        ({"clusters": "all"}, TypeError, "clusters = 'all'"),
        ({"top_m": "all"}, TypeError, "top_m = 'all'"),
        ({"top_m": -1}, ValueError, "top_m = -1"),
        ({"top_m": True}, TypeError, "top_m = True"),
        ({"update_threshold": -1}, ValueError, "update_threshold = -1"),
        ({"update_threshold": None}, TypeError, "update_threshold = None"),
        ({"cluster_layers": 0}, ValueError, "cluster_layers = 0"),
        ({"from_below": "besides"}, ValueError, "did you mean 'beside'"),
        ({"drift": "outputs"}, ValueError, "did you mean 'output'"),
        ({"codec": "nvfp8"}, ValueError, "codec 'nvfp8'; did you mean 'nvfp4'"),
        ({"codec": 4}, ValueError, "codec '4'"),
        ({"refresh": "always"}, ValueError, "refresh 'always'.* allowed: auto, drift, full"),
        ({"refresh_blocks": 0}, ValueError, "refresh_blocks = 0"),
        ({"kmeans": "scipy"}, ValueError, "kmeans 'scipy'.* allowed: faiss, torch"),
        ({"top_n": 2}, ValueError, "'top_n'; did you mean 'top_m'"),
        ({"refresh_interval": 3}, ValueError, "'refresh_interval'; did you mean 'refresh'"),
        ({"hidden_tier": "device"}, ValueError, "option of policy 'polestar' 'hidden_tier'"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], error: type[Exception], named: str):
    with pytest.raises(error, match=named):
        make_policy("polestar", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"clusters": 1, "top_m": 0, "update_threshold": 0, "refresh_blocks": 1},
        {"kmeans": "faiss"},
        *({"codec": codec} for codec in (*Codec, *(codec.value for codec in Codec))),
    ],
)
def test_the_least_that_is_allowed(options: dict[str, Any]):
    policy = make_policy("polestar", **options)
    assert {name: getattr(policy, name) for name in options} == options


def test_drift_that_counts_moves_is_that_of_weights():
    with pytest.raises(ValueError, match=r"drift = 'output'.*'weights'"):
        make_policy("polestar-window", drift="output")


@pytest.mark.parametrize(
    ("asked", "clusters", "chosen"), [("auto", 16, 8), ("auto", 1088, 42), (7, 1088, 7), (9, 5, 5), (0, 5, 0)]
)
def test_how_many_clusters_an_update_chooses(asked: Any, clusters: int, chosen: int):
    """Of as many clusters as rows: the plan's number is that of the cache."""
    shape = SimpleNamespace(sight="canvas")
    call: Any = SimpleNamespace(shape=shape, context=clusters + 32, block_length=32, answer=None)
    sizes = Polestar(clusters="rows", top_m=asked).cluster_sizes(call)
    cache = HiddenCache(
        clusters="rows", top_m=asked, group=1, beside=False, backend="torch", of_output=True, measures_moves=False
    )
    members = Members.of(range(clusters), [1] * clusters, clusters)
    drift = [0.0] * (clusters - 3) + [3.0, 1.0, 2.0]
    found = cache.most_drifted(drift, members, np.zeros(clusters, dtype=bool))
    assert sizes.made == clusters and sizes.chosen == chosen == len(found)
    assert found[:3] == [clusters - 3, clusters - 1, clusters - 2][:chosen]


def test_features_that_the_device_keeps_for_every_row():
    shape = ModelShape.__new__(ModelShape)  # only the number of layers is asked for
    object.__setattr__(shape, "layers", 6)
    assert PolestarWindow().features(shape) == {Feature.KEY: 6, Feature.VALUE: 6}


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (
            "polestar-paper",
            {"clusters": 8, "top_m": 2, "update_threshold": 4, "window_blocks": None, "hidden_tier": "host"},
        ),
        (
            "polestar-window",
            {"clusters": 7, "top_m": 4, "update_threshold": 1, "cumulative_threshold": 2, "window_blocks": (2, 1)}
            | {"hidden_tier": "device", "codec": "raw"},
        ),
        (
            "polestar-fresh",
            {"clusters": "rows", "top_m": "auto", "update_threshold": 0, "cluster_layers": 1, "from_below": "beside"}
            | {"drift": "output", "codec": "raw"},
        ),
    ],
)
def test_presets(preset: str, expected: dict[str, Any]):
    policy = make_policy(preset)
    assert isinstance(policy, Polestar) and {name: getattr(policy, name) for name in expected} == expected
    kind, options = PRESETS[preset]
    assert make_policy(preset, top_m=1) == kind(**{**options, "top_m": 1})
    with pytest.raises(ValueError, match="did you mean 'polestar-"):
        make_policy(preset + "s")
