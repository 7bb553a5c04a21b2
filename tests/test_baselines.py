"""transformers' own model and caches under a sampler written by hand: an independent oracle of the runtime's tokens."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from training import tasks

import tiered
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

ROOT = Path(__file__).resolve().parents[1]
# The two commit rules of the comparison, and a low threshold, which commits several at a time even of a random model.
COMMITS: tuple[dict[str, Any], ...] = ({}, {"confidence_threshold": 0.9}, {"confidence_threshold": 0.3})


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """quanto unpacks its codes in Python: building its C++ takes over a minute on a new machine."""

    def unpack(packed: Tensor, bits: int) -> Tensor:
        return torch.cat([packed >> shift & (2**bits - 1) for shift in range(0, 8, bits)])

    cpp = importlib.import_module("optimum.quanto.library.extensions.cpp")
    monkeypatch.setattr(cpp.ext, "_lib", SimpleNamespace(unpack=unpack))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of bench/, whose folder is on the path when a script runs."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module


@pytest.fixture
def baseline(script: Callable[[str], ModuleType]) -> Callable[..., Any]:
    """Makes one: its runtime, and the options of its cache; none of them: no cache."""

    def make(runtime: Runtime, **kind: Any) -> Any:
        return script("baselines.by_transformers").ByTransformers(runtime, kind or None)

    return make


@pytest.fixture
def tiny(tiny_model: Any) -> Runtime:
    """Two layers of random weights, four query heads on two key heads."""
    return Runtime(tiny_model, policy=make_policy("none"))


def padded(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Three prompts of 9, 5 and 8 tokens, padded on either side, and their mask."""
    ids = torch.randint(0, 120, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    mask[2, 8:] = 0
    return ids, mask


# The runtime's policy, and the kind of transformers' cache.
CACHES: dict[str, dict[str, Any]] = {"none": {}, "fast_dllm_prefix": {"offloading": False}}


@pytest.mark.covering(1)
@pytest.mark.parametrize("commit", COMMITS, ids=str)
@pytest.mark.parametrize("batch", ["one", "padded"])
def test_random_weights_give_the_runtimes_tokens(
    tiny: Runtime, baseline: Callable[..., Any], commit: dict[str, Any], batch: str
):
    pairs, differ = [(tiny.with_policy(policy), baseline(tiny, **kind)) for policy, kind in CACHES.items()], 0
    for seed in range(3):
        ids, mask = padded(torch.Generator().manual_seed(seed))
        given = {"attention_mask": mask} if batch == "padded" else {}
        ids = ids if batch == "padded" else ids[:1]
        options, answers = {"max_new_tokens": 24, "block_length": 8, **commit}, []
        for ours, theirs in pairs:
            expected, found = ours.generate(ids, **given, **options), theirs.generate(ids, **given, **options)
            assert torch.equal(found.sequences, expected.sequences)
            assert found.forwards == expected.forwards and found.steps_by_kind == expected.steps_by_kind
            assert torch.equal(found.tokens_per_forward, expected.tokens_per_forward)
            assert found.timings.tokens == expected.timings.tokens
            assert found.rows_per_step == expected.rows_per_step
            answers.append(expected.sequences)
        differ += not torch.equal(*answers)
    # A cache answers otherwise than full forwards, or each equality would show little.
    assert differ


def test_an_answer_that_ends_leaves_its_batch(tiny: Runtime, baseline: Callable[..., Any]):
    # The likeliest token of a block's first step becomes the end of the sequence.
    ids, mask = padded(torch.Generator().manual_seed(7))
    options: dict[str, Any] = {"max_new_tokens": 24, "block_length": 8}
    out = tiny.generate(ids, attention_mask=mask, **options, stop_at_eos=False)
    tiny.model.eos_token_id = int(out.sequences[0, 9 + 2])
    for policy, kind in CACHES.items():
        for commit in COMMITS:
            expected = tiny.with_policy(policy).generate(ids, attention_mask=mask, **options, **commit)
            found = baseline(tiny, **kind).generate(ids, attention_mask=mask, **options, **commit)
            assert torch.equal(found.sequences, expected.sequences)
            assert found.forwards == expected.forwards and len(set(found.forwards)) > 1


@pytest.mark.slow
def test_the_embedded_model_answers_as_in_the_runtime(baseline: Callable[..., Any]):
    runtime = tiered.from_pretrained("embedded", policy="none", device="cpu")
    examples = [tasks.sample(task, "test", seed) for seed, task in enumerate(("sort", "chain"))]
    chats = [[{"role": "user", "content": example.prompt}] for example in examples]
    options = {"max_new_tokens": 32, "block_length": 8, "confidence_threshold": 0.9}
    for policy, kind in CACHES.items():
        expected = runtime.with_policy(policy).generate(chats, **options)
        found = baseline(runtime, **kind).generate(chats, **options)
        assert found.text == expected.text and torch.equal(found.sequences, expected.sequences)
        assert found.forwards == expected.forwards


def test_the_models_logits_are_those_of_llama(tiny: Runtime, script: Callable[[str], ModuleType]):
    module = script("baselines.bidirectional_llama")
    llama = module.llama_of(tiny.model)
    assert llama.lm_head.weight is tiny.model.get_parameter("ff_out.weight")
    ids = torch.arange(12)[None]
    found = module.forward(llama, ids, mask=None, positions=ids, output=torch.arange(12))
    torch.testing.assert_close(found, tiny.logits(ids), atol=2e-5, rtol=1e-4)


def test_a_tied_head_is_the_embedding(script: Callable[[str], ModuleType], tiny_config: dict[str, Any]):
    from tiered.models.llada import LLaDA

    torch.manual_seed(0)
    runtime = Runtime(LLaDA.from_config(tiny_config | {"weight_tying": True}), policy=make_policy("none"))
    torch.nn.init.normal_(runtime.model.wte.weight)
    module = script("baselines.bidirectional_llama")
    llama = module.llama_of(runtime.model)
    assert llama.lm_head.weight is llama.model.embed_tokens.weight
    ids = torch.arange(12)[None]
    found = module.forward(llama, ids, mask=None, positions=ids, output=torch.arange(12))
    torch.testing.assert_close(found, runtime.logits(ids), atol=2e-5, rtol=1e-4)


def test_a_causal_llama_is_no_baseline(
    tiny: Runtime, script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
):
    module = script("baselines.bidirectional_llama")
    llama = module.llama_of(tiny.model)
    assert module.sees_ahead(llama) and not module.sees_ahead(llama, is_causal=True)
    # With a mask of padding, and behind a cache, as well: another last token changes the logits of the first row.
    from transformers import DynamicCache

    cache, ids = DynamicCache(config=llama.config), torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    positions, mask = torch.arange(4)[None], torch.tensor([[0, 1, 1, 1]]).expand(2, 4)
    for first, given in ((2, cache), (0, None)):
        if given is not None:
            module.forward(
                llama, ids[:, :2], mask=mask[:, :2], positions=positions[:, :2], output=positions[0, :1], cache=cache
            )
        rows = positions[:, first:]
        output = module.forward(
            llama, ids[:, first:], mask=mask, positions=rows, output=torch.tensor([1 - first // 2]), cache=given
        )
        assert not torch.equal(output[0], output[1])
    monkeypatch.setattr(module, "sees_ahead", lambda *_: False)
    with pytest.raises(RuntimeError, match="masks what is ahead"):
        module.llama_of(tiny.model)
    with pytest.raises(ValueError, match="no Linear"):
        module.llama_of(torch.nn.Linear(1, 1))


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("backend", ["quanto", "fp8"])
def test_a_quantized_prefix_is_made_once_a_block_and_left_as_it_is(
    tiny: Runtime, baseline: Callable[..., Any], script: Callable[[str], ModuleType], backend: str, monkeypatch
):
    caches = script("baselines.prefix_caches")
    seen: list[list[Tensor]] = []
    lend = caches.PrefixCache._lend

    def recorded(cache: Any) -> Any:
        lent = lend(cache)
        assert lent.get_seq_length() == 12 + 8 * (len(seen) // 7)
        seen.append([tensor.clone() for layer in cache._prefix.layers for tensor in caches.tensors_in(vars(layer))])
        return lent

    theirs = baseline(tiny, backend=backend)
    monkeypatch.setattr(caches.PrefixCache, "_lend", recorded)
    ids = torch.randint(0, 120, (1, 12), generator=torch.Generator().manual_seed(1))
    out = theirs.generate(ids, max_new_tokens=24, block_length=8)
    assert out.steps_by_kind == {"refresh": 3, "step": 21} and len(seen) == 21
    for block in range(3):
        first, *others = seen[7 * block : 7 * block + 7]
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    # Codes take less room than their values.
    plain = baseline(tiny, offloading=False).generate(ids, max_new_tokens=24, block_length=8)
    assert plain.num_forwards == out.num_forwards
    assert sum(tensor.nbytes for tensor in seen[-1]) < 28 * 2 * 2 * 16 * 4


def test_bytes_are_those_of_weights_and_cached_tensors(
    tiny: Runtime, baseline: Callable[..., Any], script: Callable[[str], ModuleType]
):
    ids = torch.arange(12)[None]
    weights = sum(parameter.nbytes for parameter in tiny.model.parameters())
    without = baseline(tiny).generate(ids, max_new_tokens=8, block_length=4).memory
    cached = baseline(tiny, offloading=False).generate(ids, max_new_tokens=8, block_length=4).memory
    # 20 columns, two layers, keys and values of two heads of 8 floats; RoPE's frequencies are a few bytes more.
    assert weights <= without.peak_device_bytes < weights + 100
    assert cached.peak_device_bytes - without.peak_device_bytes == 20 * 2 * 2 * 2 * 8 * 4
    assert without.peak_host_bytes == cached.peak_host_bytes == 0 and without.moved == {}
    # A view keeps its whole storage, which counts once.
    whole = torch.zeros(10)
    assert script("baselines.prefix_caches").storage_bytes(iter([whole[:3], whole])) == {"cpu": 40}


@pytest.mark.usefixtures("no_compiler")
def test_a_missing_baseline_has_a_reason(
    tiny: Runtime, baseline: Callable[..., Any], script: Callable[[str], ModuleType], monkeypatch
):
    import transformers.cache_utils

    if not torch.cuda.is_available():
        with pytest.raises(
            ValueError, match="transformers on cpu: AssertionError: Torch not compiled with CUDA enabled"
        ):
            baseline(tiny, offloading=True)
    # Groups of 64 do not divide every prompt of a model as narrow as this one.
    quanto, options = baseline(tiny, backend="quanto"), {"max_new_tokens": 8, "block_length": 4}
    quanto.generate(torch.arange(12)[None], **options)
    with pytest.raises(ValueError, match=r"on cpu: ValueError: Group size \(64\)") as refused:
        quanto.generate(torch.arange(5)[None], **options)
    assert "\n" not in str(refused.value)
    for backend, package in (("quanto", "optimum-quanto"), ("hqq", "hqq")):
        name = "is_optimum_quanto_available" if backend == "quanto" else "is_hqq_available"
        monkeypatch.setattr(transformers.cache_utils, name, lambda: False)
        with pytest.raises(ValueError, match=f"^not installed: pip install {package}$"):
            baseline(tiny, backend=backend)
