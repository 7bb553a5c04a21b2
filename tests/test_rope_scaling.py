"""Rotations stretched past the trained positions: against transformers' own, and from the config or an option."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import tiered
from tiered.core.rows import Rows
from tiered.models.families import family_of
from tiered.models.rope import Rotary, frequencies_and_scale
from tiered.models.rotation import Rotation, rotation_of, stretched

CPU = torch.device("cpu")
IDS = torch.arange(300)[None] % 100


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024},
        {"rope_type": "yarn", "factor": 2.5, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25},
        {"rope_type": "yarn", "factor": 1.0},
    ],
    ids=str,
)
def test_frequencies_are_those_of_transformers(theta: float, scaling: dict[str, Any]):
    theirs = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters=scaling | {"rope_theta": theta},
    )
    if scaling["rope_type"] == "default":
        expected, scale = 1 / theta ** (torch.arange(0, 64, 2) / 64), 1.0
    else:
        expected, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, CPU)
    given = {
        name: value for name, value in scaling.items() if name not in ("rope_type", "original_max_position_embeddings")
    }
    trained = scaling.get("original_max_position_embeddings", 4096)
    ours = Rotation(theta=theta, kind=scaling["rope_type"], trained=trained, **given)
    found, found_scale = frequencies_and_scale(ours, 64, CPU)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert found_scale == pytest.approx(scale, rel=1e-12)


def test_ntk_slows_the_slowest_pair_by_the_factor_and_the_fastest_not_at_all():
    (before, _), (after, scale) = (
        frequencies_and_scale(Rotation(theta=5e5, kind=kind, factor=6.0), 64, CPU) for kind in ("default", "ntk")
    )
    slower = before / after
    assert slower[0] == 1 and slower[-1] == pytest.approx(6, rel=1e-4) and scale == 1
    assert (slower.diff() > 0).all()


def shape_and_rotation(config: Mapping[str, Any]) -> tuple[int, int, Rotation]:
    read = family_of(config).read(config)
    return read.shape.max_context, read.shape.trained_context, read.rotation


@pytest.mark.parametrize(
    ("asked", "same", "reach", "trained"),
    [
        ({"rope_scaling": "yarn:4"}, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 1024, 256),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.5}},
            {"rope_parameters": {"type": "linear", "factor": 2.5}},
            640,
            256,
        ),
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 8, "original_max_position_embeddings": 64}},
            {"rope_scaling": {"rope_type": "ntk", "factor": 8, "original_max_position_embeddings": 64}},
            512,
            64,
        ),
        # The config's positions stay, even if a scaling would reach fewer.
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 2, "original_max_position_embeddings": 64}},
            {"rope_scaling": {"rope_type": "ntk", "factor": 2, "original_max_position_embeddings": 64}},
            256,
            64,
        ),
        (
            {"rope_scaling": "ntk:2", "rope_theta": 1e6},
            {"rope_parameters": {"rope_type": "ntk", "factor": 2, "rope_theta": 1e6}},
            512,
            256,
        ),
        ({"rope_scaling": "default"}, {}, 256, 256),
        ({}, {}, 256, 256),
    ],
    ids=str,
)
def test_an_option_is_what_the_config_could_say(
    asked: dict[str, Any], same: dict[str, Any], reach: int, trained: int, tiny_config: dict[str, Any]
):
    found = shape_and_rotation(stretched(tiny_config, **asked))
    assert found == shape_and_rotation(tiny_config | same)
    assert found[:2] == (reach, trained)


def test_an_option_goes_before_the_config(tiny_config: dict[str, Any]):
    scaled = tiny_config | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 5e5}
    assert shape_and_rotation(stretched(scaled, rope_scaling="default"))[2].kind == "default"
    reach, _, rotation = shape_and_rotation(stretched(scaled, rope_theta=1e6))
    assert (reach, rotation.kind, rotation.factor, rotation.theta) == (1024, "yarn", 4.0, 1e6)
    in_parameters = tiny_config | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4}}
    assert shape_and_rotation(stretched(in_parameters, rope_scaling="ntk:3"))[2].theta == 3e4


def test_a_base_alone_reaches_as_far_as_ntk_up_to_it(tiny_config: dict[str, Any]):
    """Heads of 8 elements: a factor of 4 raises the base by 4^(8/6)."""
    raised = 1e4 * 4 ** (8 / 6)
    reach, trained, rotation = shape_and_rotation(stretched(tiny_config, rope_theta=raised * (1 + 1e-9)))
    assert (reach, trained) == (1024, 256)
    by_factor = Rotation(theta=1e4, kind="ntk", factor=4.0)
    ours, theirs = (frequencies_and_scale(each, 8, CPU)[0] for each in (rotation, by_factor))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert shape_and_rotation(stretched(tiny_config, rope_theta=100.0))[0] == 256


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"rope_scaling": "yarm:4"}, ValueError, "unknown rope_type 'yarm'; did you mean 'yarn'"),
        ({"rope_scaling": "yarn:much"}, ValueError, "'yarn:much'; KIND:FACTOR is allowed"),
        ({"rope_scaling": "yarn"}, ValueError, "lacks a factor"),
        ({"rope_scaling": "linear:0.5"}, ValueError, "factor = 0.5; a number from 1"),
        ({"rope_scaling": "linear:inf"}, ValueError, "factor = inf"),
        ({"rope_scaling": "linear:1e6"}, ValueError, "256 positions times 1e.06 are more than 16777216"),
        ({"rope_scaling": 4}, TypeError, "rope_scaling = 4; a mapping, or text"),
        ({"rope_theta": "1e6"}, ValueError, "rope_theta = '1e6'; a positive number"),
        ({"rope_theta": -1.0}, ValueError, "rope_theta = -1.0; a positive number"),
        (
            {"rope_scalings": "yarn:4"},
            ValueError,
            "unknown argument of from_pretrained 'rope_scalings'; did you mean 'rope_scaling'",
        ),
    ],
    ids=str,
)
def test_bad_scalings_are_named(asked: dict[str, Any], error: type[Exception], message: str, write_checkpoint: Any):
    with pytest.raises(error, match=message):
        tiered.from_pretrained(write_checkpoint(), device="cpu", **asked)


def test_heads_of_one_speed_have_no_ntk(tiny_config: dict[str, Any]):
    with pytest.raises(ValueError, match="heads of 2 elements turn at one speed"):
        shape_and_rotation(stretched(tiny_config | {"d_model": 8}, rope_scaling="ntk:2"))


def angles(model: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    rotary = model.rotary(positions)
    return rotary.cos, rotary.sin


class TestCalls:
    """Past the 256 positions of the tiny model."""

    def test_positions_beyond_the_trained_ones_warn_if_a_scaling_was_asked_for(self, write_checkpoint: Any):
        folder = write_checkpoint()
        with pytest.raises(ValueError, match=r"308 positions; the model was made for 256 .*rope_scaling = 'ntk:2'"):
            tiered.from_pretrained(folder, device="cpu").generate(IDS, max_new_tokens=8)
        runtime = tiered.from_pretrained(folder, device="cpu", policy="fast_dllm_dual", rope_scaling="yarn:2")
        with pytest.warns(UserWarning, match="308 positions, but the model was trained on 256") as told:
            out = runtime.generate(IDS, max_new_tokens=8, block_length=4)
        assert out.sequences.shape == (1, 308) and told[0].filename == __file__
        with pytest.raises(ValueError, match="516 positions; the model was made for 512"):
            runtime.generate(IDS.repeat(1, 2)[:, :508], max_new_tokens=8)

    def test_there_is_no_warning_within_the_trained_positions(self, write_checkpoint: Any, recwarn: Any):
        tiered.from_pretrained(write_checkpoint(), device="cpu", rope_scaling="linear:2").generate(
            IDS[:, :248], max_new_tokens=8
        )
        assert not [each for each in recwarn if "positions" in str(each.message)]

    def test_one_in_every_layer(self, write_checkpoint: Any):
        """Positions twice as far apart, and halved by the factor, are what they were."""
        folder = write_checkpoint()
        plain, halved = (
            tiered.from_pretrained(folder, device="cpu", policy="none", rope_scaling=scaling).model
            for scaling in (None, "linear:2")
        )
        positions = torch.arange(20)[None]
        for far, near in zip(angles(halved, 2 * positions), angles(plain, positions), strict=True):
            assert torch.equal(far, near)

    def test_a_plan_counts_and_warns(self, tiny_config: dict[str, Any]):
        made = tiered.plan(tiny_config, context=1024, policy="fast_dllm_dual", rope_scaling="ntk:4", memory="1GiB")
        assert made.largest_context == 1024 and made.fits
        assert "trained on 256" in made.warnings[0] and "warning: 1024 positions" in str(made)
        assert not tiered.plan(tiny_config, context=256, rope_scaling="ntk:4").warnings


def test_a_share_of_a_head_is_rotated_and_the_rest_passes():
    positions, heads = torch.arange(7)[None], torch.randn(2, 3, 7, 16, generator=torch.Generator().manual_seed(0))
    found = Rotary.of(positions, 16, Rotation(part=0.5)).rotate(heads)
    assert torch.equal(found[..., 8:], heads[..., 8:])
    assert torch.equal(found[..., :8], Rotary.of(positions, 8, Rotation()).rotate(heads[..., :8].contiguous()))
    inside: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
    for config in ({"partial_rotary_factor": 0.5}, inside, inside | {"partial_rotary_factor": 0.5}):
        for scaling in (None, "linear:2"):
            assert rotation_of(stretched(config, rope_scaling=scaling), head_dim=16, positions=64).part == 0.5
    with pytest.raises(ValueError, match=r"partial_rotary_factor = 0.25, but 0.5 in rope_parameters"):
        rotation_of(inside | {"partial_rotary_factor": 0.25}, head_dim=16, positions=64)
    for share in (0.2, 1.5, 0.01):
        with pytest.raises(ValueError, match=f"partial_rotary_factor = {share} of a head of 16 elements"):
            rotation_of({"partial_rotary_factor": share}, head_dim=16, positions=64)


def test_queries_grow_with_their_positions_and_keys_do_not():
    rotation, positions = Rotation(query_growth=0.1, trained=8), torch.tensor([[0, 7, 8, 40]])
    rotary, plain = (Rotary.of(positions, 4, of) for of in (rotation, Rotation()))
    heads = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    grown = 1 + 0.1 * torch.tensor([0.0, 0.0, 1.0, 5.0]).add(1).log()
    torch.testing.assert_close(rotary.rotate_queries(heads), plain.rotate(heads) * grown[:, None])
    assert torch.equal(rotary.rotate(heads), plain.rotate(heads))
    # Of rows here and there, and of a span.
    index = torch.tensor([[3, 1]])
    scattered = rotary.at(Rows.at(index)).rotate_queries(heads[:, :, [3, 1]])
    torch.testing.assert_close(scattered, rotary.rotate_queries(heads)[:, :, [3, 1]])
    some = rotary.at(Rows.span(1, 3)).rotate_queries(heads[:, :, 1:3])
    torch.testing.assert_close(some, rotary.rotate_queries(heads)[:, :, 1:3])
