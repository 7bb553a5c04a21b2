"""The kernel parts of a GPU day: right kernels pass at a tiny size, and an error in a kernel is found."""

import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tiered.kernels.log_sum_exp import LogSumExp
from tiered.kernels.row_base import RowBase
from tiered.kernels.row_code import RowCode
from tiered.kernels.store_table import StoreTable

ROOT = Path(__file__).resolve().parents[1]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Lanes without a row divide zero by zero, in numpy with a warning.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")


def part(name: str) -> Any:
    return importlib.import_module(f"gpu_parts.{name}")


def setting(seed: int = 1) -> Any:
    return part("setting").Setting(device=DEVICE.type, tiny=True, seed=seed)


def first_of(kernel: str) -> str:
    """The first case of a kernel."""
    return next(name for name in part("kernels").cases(setting()) if name.split()[0] == kernel)


def known(what: Callable[[Any], Any]) -> Any:
    """Of the found cases, for parameters: the module is importable only once a test runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "bench")
        return what(part("kernel_case"))


CHECKED = known(lambda cases: cases.sized("CHECKED", True))
TRITON = known(lambda cases: sorted({case.kernel for case in cases.found("CHECKED") if case.triton}))


@pytest.mark.parametrize("case", CHECKED)
def test_a_right_kernel_passes(case: str):
    row = part("kernels").measure(setting(), case)
    assert row["ok"], row
    assert row["kernel"] == case.split()[0]
    assert 0 <= row["rel_error"] <= row["bound"] and row["row_error"] <= row["row_bound"]
    assert row.get("bits", True) and json.dumps(row, allow_nan=False)
    has_law = type(CHECKED[case]).law is not part("kernel_case").KernelCase.law
    assert row.get("bits", False) is has_law


def test_every_kernel_is_checked_and_run_once_for_the_sanitizer():
    modules = {path.stem for path in (ROOT / "tests" / "compilations").glob("*.py")} - {"specialisation"}
    assert modules == set(TRITON)
    assert part("kernel_case").small_cases().keys() == modules


@pytest.mark.parametrize("kernel", TRITON)
def test_a_small_run_starts_its_kernel_once(kernel: str, monkeypatch: pytest.MonkeyPatch):
    started, module = [], importlib.import_module(f"tiered.kernels.{kernel}")
    reference = getattr(importlib.import_module(f"tiered.kernels.{kernel}_ref"), kernel)
    monkeypatch.setattr(module, kernel, lambda *given, **named: started.append(kernel) or reference(*given, **named))
    part("kernel_case").run_once(part("kernel_case").small_cases()[kernel], DEVICE)
    assert started == [kernel]


def results(found: Any) -> list[Tensor]:
    """The tensors that a call of a kernel has made."""
    if isinstance(found, LogSumExp):
        return [found.peak, found.mass]
    return [found] if isinstance(found, Tensor) else [tensor for one in found for tensor in results(one)]


def one_row_less(before: list[Tensor], after: list[Tensor]) -> None:
    """The last row that was written stays as it was."""
    for old, new in zip(before, after, strict=True):
        rows, were = (part.reshape(-1, 16 if part.dim() == 1 else part.shape[-1]) for part in (new, old))
        row = (rows != were).any(1).nonzero()[-1]
        rows[row] = were[row]
        new.copy_(rows.view(new.shape))


def moved_by_one(before: list[Tensor], after: list[Tensor]) -> None:
    for new in after:
        new.copy_(new.roll(1, -1))


def one_nan(before: list[Tensor], after: list[Tensor]) -> None:
    if not after[0].is_floating_point():
        pytest.skip("bytes are no numbers")
    changed = (after[0] != before[0]).nonzero()[-1]
    after[0][tuple(changed)] = torch.nan


def one_element(before: list[Tensor], after: list[Tensor]) -> None:
    """Off by what an element measures; of an integer, by one."""
    written, at = after[-1], tuple((after[-1] != before[-1]).nonzero()[0])
    written[at] += written.square().mean().sqrt() if written.is_floating_point() else 1


def another_each_time() -> Callable[[list[Tensor], list[Tensor]], None]:
    """A last bit, as of a sum in another order."""
    calls = iter(range(1, 100))

    def change(before: list[Tensor], after: list[Tensor]) -> None:
        at = tuple(((after[0] != before[0]) & after[0].isfinite()).nonzero()[0])
        after[0][at] = (
            after[0][at] * 1.01 ** next(calls) if after[0].is_floating_point() else after[0][at] + next(calls)
        )

    return change


def same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def broken(kernel: str, monkeypatch: pytest.MonkeyPatch, defect: Callable[[list[Tensor], list[Tensor]], None]) -> None:
    """Have `kernel` do `defect` to its results. New memory for results held the poison before."""
    module = importlib.import_module(f"tiered.kernels.{kernel}")
    right = getattr(module, kernel)

    def wrong(*given: Any, **named: Any) -> Any:
        arguments = [tensor for tensor in given if isinstance(tensor, Tensor)]
        tables = [table for table in given if isinstance(table, StoreTable)]
        arguments += [memory for table in tables for call in table.calls for memory in (call.keys, call.values)]
        before = [tensor.clone() for tensor in arguments]
        found = right(*given, **named)
        if found is None:  # it has written into one of its arguments
            pairs = [pair for pair in zip(before, arguments, strict=True) if not same_bytes(*pair)]
            defect([old for old, _ in pairs], [new for _, new in pairs])
        else:
            after = results(found)
            defect([torch.empty_like(tensor) for tensor in after], after)
        return found

    monkeypatch.setattr(module, kernel, wrong)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernel", TRITON)
@pytest.mark.parametrize(
    ("defect", "why"),
    [
        (one_row_less, "lanes are left unwritten|bytes are not the reference's|rounding"),  # a sum that is added to
        (moved_by_one, "rounding|bytes are not the reference's"),
        (one_element, "rounding|bytes are not the reference's"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_a_wrong_kernel_is_found(kernel: str, defect: Any, why: str, monkeypatch: pytest.MonkeyPatch):
    broken(kernel, monkeypatch, defect)
    row = part("kernels").measure(setting(), first_of(kernel))
    assert row["ok"] is False
    assert any(reason in row["why"] for reason in why.split("|")), row


@pytest.mark.parametrize("kernel", TRITON)
def test_a_number_that_is_none_is_found(kernel: str, monkeypatch: pytest.MonkeyPatch):
    broken(kernel, monkeypatch, one_nan)
    row = part("kernels").measure(setting(), first_of(kernel))
    assert row["ok"] is False and "not finite" in row["why"]
    assert row["rel_error"] is None and json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("kernel", TRITON)
def test_bits_that_change_each_time_are_not_taken_for_unwritten_lanes(kernel: str, monkeypatch: pytest.MonkeyPatch):
    broken(kernel, monkeypatch, another_each_time())
    assert "the same inputs give other bits again" in part("kernels").measure(setting(), first_of(kernel))["why"]


def masked() -> list[str]:
    """The kernels that are given a mask of keys."""
    references = {name: importlib.import_module(f"tiered.kernels.{name}_ref") for name in TRITON}
    return [name for name in TRITON if "key_mask" in inspect.signature(getattr(references[name], name)).parameters]


@pytest.mark.parametrize("kernel", masked())
def test_a_key_that_is_not_read_is_found(kernel: str, monkeypatch: pytest.MonkeyPatch):
    module = importlib.import_module(f"tiered.kernels.{kernel}")
    right = getattr(module, kernel)

    def short(*given: Any, **named: Any) -> Any:
        bound = inspect.signature(right).bind(*given, **named)
        bound.arguments["key_mask"] = bound.arguments["key_mask"].clone()
        bound.arguments["key_mask"][0, 3] = False
        return right(*bound.args, **bound.kwargs)

    monkeypatch.setattr(module, kernel, short)
    row = part("kernels").measure(setting(), first_of(kernel))
    assert row["ok"] is False and "rounding" in row["why"]


def rows_case(change: Callable[[Tensor], Tensor], law: bool = False) -> Any:
    """A case of a thousand rows, which `change` is done to; with `law` they have to stay as they are."""

    class Case(part("kernel_case").KernelCase):
        kernel, name, error = "none", "none", 0.01

        def draw(self, generator: torch.Generator) -> Tensor:
            return torch.randn(1000, 8, generator=generator)

        def run(self, given: Tensor, room: Any) -> tuple[Tensor, ...]:
            return (change(given.clone()),)

        def truth(self, given: Tensor) -> tuple[Tensor, ...]:
            return (given.double(),)

        def law(self, given: Tensor) -> tuple[Tensor, ...] | None:
            return (given,) if law else None

        def tiny(self) -> Any:
            return self

        def moved(self, given: Tensor) -> int:
            return 0

    return Case()


@pytest.mark.parametrize(("wrong", "found"), [(0, False), (1, True)])
def test_one_row_of_many_is_found(wrong: int, found: bool):
    """One row of a thousand is off by a tenth, which is less than the bound on all of them."""

    def change(rows: Tensor) -> Tensor:
        rows[7] *= 1 + wrong / 10
        return rows

    row = part("kernels").check(rows_case(change), torch.Generator().manual_seed(0))
    assert row["rel_error"] < row["bound"]
    assert row["ok"] is not found
    assert not found or row["why"] == "row_error 0.1, at most 0.02 is rounding"


@pytest.mark.parametrize(
    ("change", "why"), [(lambda rows: rows[1:], "shape"), (lambda rows: rows.double(), "torch.float64")]
)
def test_a_result_of_another_shape_or_dtype_is_found(change: Callable[[Tensor], Tensor], why: str):
    row = part("kernels").check(rows_case(change, law=True), torch.Generator().manual_seed(0))
    assert row["ok"] is False and why in row["why"]


def test_bytes_are_those_that_must_move():
    """Counted once more, from the sizes: every input once, every output once."""
    generator = torch.Generator().manual_seed(0)

    def moved(case: Any) -> int:
        return case.moved(case.draw(generator))

    rows = part("kernel_cases_coded_rows")
    # Codes, E4M3 scales, a word with scale and projection; three bases; a row's number, and its base's.
    coded, numbers = 67 * (4096 // 2 + 256 + 4) + 3 * 2 * 4096, 2 * 8 * 67
    size = {"rows": 67, "width": 4096, "dtype": torch.bfloat16}
    assert moved(rows.DecodeRows(**size)) == coded + numbers + 8 * 67 + 67 * 2 * 4096
    assert moved(rows.DecodeRows(**size, placed=False)) == coded + numbers + 67 * 2 * 4096
    assert moved(rows.EncodeRows(**size)) == coded + numbers + 67 * 2 * 4096
    plain = 67 * (4096 // 2 + 256 + 4) + 8 * 67
    assert moved(rows.EncodeRows(**size, residual=False)) == plain + 67 * 2 * 4096

    attention = part("kernel_cases_attention")
    sizes = {"shape": attention.DREAM, "batch": 2, "rows": 6, "length": 90, "dtype": torch.bfloat16}
    queries, column, sums = 2 * 28 * 6 * 128 * 2, 4 * 128 * 2, 2 * 28 * 6 * 4
    visible = 2 * (90 - 11)
    capped = attention.BlockAttention(**sizes, masked=True, partly=True, soft_cap=1.0, sinks=2)
    sinks = 2 * 28 * 2 * 128 * 2
    assert moved(capped) == 2 * queries + 2 * visible * column + 2 * 90 + sinks + 2 * 6 * 8 + 2 * sums
    coded = attention.BlockAttention(**sizes, padded=True, code=RowCode.FP8)
    assert moved(coded) == 2 * queries + 2 * (180 - 11) * 4 * 132 + 2 * 8 + 2 * sums
    assert moved(attention.TorchAttention(**sizes, masked=True)) == 2 * queries + 2 * visible * column + 2 * 90

    copies = part("kernel_cases_copies")
    scatter = copies.ScatterRows(heads=3, length=40, elements=16, rows=10, dtype=torch.float32)
    assert moved(scatter) == 2 * (2 * 10 * 3 * 16 * 4) + 2 * 10 * 8
    flagged = copies.ScatterRows(heads=3, length=40, elements=16, rows=10, dtype=torch.float32, masked=True)
    given = flagged.draw(generator)
    count = sum(map(sum, given.valid.tolist()))
    assert 0 < count < 20
    assert flagged.moved(given) == 2 * (count * 3 * 16 * 4) + 2 * 10 * 9

    linear = part("kernel_cases_linear").Linear(rows=3, inputs=16, outputs=5, dtype=torch.bfloat16)
    assert moved(linear) == 2 * (16 * 5 + 3 * 16 + 3 * 5)


def test_arithmetic_is_that_of_the_products():
    attention = part("kernel_cases_attention")
    generator = torch.Generator().manual_seed(0)
    sizes = {"shape": attention.DREAM, "rows": 6, "length": 90, "dtype": torch.bfloat16}
    product = 2 * 28 * 6 * 90 * 128
    for case, flops in [
        (attention.BlockAttention(**sizes, soft_cap=1.0), 2 * product),
        (attention.TorchAttention(**sizes), 2 * product),
    ]:
        assert case.arithmetic(case.draw(generator)) == flops


def test_inputs_are_as_a_store_and_a_batch_with_pads_give_them():
    attention = part("kernel_cases_attention")
    case = attention.BlockAttention(
        shape=attention.DREAM, batch=2, rows=3, length=50, dtype=torch.float32, masked=True, strided=True
    )
    given = case.draw(torch.Generator().manual_seed(0))
    assert not given.keys.is_contiguous() and not given.queries.is_contiguous()
    assert given.key_mask[0].tolist() == [True] * 44 + [False] * 6
    assert given.key_mask[1].tolist() == [False] * 6 + [True] * 44
    assert given.keys.transpose(1, 2)[~given.key_mask].isnan().all()
    assert given.keys.transpose(1, 2)[given.key_mask].isfinite().all()


def test_draws_depend_on_the_case_and_the_seed_alone():
    generator_of = part("kernel_case").generator_of
    draws = [torch.rand(3, generator=generator_of(name, seed, torch.device("cpu"))) for name, seed in
             [("a", 0), ("a", 0), ("b", 0), ("a", 1)]]  # fmt: skip
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[3])


@pytest.mark.parametrize("table", ["CHECKED", "TIMED"])
def test_a_rehearsal_has_the_rows_of_a_day(table: str):
    cases = part("kernel_case").found(table)
    day, rehearsal = (part("kernel_case").sized(table, tiny) for tiny in (False, True))
    assert list(day) == list(rehearsal) and len(day) == len(cases)
    assert tuple(day.values()) == cases
    assert all(small.name != name and len(name) < 100 for name, small in rehearsal.items())


class TestTheFormat:
    """The decoder that shares no line with the codecs, against torch and by hand."""

    def test_every_code_and_scale(self):
        values64 = part("kernel_cases_coded_rows").values64
        codes = torch.arange(256, dtype=torch.uint8)
        scales = torch.arange(127, dtype=torch.uint8)
        ones = torch.full((127, 8), 0x22, dtype=torch.uint8)  # 1.0 everywhere
        found = values64(ones, scales[:, None], torch.tensor([1.0]), 16)
        assert torch.equal(found, scales.view(torch.float8_e4m3fn).double()[:, None].expand(-1, 16))
        magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        numbers = [sign * size for sign in (1, -1) for size in magnitudes]
        one = torch.full((1, 32), 0x38, dtype=torch.uint8)  # the scale 1
        pairs = [numbers[half] for code in codes.tolist() for half in (code & 15, code >> 4)]
        assert values64(codes[None], one, torch.tensor([2.0]), 512)[0].tolist() == [2 * value for value in pairs]
        assert values64(ones[:1], torch.tensor([[127]], dtype=torch.uint8), torch.ones(1), 3).isnan().all()

    def test_parts_of_a_row_have_their_booked_places(self):
        """16 columns, by hand: codes of 1, a block scale of 2, a scale of 1/2, and a projection of 3 last."""
        row = torch.tensor([[0x22] * 8 + [0x40] + [126] + [0x40, 0x40]], dtype=torch.uint8)
        base = RowBase(torch.stack([torch.zeros(16), torch.arange(16.0)]), torch.tensor([1]))
        found = part("kernel_cases_coded_rows").rows64(row, RowCode.NVFP4, 16, base)
        assert found[0].tolist() == [3 * column + 1.0 * 0.5 * 2 for column in range(16)]


class TestPoison:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool])
    def test_all_new_memory_holds_it(self, dtype: torch.dtype):
        poison = part("kernels")
        like = torch.ones(4, 6, dtype=dtype)[:, ::2]
        with poison.Poisoned(0xA5):
            made = [torch.empty(3, 5, dtype=dtype), torch.empty_like(like), like.new_empty(2), torch.empty(())]
            made += [torch.empty_like(like, memory_format=torch.contiguous_format), like.new_empty_strided((2,), (3,))]
            zeros = torch.zeros(3, dtype=dtype)
        assert all(set(bytes(tensor.untyped_storage())) == {0xA5} for tensor in made)
        assert not zeros.any() and like.all()

    def test_nothing_else_is_poisoned(self):
        with part("kernels").Poisoned(0xA5):
            pass
        assert set(bytes(torch.empty(8, dtype=torch.uint8).untyped_storage())) != {0xA5}


def test_an_interpreter_that_comes_too_late_is_refused(monkeypatch: pytest.MonkeyPatch):
    importlib.import_module("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="before it could be told to interpret"):
        part("kernel_case").interpret(torch.device("cpu"))
    part("kernel_case").interpret(torch.device("cuda"))


class TestFloors:
    def test_every_kernel_has_its_figures(self):
        floors = part("floors")
        first = {case.split()[0]: case for case in reversed(floors.cases(setting()))}
        assert (
            set(first)
            == {case.kernel for case in part("kernel_case").found("TIMED")}
            > {"scaled_dot_product_attention", "linear"}
        )
        for case in first.values():
            row = floors.measure(setting(), case)
            assert row["kernel"] == case.split()[0] and json.dumps(row, allow_nan=False)
            assert 0 < row["low_us"] <= row["time_us"] <= row["high_us"] and row["eager_us"] > 0 and row["noise"] >= 0
            assert row["over_floor"] == pytest.approx(row["time_us"] / row["floor_us"], rel=2e-3)
            assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3, rel=2e-3)

    def test_figures_are_those_of_the_clock(self, monkeypatch: pytest.MonkeyPatch):
        floors = part("floors")
        monkeypatch.setattr(floors, "copy_bandwidth", lambda device, tiny: 4e6)
        seconds = iter([[5e-3], [2e-3, 3e-3]])
        monkeypatch.setattr(floors, "device_times", lambda *given, **named: next(seconds))
        linear = [case for case in floors.cases(setting()) if case.startswith("linear")]
        row = floors.measure(setting(), linear[-2])
        nbytes = 2 * (4 * 32 + 96 * 32 + 4 * 96)
        assert row["bytes"] == nbytes
        assert [row[name] for name in ("time_us", "low_us", "high_us", "eager_us")] == [2500, 2200, 2800, 5000]
        assert row["noise"] == pytest.approx(0.4)
        assert row["floor_us"] == pytest.approx(nbytes / 4, rel=1e-3)
        assert row["over_floor"] == pytest.approx(2500 / (nbytes / 4), rel=1e-3)
        assert row["gb_per_s"] == pytest.approx(nbytes / 2.5e-3 / 1e9, rel=1e-3)
        assert row["tflop_per_s"] == pytest.approx(2 * 4 * 32 * 96 / 2.5e-3 / 1e12, rel=1e-3)

    @pytest.mark.parametrize(("caches", "count"), [(0, 1), (0.1, 1), (0.25, 1), (0.3, 2), (2, 8), (100, 256)])
    def test_inputs_outgrow_the_cache(self, caches: float, count: int):
        case = part("kernel_cases_linear").Linear(rows=3, inputs=32, outputs=16, dtype=torch.float32)
        generator = torch.Generator().manual_seed(0)
        inputs = part("floors").rotation(case, generator, int(caches * case.moved(case.draw(generator))))
        assert len(inputs) == count
        assert len({given[0].sum().item() for given, _ in inputs}) == count

    @pytest.mark.parametrize("refused", [False, True])
    def test_a_graph_is_replayed_unless_its_capture_is_refused(self, refused: bool, monkeypatch: pytest.MonkeyPatch):
        log = []

        @contextmanager
        def capture(graph: Any) -> Iterator[None]:
            log.append("begin")
            yield
            log.append("end")
            if refused:
                raise RuntimeError("operation not permitted\nand more")

        @contextmanager
        def stream(_: Any) -> Iterator[None]:
            log.append("stream")
            yield
            log.append("back")

        replayed = SimpleNamespace(replay=lambda: log.append("replay"))
        for name, fake in {"CUDAGraph": lambda: replayed, "graph": capture, "stream": stream}.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        work, how = part("floors")._replayed(lambda: log.append("work"), 3, torch.device("cuda"))
        assert log == ["stream", "begin", "work", "work", "work", "end", "back"]
        work()
        assert log[7:] == (["work"] * 3 if refused else ["replay"])
        assert how == ("launched: RuntimeError: operation not permitted" if refused else "graph")

    def test_figures_of_compiled_kernels_are_recorded(self, monkeypatch: pytest.MonkeyPatch):
        jit = importlib.import_module("triton.runtime.jit")
        metadata = SimpleNamespace(name="_decode", shared=4096, num_warps=4)
        made = [SimpleNamespace(metadata=metadata, n_regs=96, n_spills=2), None]
        monkeypatch.setattr(jit.JITFunction, "run", run := lambda self, which: made[which])
        rows: list[dict[str, Any]] = []
        with part("floors").recorded(rows):
            assert [jit.JITFunction.run(None, which) for which in (0, 0, 1)] == [made[0], made[0], None]
        assert rows == [{"name": "_decode", "registers": 96, "spills": 2, "shared_bytes": 4096, "warps": 4}]
        assert jit.JITFunction.run is run
