"""Streamers: their calls in order, and transformers' own streamers on the embedded model."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from padded_prompts import padded
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextDiffusionStreamer, TextIteratorStreamer, TextStreamer

import tiered
from tiered.core.features import Tier
from tiered.models.llada import LLaDA
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens"
PROMPTS = torch.tensor([[5, 6, 7, 8], [125, 125, 9, 10]])
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
SIZES: dict[str, Any] = {"max_new_tokens": 12, "block_length": 4}


class Plain:
    """Keeps every call, with a copy of its tokens."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Tensor | None]] = []

    def put(self, value: Tensor) -> None:
        self.calls.append(("put", value.clone()))

    def end(self) -> None:
        self.calls.append(("end", None))

    def named(self, name: str) -> list[Tensor]:
        return [value for call, value in self.calls if call == name and value is not None]


class Drafting(Plain):
    def put_draft(self, value: Tensor) -> None:
        self.calls.append(("draft", value.clone()))


@pytest.fixture
def runtime(tiny_model: LLaDA) -> Runtime:
    return Runtime(tiny_model, policy=make_policy("none"))


@pytest.mark.parametrize(
    ("make", "block"), [(Plain, ["put"]), (Drafting, ["draft", "draft", "put"])], ids=["plain", "drafting"]
)
def test_order_of_calls(runtime: Runtime, make: type[Plain], block: list[str]):
    streamer = make()
    out = runtime.generate(PROMPTS, attention_mask=MASK, streamer=streamer, steps=6, stop_at_eos=False, **SIZES)
    assert [name for name, _ in streamer.calls] == ["put", *3 * block, "end"]
    prompts, *blocks = streamer.named("put")
    assert torch.equal(prompts, PROMPTS)  # as they were passed, padding and all
    assert [block.shape for block in blocks] == [(2, 4)] * 3
    assert torch.equal(torch.cat([prompts, *blocks], dim=1), out.sequences)
    assert all(value.device.type == "cpu" for _, value in streamer.calls if value is not None)


def test_drafts_show_proposals_of_open_tokens(runtime: Runtime):
    streamer = Drafting()
    out = runtime.generate(PROMPTS[:1], streamer=streamer, output_history=True, stop_at_eos=False, **SIZES)
    drafts, history = streamer.named("draft"), out.history
    assert history is not None and len(drafts) == out.num_forwards == 12
    for step, draft in enumerate(drafts):
        columns = slice(4 + step // 4 * 4, 8 + step // 4 * 4)
        logits = runtime.logits(history[step])[:, columns].clone()
        logits[..., runtime.model.mask_token_id] = -torch.inf
        before = history[step][:, columns]
        assert torch.equal(draft, logits.argmax(-1).where(before == runtime.model.mask_token_id, before))
    # Once a block's last token is fixed, the draft is the block.
    assert all(map(torch.equal, drafts[3::4], streamer.named("put")[1:]))


def test_streaming_changes_nothing(runtime: Runtime):
    options = {"temperature": 0.7, "seed": 1, **SIZES}
    quiet = runtime.generate(PROMPTS, attention_mask=MASK, **options)
    streamed = runtime.generate(PROMPTS, attention_mask=MASK, streamer=Drafting(), **options)
    assert torch.equal(quiet.sequences, streamed.sequences)


# ---- transformers' own streamers ----

CHAT = [{"role": "user", "content": "copy: Ada Ben Cleo"}]


@pytest.fixture(scope="module")
def embedded() -> Runtime:
    return tiered.from_pretrained("embedded")


def printed(embedded: Runtime, capsys: pytest.CaptureFixture[str], make: Any, **options: Any) -> tuple[str, Any]:
    """The text that a streamer writes to the terminal, and the output of the call."""
    streamer = make(embedded.tokenizer, **options)
    out = embedded.generate(CHAT, max_new_tokens=16, block_length=8, streamer=streamer)
    return capsys.readouterr().out, out


def test_text_streamer(embedded: Runtime, capsys: pytest.CaptureFixture[str]):
    text, out = printed(embedded, capsys, TextStreamer, skip_prompt=True, skip_special_tokens=True)
    assert out.text[0]
    assert text.strip() == out.text[0]
    whole, out = printed(embedded, capsys, TextStreamer)
    # Prompt and answer, and its end once: not the rest of the last block.
    assert whole == f"<|user|> copy: Ada Ben Cleo<|assistant|> {out.text[0]}<|endoftext|>\n"


def test_text_diffusion_streamer(embedded: Runtime, capsys: pytest.CaptureFixture[str]):
    text, out = printed(embedded, capsys, TextDiffusionStreamer, skip_prompt=True, skip_special_tokens=True)
    # Save the cursor, write the draft in yellow; later go back and clear.
    draft = re.compile(r"\x1b7\x1b\[33m(.*?)\x1b\[0m\x1b8\x1b\[J", re.DOTALL)
    assert len(draft.findall(text)) == out.num_forwards
    assert any(draft.findall(text))
    assert draft.sub("", text).strip() == out.text[0]


def test_text_iterator_streamer(embedded: Runtime):
    tokenizer: PreTrainedTokenizerBase | None = embedded.tokenizer
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=5, skip_special_tokens=True)  # type: ignore[arg-type]
    out = embedded.generate(CHAT, max_new_tokens=16, block_length=8, streamer=streamer)
    assert out.text is not None and "".join(streamer).strip() == out.text[0]


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"block_length": 5}])
def test_a_reader_of_a_failed_call_waits_for_nothing(embedded: Runtime, wrong: dict[str, Any]):
    streamer = TextIteratorStreamer(embedded.tokenizer, timeout=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"steps|block_length"):
        embedded.generate(CHAT, streamer=streamer, **wrong)
    assert not "".join(streamer)


