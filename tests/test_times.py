"""The seconds of a plan: the forwards of its dry run are those of a call, and time follows from their work."""

import errno
import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import pytest
import torch
from polestar_variants import variant
from workloads.models import random_model
from workloads.variants import Variant, all_variants

import tiered
from tiered.cli.main import main
from tiered.core.features import Tier
from tiered.core.rates import DEVICES, Rates, rates_of
from tiered.forward.sizes import CallShape
from tiered.planning.times import MOST_BLOCKS, DryForward, answer_of, call_time, dry_run, forward_seconds
from tiered.planning.workload import Workload
from tiered.policies.base import StepKind
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens"
FAMILIES = {"llada": "llada/llada_tiny_gqa", "dream": "dream/dream_tiny"}
PROMPT, BLOCKS, BLOCK = 41, 3, 8
VARIANTS = {variant.name: variant for variant in all_variants() if not variant.one_block}
VARIANTS |= {
    f"{policy}, seldom": Variant(name=f"{policy}, seldom", policy=policy, given={"refresh_blocks": 2})
    for policy in ("fast_dllm_prefix", "fast_dllm_dual")
}
# Their rows depend on the model: sizes of the clusters that drift most, and tokens that it is sure of. A row
# of Dream is open as long as one of two tokens is.
EXPECTED = {"polestar", "polestar-paper", "polestar-fresh", "polestar-window", "dkv_greedy"}
BY_TWO = {"dkv_decode", "dkv_pd"}


@pytest.fixture(scope="module")
def runtimes() -> dict[str, Runtime]:
    return {
        name: tiered.from_pretrained(GOLDENS / path, dtype="float32", policy="none") for name, path in FAMILIES.items()
    }


def dry(runtime: Runtime, policy: Any, tokens: int) -> list[DryForward]:
    sizes = CallShape(
        shape=runtime.model.shape, batch=1, context=PROMPT + BLOCKS * BLOCK, block_length=BLOCK, dtype="float32",
        answer=BLOCKS * BLOCK,
    )  # fmt: skip
    return list(dry_run(policy, sizes, tokens_per_forward=tokens))


