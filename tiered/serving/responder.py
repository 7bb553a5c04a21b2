"""Submits an HTTP request, gathers or streams its answer, and cancels it when the client disconnects.

The scheduler's thread sends events of the choices to the server's event loop.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock

from starlette.requests import ClientDisconnect
from torch import Tensor

from tiered.core.errors import ContextLengthError
from tiered.core.features import Tier
from tiered.models.response import CONTENT, Response, ResponseParts, response_template
from tiered.prepare import PreparedCall
from tiered.serving.answer_text import AnswerText, token_texts
from tiered.serving.openai_fields import Limits, ParsedRequest, sampler_seed
from tiered.serving.replies import DONE, Replies, error_reply, event
from tiered.serving.request import Request
from tiered.serving.scheduler import Scheduler

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Final:
    """The next tokens of choice `index` are final."""

    index: int
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Draft:
    """A block of choice `index` after a forward.

    Attributes:
        index: number of the choice.
        first: first column of the block, counted from the prompt's end.
        before: token before the block; None for the prompt's last one.
        ids: tokens of the block; proposals for open ones.
        open: whether each token is open.
    """

    index: int
    first: int
    before: int | None
    ids: list[int]
    open: list[bool]


@dataclass(frozen=True, slots=True)
class Finished:
    """The request of choice `index` has ended."""

    index: int


ChoiceEvent = Final | Draft | Finished


class Feed(asyncio.Queue[ChoiceEvent | Exception]):
    """A queue from other threads to the event loop that made it. An exception in it ends all choices."""

    def __init__(self) -> None:
        super().__init__()
        self._reader = asyncio.get_running_loop()

    def send(self, event: ChoiceEvent | Exception) -> None:
        """Put `event` from any thread, or drop it if the loop is closed."""
        with suppress(RuntimeError):  # the loop is closed
            self._reader.call_soon_threadsafe(self.put_nowait, event)


class ChoiceStreamer:
    """The streamer of one choice. It sends a token when it and all tokens before it are final."""

    def __init__(self, feed: Feed, index: int) -> None:
        self._feed, self.index = feed, index
        self._sent, self._blocks = 0, -1  # tokens sent; tokens of finished blocks, -1 before the prompt

    def put(self, value: Tensor) -> None:
        """Receive the prompt, then every final block."""
        if self._blocks < 0:
            self._blocks = 0
            return
        self._send(value[0].tolist())
        self._blocks += value.shape[1]

    def put_open(self, value: Tensor, still: Tensor) -> None:
        whole = still[0].int().cumsum(dim=0) == 0
        self._send(value[0][whole].tolist())

    def end(self) -> None:
        """Do nothing: `Finished` marks the end."""

    def _send(self, block: list[int]) -> None:
        if new := block[self._sent - self._blocks :]:
            self._sent += len(new)
            self._feed.send(Final(self.index, new))


class DraftStreamer(ChoiceStreamer):
    _before: int | None = None

    def put(self, value: Tensor) -> None:
        if self._blocks >= 0:
            self._before = value[0].tolist()[-1]
        super().put(value)

    def put_draft(self, value: Tensor) -> None:
        self._draft = value

    def put_open(self, value: Tensor, still: Tensor) -> None:
        self._feed.send(Draft(self.index, self._blocks, self._before, self._draft[0].tolist(), still[0].tolist()))
        super().put_open(value, still)


class Responder:
    """The answers to one request.

    As a context manager it is a member of `under_way`, and cancels unfinished choices at its end.
    """

    def __init__(
        self, scheduler: Scheduler, parsed: ParsedRequest, calls: Sequence[PreparedCall], under_way: set["Responder"]
    ) -> None:
        """Submit `calls`, one for each choice, in the event loop. Raises as `Scheduler.submit`; then no call runs."""
        self._feed, self._parsed, self._calls, self._under_way = Feed(), parsed, calls, under_way
        self._ledger, self._model = scheduler.runtime.ledger, scheduler.runtime.model
        assert scheduler.runtime.tokenizer is not None, "a server has one"
        self._tokenizer = scheduler.runtime.tokenizer
        template = response_template(self._tokenizer)
        self._parts = [
            None
            if template is None or not call.prompts.chat
            else ResponseParts(self._tokenizer, template, call.prompts.rows()[0])
            for call in calls
        ]
        how = {"stop": parsed.stop, "most": parsed.most}
        self._texts = [
            AnswerText(self._tokenizer, ends=call.options.ends(*self._model.ends), **how, special=parts is not None)
            for call, parts in zip(calls, self._parts, strict=True)
        ]
        kind = DraftStreamer if parsed.drafts else ChoiceStreamer
        self._requests: list[Request] = []
        try:
            for index, call in enumerate(calls):
                over = lambda _, index=index: self._feed.send(Finished(index))  # noqa: E731
                streamer = kind(self._feed, index)
                self._requests.append(scheduler.submit(call, streamer=streamer, on_end=over))
        except Exception:
            self.cancel()
            raise

    def __enter__(self) -> "Responder":
        self._under_way.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._under_way.discard(self)
        self.cancel()

    def cancel(self) -> None:
        for request in self._requests:
            request.cancel()

    def fail(self, error: Exception) -> None:
        """End the answers with `error`, after the events sent already."""
        self._feed.send(error)

    async def gathered(self, replies: Replies, disconnect: Callable[[], Awaitable[object]]) -> dict[str, object]:
        """The whole answer. Raises `ClientDisconnect` if `disconnect` returns first."""
        async for happened, text in self._events(disconnect):
            self._split(happened, text)
        answers = [self._answer(index) for index in range(len(self._texts))]
        return replies.whole(answers, self._reasons(), self._usage())

    async def streamed(self, replies: Replies, disconnect: Callable[[], Awaitable[object]]) -> AsyncIterator[bytes]:
        """Events of final text, and of drafts and token counts if requested. An error becomes the last event."""
        try:
            for index in range(len(self._calls)):
                yield replies.first(index)
            async for happened, text in self._events(disconnect):
                if isinstance(happened, Draft):
                    yield replies.beside(draft=self._draft(happened))
                    continue
                for part, piece in self._split(happened, text):
                    yield replies.more(happened.index, piece, part)
                if isinstance(happened, Finished):
                    yield replies.last(happened.index, self._reasons()[happened.index])
            if self._parsed.usage:
                yield replies.beside(usage=self._usage())
            yield DONE
        except ClientDisconnect:
            return
        except Exception as error:
            yield event(error_reply(logged(error))[1])

    async def _events(self, disconnect: Callable[[], Awaitable[object]]) -> AsyncIterator[tuple[ChoiceEvent, str]]:
        left = set(range(len(self._calls)))
        leaving = asyncio.ensure_future(self._leave(disconnect))
        try:
            while left:
                happens = await self._feed.get()
                if isinstance(happens, Exception):
                    raise happens
                index, text = happens.index, self._texts[happens.index]
                if index not in left:
                    continue
                match happens:
                    case Final():
                        yield happens, text.put(happens.ids)
                        if text.ended is not None:  # a stop string or the last token: the rest is not needed
                            self._requests[index].cancel(enough=text.tokens)
                            left.discard(index)
                            yield Finished(index), ""
                    case Draft():
                        yield happens, ""
                    case Finished():
                        if (error := self._requests[index].error) is not None:
                            raise error
                        left.discard(index)
                        yield happens, text.end()
        finally:
            leaving.cancel()

    def _split(self, happened: ChoiceEvent, text: str) -> list[tuple[str, str]]:
        """The final pieces of a choice after an event that made `text` final, each with its part of the message."""
        if (parts := self._parts[happened.index]) is None:
            return [(CONTENT, text)] if text else []
        return parts.put(text) + (parts.end() if isinstance(happened, Finished) else [])

    def _answer(self, index: int) -> str | Response:
        return self._texts[index].text if (parts := self._parts[index]) is None else parts.response

    async def _leave(self, disconnect: Callable[[], Awaitable[object]]) -> None:
        await disconnect()
        self.fail(ClientDisconnect())

    def _reasons(self) -> list[str]:
        return [text.ended or "length" for text in self._texts]

    def _usage(self) -> dict[str, int]:
        # A prompt counts once, even with several answers.
        prompts = sum(call.prompts.longest for call in self._calls[:: self._parsed.n])
        answers = sum(text.tokens for text in self._texts)
        return {"prompt_tokens": prompts, "completion_tokens": answers, "total_tokens": prompts + answers}

    def _draft(self, draft: Draft) -> dict[str, object]:
        ledger = self._ledger
        return {
            "index": draft.index,
            "first": draft.first,
            "columns": self._calls[draft.index].options.max_new_tokens,
            "tokens": token_texts(self._tokenizer, draft.ids, draft.before),
            "open": draft.open,
            "memory": {
                tier.value: {
                    "bytes": ledger.held(tier),
                    "cap": ledger.budget.cap(tier),
                    "accounts": {account.value: count for account, count in ledger.accounts(tier).items() if count},
                }
                for tier in Tier
            },
        }


def prepared_calls(scheduler: Scheduler, parsed: ParsedRequest, limits: Limits, lock: Lock) -> list[PreparedCall]:
    """A call for each choice; `lock` guards the tokenizer. Raises `RefusedBody` if `Runtime.prepare` raises, and for a
    prompt that is too long."""
    calls = []
    for prompt in parsed.prompts:
        raw = parsed.raw and isinstance(prompt, str)
        for number in range(parsed.n):
            seed = None if parsed.seed is None else sampler_seed(parsed.seed + number)
            try:
                with lock:
                    call = scheduler.runtime.prepare(
                        prompt, raw=raw, chat_template_kwargs=parsed.template, **parsed.options, seed=seed
                    )
            except (TypeError, ValueError) as error:
                raise parsed.refusal(error) from None
            if limits.prompt_tokens is not None and call.prompts.longest > limits.prompt_tokens:
                what = f"the prompt has {call.prompts.longest} tokens; at most {limits.prompt_tokens} are allowed"
                raise parsed.refusal(ContextLengthError(what))
            calls.append(call)
    return calls


def logged(error: Exception) -> Exception:
    """`error`, after logging it if it is internal."""
    if error_reply(error)[0] == 500:
        _LOG.error("a request failed", exc_info=error)
    return error