def test_a_streamer_of_one_sequence_refuses_a_batch(embedded: Runtime):
    streamer = TextStreamer(embedded.tokenizer)  # type: ignore[arg-type]
    held = embedded.ledger.held(Tier.DEVICE)
    with pytest.raises(ValueError, match="batch size 1"):
        embedded.generate([CHAT, CHAT], max_new_tokens=16, streamer=streamer)
    assert embedded.ledger.held(Tier.DEVICE) == held


def test_no_draft_shows_a_mask_behind_an_answer_that_has_ended():
    runtime = tiered.from_pretrained("embedded", policy="none")
    prompts = ("sort: Max Ada", "copy: Ada Ben Cleo Dan Eva Finn Gus")
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    streamer = Drafting()
    out = runtime.generate(chats, streamer=streamer, max_new_tokens=32, remasking="random", seed=0)
    assert out.forwards[0] != out.forwards[1]
    assert not any((draft == runtime.model.mask_token_id).any() for draft in streamer.named("draft"))


def test_blocks_go_to_the_end_of_the_longest_answer(embedded: Runtime):
    names = ("Ada", "Ada Ben Cleo Dan Eva Finn Gus Hana Ivan")
    chats = [[{"role": "user", "content": f"copy: {name}"}] for name in names]
    streamer = Plain()
    out = embedded.generate(chats, streamer=streamer, max_new_tokens=32, block_length=4)
    assert out.text == [*names]
    _, *blocks = streamer.named("put")
    assert [block.shape for block in blocks] == [(2, 4), (2, 4), (2, 2)]  # nine names and the end
    shown = torch.cat(blocks, dim=1)
    assert torch.equal(shown, out.sequences[:, -32 : -32 + 10])


class Open(Drafting):
    def put_open(self, value: Tensor, still: Tensor) -> None:
        assert value.shape == still.shape
        self.calls.append(("open", value.clone()))


@pytest.mark.parametrize(("prompt", "new", "block"), [(4, 6, 4), (5, 6, 4), (7, 3, 8), (3, 1, 4)])
def test_nothing_is_sent_past_an_answer_that_ends_inside_a_block(prompt: int, new: int, block: int):
    runtime, streamer = tiered.from_pretrained(GOLDENS / "llada2" / "llada2_tiny", dtype="float32"), Open()
    ids = torch.arange(5, 5 + prompt)[None]
    out = runtime.generate(ids, streamer=streamer, max_new_tokens=new, block_length=block, stop_at_eos=False)
    answer, sent = out.sequences[:, prompt:], 0
    for name, value in streamer.calls[1:]:
        if value is not None:
            assert sent + value.shape[1] <= answer.shape[1] == new, name
            sent += value.shape[1] if name == "put" else 0
    assert torch.equal(torch.cat(streamer.named("put")[1:], dim=1), answer)


@pytest.mark.parametrize("lengths", [(8, 7), (8, 5), (12, 7)])
def test_all_tokens_are_sent_if_one_answer_ends_and_another_has_no_block_left(lengths: tuple[int, int]):
    runtime = tiered.from_pretrained(GOLDENS / "sdar" / "sdar_tiny", dtype="float32")
    batch, call = padded(*lengths), dict[str, Any](max_new_tokens=8, block_length=4)
    longest = max(lengths)
    free = runtime.generate(**batch, **call, stop_at_eos=False).sequences[1, longest:]
    for token in free.unique().tolist():
        streamer = Plain()
        out = runtime.generate(**batch, **call, stop_tokens=[token], streamer=streamer)
        answers, sent = out.sequences[:, longest:], torch.cat(streamer.named("put")[1:], dim=1)
        assert torch.equal(sent, answers[:, : sent.shape[1]])
        assert (answers[:, sent.shape[1] :] == runtime.model.pad_token_id).all()