@pytest.mark.covering(1)
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_forwards_are_those_of_a_call(runtimes: dict[str, Runtime], family: str, name: str, tokens: int):
    runtime, variant = runtimes[family], VARIANTS[name]
    ids = torch.randint(0, 400, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    call: dict[str, Any] = variant.call(answer=BLOCKS * BLOCK, block=BLOCK) | {"steps": BLOCKS * BLOCK // tokens}
    policy = variant.make()
    out = runtime.with_policy(policy).generate(ids, stop_at_eos=False, **call)
    found = dry(runtime, policy, tokens)
    assert {kind: sum(each.kind is kind for each in found) for kind in StepKind} == {
        kind: out.steps_by_kind.get(kind, 0) for kind in StepKind
    }
    rows = [each.rows for each in found]
    if name in EXPECTED or (family == "dream" and name in BY_TWO):
        assert sum(rows) == pytest.approx(sum(out.rows_per_step), rel=0.1)
    else:
        assert rows == pytest.approx(list(out.rows_per_step))


@pytest.mark.parametrize("options", [{}, {"refresh": "drift"}, {"top_m": 2, "clusters": 8}, {"tier": "device"}])
@pytest.mark.usefixtures("few_slots")
def test_updates_fetch_the_clusters_that_they_choose(options: dict[str, Any]):
    # And records that these clusters touch, and wrong guesses: with random weights as much again, or twice.
    policy = variant(**options)
    runtime = Runtime(random_model(128, 6, 600), policy=policy, name="random")
    ids = torch.randint(0, 100, (1, 512), generator=torch.Generator().manual_seed(0))
    out = runtime.generate(ids, max_new_tokens=64, block_length=16, steps=16, stop_at_eos=False)
    sizes = CallShape(
        shape=runtime.model.shape, batch=1, context=576, block_length=16, dtype="float32", answer=64
    )  # fmt: skip
    fetched = sum(each.fetched for each in dry_run(policy, sizes, tokens_per_forward=4))
    assert fetched <= out.memory.moved.get("host->device", 0) <= 4 * fetched
    assert (fetched > 0) is (policy.hidden_tier is Tier.HOST)


@pytest.mark.parametrize(("policy", "refreshes"), [("dkv_pd", 1), ("fast_dllm_dual", 40)])
def test_of_many_blocks_the_first_is_one_of_its_kind(policy: str, refreshes: int):
    assert MOST_BLOCKS < 40
    sizes = CallShape(
        shape=random_model(64, 2, 640).shape, batch=1, context=640, block_length=8, dtype="float32", answer=320
    )  # fmt: skip
    made = make_policy(policy)
    found = call_time(made, sizes, Workload(made, sizes).needed(), TestSeconds.RATES, tokens_per_forward=4)
    assert found.kinds[StepKind.REFRESH].count == refreshes
    assert sum(kind.count for kind in found.kinds.values()) == 40 * 2


def test_an_answer_of_unknown_length_has_eight_blocks():
    shape = random_model(64, 1, 640).shape
    sizes = CallShape(shape=shape, batch=1, context=640, block_length=32, dtype="float32")
    assert answer_of(sizes) == 256 and answer_of(replace(sizes, context=96)) == 64
    assert answer_of(replace(sizes, context=32)) == 32 and answer_of(replace(sizes, answer=64)) == 64


class TestSeconds:
    """A model of two layers over 640 positions, in blocks of 32."""

    RATES = Rates(
        flops_per_second=1e9,
        bytes_per_second=1e9,
        link_bytes_per_second=1e6,
        layer_seconds=1e-3,
        multiprocessors=1,
    )

    def timed(self, policy: str, rows: float, moved: int = 0, **rates: Any) -> tuple[float, str]:
        shape = random_model(64, 2, 640).shape
        sizes = CallShape(shape=shape, batch=1, context=640, block_length=32, dtype="float32", answer=128)
        return forward_seconds(make_policy(policy), sizes, rows, moved, replace(self.RATES, **rates))

    def test_the_slowest_of_reading_products_link_and_launches_sets_the_pace(self):
        assert self.timed("fast_dllm_dual", 32, flops_per_second=1e15, bytes_per_second=1e15) == (2e-3, "launches")
        assert self.timed("fast_dllm_dual", 32, moved=10**6) == (1.0, "link")
        assert self.timed("fast_dllm_dual", 32, moved=10**6, multiprocessors=0) == (1.002, "link")  # a CPU does both
        seconds, bound = self.timed("fast_dllm_dual", 640, bytes_per_second=1e15)
        assert bound == "products"
        assert self.timed("fast_dllm_dual", 640, bytes_per_second=1e15, flops_per_second=5e8)[0] == 2 * seconds

    def test_few_rows_reach_less_of_the_rate_and_attention_has_its_own(self):
        fast: dict[str, Any] = {"bytes_per_second": 1e15, "layer_seconds": 0.0}
        products = self.timed("fast_dllm_dual", 32, **fast)[0]
        assert self.timed("fast_dllm_dual", 32, half_rows=32.0, **fast)[0] == pytest.approx(2 * products)
        both = self.timed("fast_dllm_dual", 32, attention_flops_per_second=1e9, **fast)[0]
        once_more = self.timed("fast_dllm_dual", 32, attention_flops_per_second=5e8, **fast)[0] - both
        assert both == pytest.approx(products + once_more) and once_more > 0

    def test_reading_is_the_weights_and_keys_and_values_unless_just_made(self):
        fast: dict[str, Any] = {"flops_per_second": 1e15, "layer_seconds": 0.0}
        # Of a token in two layers: a key and a value of 64 float32.
        kv = 640 * 2 * 2 * 64 * 4
        alone, bound = self.timed("none", 32, **fast)
        assert bound == "weights"
        assert self.timed("fast_dllm_dual", 32, **fast)[0] == pytest.approx(alone + kv / 1e9)
        # A pass over 640 rows goes in two parts.
        assert self.timed("none", 640, **fast)[0] == pytest.approx(alone * 640 / 512)

    def test_a_call_is_the_sum_of_its_forwards(self):
        shape = random_model(64, 2, 640).shape
        sizes = CallShape(shape=shape, batch=3, context=640, block_length=32, dtype="float32", answer=128)
        policy = make_policy("fast_dllm_dual")
        made = call_time(policy, sizes, Workload(policy, sizes).needed(), self.RATES, tokens_per_forward=4)
        assert {kind: (time.count, time.rows) for kind, time in made.kinds.items()} == {
            StepKind.REFRESH: (4, 640),
            StepKind.STEP: (28, 32),
        }
        refresh, step = made.kinds[StepKind.REFRESH].seconds, made.kinds[StepKind.STEP].seconds
        assert made.seconds == pytest.approx(4 * refresh + 28 * step)
        assert made.tokens_per_second == pytest.approx(3 * 128 / made.seconds)


class TestDevices:
    """By name, or by a file of measured rates."""

    @pytest.mark.parametrize("name", ["rtx4090", "RTX 4090", "NVIDIA GeForce RTX 4090"])
    def test_names_of_devices_have_many_spellings(self, name: str):
        assert rates_of(name) is DEVICES["rtx4090"]

    def test_a_file_of_measured_rates(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        path = tmp_path / "rates.json"
        assert main(["rates", "--device", "cpu", "--out", str(path)]) == 0
        assert "GFLOP/s" in capsys.readouterr().out
        assert main(["rates", "--device", "cpu", "--out", str(tmp_path)]) == 2
        assert "is a folder" in capsys.readouterr().err and [*tmp_path.iterdir()] == [path]
        found = rates_of(path)
        assert found.measured and found.flops_per_second > 1e8 and "torch" in json.loads(path.read_text())
        made = tiered.plan("embedded", context=256, policy="fast_dllm_dual", device=str(path))
        assert made.rates == found and "measured rates" in str(made) and "ESTIMATE" not in str(made)

    def test_figures_are_printed_even_if_they_cannot_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("tiered.planning.machine_rates.machine_rates", lambda *_: DEVICES["rtx4090"])
        monkeypatch.setattr("tiered.core.whole_file.write_then_rename", full)
        assert main(["rates", "--device", "cpu", "--out", str(tmp_path / "rates.json")]) == 2
        told = capsys.readouterr()
        assert "GFLOP/s" in told.out and "No space left on device" in told.err

    @pytest.mark.parametrize(
        "text",
        [
            *("{}", "no", '{"rates": {"flops_per_second": 0}}', '{"rates": 3}', "[" * 100_000),
            *(
                json.dumps(
                    {"rates": {"flops_per_second": 1, "bytes_per_second": 1, "link_bytes_per_second": 1} | wrong}
                )
                for wrong in ({"attention_flops_per_second": 0}, {"layer_seconds": float("nan")}, {"half_rows": -1})
            ),
        ],
        ids=lambda text: text[-40:],
    )
    def test_a_file_without_rates_is_named(self, tmp_path: Path, text: str):
        path = tmp_path / "rates.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"rates\.json' holds no rates; write the file by `tiered rates --out`"):
            tiered.plan("embedded", context=256, device=str(path))
        with pytest.raises(ValueError, match="unknown device 'rtx4091'; did you mean 'rtx4090'"):
            tiered.plan("embedded", context=256, device="rtx4091")


class TestPlan:
    """LLaDA-8B in 24 GiB."""

    OF: ClassVar[dict[str, Any]] = {
        "context": 32768,
        "memory": "24GiB",
        "rope_scaling": "ntk:8",
        "policy": "fast_dllm_dual",
    }

    def test_the_card_has_seconds_and_their_source(self):
        made = tiered.plan("llada-8b", device="rtx4090", **self.OF)
        card, told = str(made), made.as_dict()
        assert made.streams is not None
        assert "ESTIMATE, from datasheet rates (Ada whitepaper)" in card and "set by link" in card
        assert all(len(line) <= 100 for line in card.splitlines())
        assert [time["tokens_per_forward"] for time in told["times"]] == [1, 2, 4, 8]
        step = told["times"][2]["kinds"]["step"]
        assert step["bound"] == "link" and step["seconds"] == pytest.approx(made.streams.moved / 25e9)
        json.dumps(told, allow_nan=False)

    def test_without_a_device_there_are_bytes_alone(self):
        made = tiered.plan("llada-8b", **self.OF)
        assert made.times == () and made.rates is None and "tokens/s" not in str(made)
        assert made.as_dict()["times"] == []

    def test_a_faster_card_is_faster(self):
        of: dict[str, Any] = self.OF | {"memory": None}
        seconds = [tiered.plan("llada-8b", device=name, **of).times[0].seconds for name in ("rtx4090", "a100", "h200")]
        assert seconds[0] > seconds[1] > seconds[2]


@pytest.mark.alone
def test_the_times_of_a_plan_stand_to_each_other_as_those_of_calls(tmp_path: Path):
    """Ten calls; each over the first, planned over measured, within a factor of 1.5."""
    threads, models = torch.get_num_threads(), {prompt: random_model(256, 4, prompt + 64) for prompt in (512, 1024)}
    torch.set_num_threads(1)
    calls = [
        (policy, prompt, tokens)
        for policy in ("none", "fast_dllm_dual", "dkv_pd")
        for prompt, tokens in ((512, 4), (1024, 1), (1024, 8))
    ]
    calls.append(("fast_dllm_prefix", 512, 4))
    ratios: dict[tuple[str, int, int], list[float]] = {call: [] for call in calls}
    for number in range(3):  # each with rates of its own: other work of the machine slows down calls and rates alike
        rates = tmp_path / f"rates-{number}.json"
        assert main(["rates", "--device", "cpu", "--out", str(rates)]) == 0
        for policy, prompt, tokens in calls:
            runtime = Runtime(models[prompt], policy=make_policy(policy), name="random")
            ids = torch.randint(0, 100, (1, prompt), generator=torch.Generator().manual_seed(0))
            asked = {"max_new_tokens": 64, "block_length": 32, "steps": 64 // tokens, "stop_at_eos": False}
            measured = runtime.generate(ids, **asked).timings.total
            sizes = CallShape(
                shape=runtime.model.shape, batch=1, context=prompt + 64, block_length=32, dtype="float32", answer=64
            )
            needed = Workload(runtime.policy, sizes).needed()
            planned = call_time(runtime.policy, sizes, needed, rates_of(rates), tokens_per_forward=tokens).seconds
            ratios[policy, prompt, tokens].append(planned / measured)
    torch.set_num_threads(threads)
    middle = {call: median(of) for call, of in ratios.items()}
    assert max(middle.values()) <= 1.5 * min(middle.values()), ratios
