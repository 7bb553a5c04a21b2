"""The harness's model: answers of this runtime to requests of lm-evaluation-harness 0.4.13 and later."""

import inspect
import logging
import time
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import maybe_truncate
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm import tqdm

from tiered.core.budget import MemoryBudget
from tiered.core.checks import check_integer, check_switch, unknown_name
from tiered.evaluation.likelihood import Likelihood
from tiered.evaluation.requests import MODEL_NAMES, CallTotals, Defaults, RequestSettings, answer_text
from tiered.loading import from_pretrained
from tiered.models.tokenizer import TOKENIZER_SOURCES
from tiered.offload.device import pick_device
from tiered.runtime import Runtime
from tiered.serving.request import Request
from tiered.serving.scheduler import Scheduler

logger = logging.getLogger(__name__)

AUTO_BATCH_SIZE = 64
POLICY_PREFIX = "policy_"
_SEEDS = 2**62
_CAPS = {"memory": "device", "host_memory": "host", "disk_memory": "disk", "disk_path": "disk_path"}
_LOADING = inspect.signature(from_pretrained).parameters.keys() - {"path_or_name", "policy_options", "memory"}


class TieredLM(TemplateLM):
    """A model under a caching policy and a memory budget, as `--model tiered`."""

    def __init__(
        self,
        pretrained: str | Path | Runtime = "embedded",
        *,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        add_bos_token: bool = False,
        mc_num: int = 128,
        is_check_greedy: bool = True,
        **options: Any,
    ) -> None:
        """Load the model. Every option is checked here, before the first task.

        Args:
            pretrained: as in `tiered.from_pretrained`, or a `Runtime`.
            batch_size: requests that are denoised at a time, at most; the budget may allow fewer. "auto" is
                `max_batch_size`, or 64.
            add_bos_token: put the beginning-of-sequence token in front of prompts that do not begin with it.
            mc_num, is_check_greedy: of `loglikelihood`; see `Likelihood`.
            **options: those of `tiered.from_pretrained`; `host_memory`, `disk_memory` and `disk_path` beside `memory`;
                `policy_<option>` of the policy; and those of `Runtime.generate`, also under the names of official
                scripts, for requests that do not set them. `max_gen_toks` and its aliases are the answer's length. On
                a machine without CUDA, "cuda:0", which the harness asks for by default, is "auto".

        Raises:
            TierCapacityError, TypeError, ValueError, FileNotFoundError: as `tiered.from_pretrained`; also an unknown
                option (names the nearest), options that do not go together, or a model without a tokenizer.
        """
        super().__init__()
        self.batch_size = _batch_size(batch_size, max_batch_size)
        check_switch("add_bos_token", add_bos_token)
        loading, policy, generation = _split(options)
        self.runtime = _runtime(pretrained, loading, policy)
        if self.runtime.tokenizer is None:
            raise ValueError(f"{self.runtime.name!r} has no tokenizer ({TOKENIZER_SOURCES}, beside the weights)")
        self.tokenizer, self._device, self._bos = self.runtime.tokenizer, self.runtime.device, add_bos_token
        self.max_length = self.runtime.model.shape.max_context
        self.defaults, self.totals = Defaults(self.runtime, generation), CallTotals()
        own = self.defaults.options
        self._likelihood = Likelihood(
            self.runtime, mc_num=mc_num, batch_size=self.batch_size, check_greedy=is_check_greedy,
            cfg_scale=own.get("cfg_scale", 0.0), seed=_seed(own),
        )  # fmt: skip

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "TieredLM":
        """The model of `--model_args`. They win over `--batch_size` and `--device`, which the command line always
        passes, given or not."""
        return super().create_from_arg_obj((additional_config or {}) | arg_dict)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> "TieredLM":
        """As `create_from_arg_obj`, of "name=value,name=value"."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers to (context, gen_kwargs), in the order of the requests.

        Up to `batch_size` requests share forwards. No answer depends on the others: if anything is drawn, request n
        has the seed + n.

        Raises:
            TypeError, ValueError: bad `gen_kwargs`, named, before any request is answered; or an answer that leaves no
                room for a prompt.
            TierCapacityError: the budget has no room for a request, even alone.
        """
        settings, prompts = [], []
        for context, gen_kwargs in (request.args for request in requests):  # type: ignore[misc]
            settings.append(own := self.defaults.settings(gen_kwargs))
            if own.columns >= self.max_length:
                raise ValueError(
                    f"max_gen_toks = {own.max_gen_toks} takes {own.columns} of the model's {self.max_length} positions "
                    "and leaves none for a prompt"
                )
            prompts.append(maybe_truncate(self._prompt(context), own.columns, self.max_length)[0])
        answers: dict[int, str] = {}
        waiting: dict[int, Request] = {}
        began = time.perf_counter()
        scheduler = Scheduler(self.runtime, max_running=self.batch_size, max_waiting=max(1, len(requests)))
        try:
            for index, (ids, own) in enumerate(zip(prompts, settings, strict=True)):
                options: dict[str, Any] = {**own.options, "seed": (_seed(own.options) + index) % _SEEDS}
                waiting[index] = scheduler.submit(self.runtime.prepare(torch.tensor([ids]), **options))
            with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
                while waiting:
                    scheduler.step()
                    for index in [index for index, request in waiting.items() if request.over]:
                        answers[index] = text = self._text(waiting.pop(index), settings[index])
                        self.cache_hook.add_partial("generate_until", requests[index].args, text)
                        bar.update()
        finally:
            scheduler.close(cancel=True)
            self.totals.seconds += time.perf_counter() - began
        return [answers[index] for index in range(len(requests))]

    def _text(self, request: Request, settings: RequestSettings) -> str:
        if request.output is None:
            raise request.error or RuntimeError(f"{request!r} has no answer")
        self.totals.add(request.output)
        ids = request.output.sequences[0, request.call.prompts.ids.shape[1] :].tolist()
        return answer_text(
            self.tokenizer, ids, most=settings.max_gen_toks, eos_token_id=self.eot_token_id, until=settings.until
        )

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **options: object
    ) -> list[tuple[float, bool]]:
        """Of every (request, context, continuation): a lower bound on its log-probability in nats, and whether greedy
        decoding would give it; see `Likelihood`. Slow and noisy: prefer tasks that generate.

        Raises:
            NotImplementedError: a model of uniform noise, or one that sees blocks.
        """
        results = []
        for request, context, target in tqdm(requests, disable=disable_tqdm, desc="Running loglikelihood requests"):
            whole, _ = maybe_truncate((context or [self.prefix_token_id]) + target, 0, self.max_length)
            start = max(1, len(whole) - len(target))
            results.append(self._likelihood.score(whole[:start], whole[start:]))
            self.cache_hook.add_partial("loglikelihood", request, results[-1])
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of every (text,): the sum of the bounds of windows as long as the model's context, as the harness cuts
        them."""
        results = []
        for request in tqdm(requests, disable=disable_tqdm, desc="Running loglikelihood_rolling requests"):
            (text,) = request.args
            windows = get_rolling_token_windows(
                self._prompt(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,  # and one for the prefix, which is no input of a causal model's last
                context_len=1,
            )
            results.append(sum(self._likelihood.score(*make_disjoint_window(window))[0] for window in windows))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[-1])
        return results

    @property
    def eot_token_id(self) -> int:
        return self.runtime.model.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The beginning-of-sequence token, or the end-of-sequence token if the tokenizer has none."""
        bos = self.tokenizer.bos_token
        return self.tokenizer.convert_tokens_to_ids(str(bos)) if bos else self.eot_token_id  # type: ignore[return-value]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Ids of a text, which may have gone through a chat template.

        A text that begins with the tokenizer's beginning-of-sequence token gets no second one; `add_bos_token` adds it
        to the others. `add_special_tokens`: False for a text that begins no sequence.
        """
        bos = str(self.tokenizer.bos_token or "")
        if self._bos and add_special_tokens is not False and not string.startswith(bos):
            string = bos + string
        special = not (bos and string.startswith(bos)) if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer(string, add_special_tokens=special)["input_ids"])  # type: ignore[arg-type]

    def _prompt(self, text: str) -> list[int]:
        return self.tok_encode(text) or [self.prefix_token_id]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as one prompt, by the tokenizer's own template. Without `add_generation_prompt` the last message is
        the answer's own beginning (a task's `gen_prefix`), and stays open. Raises `ValueError` as `chat_template`."""
        self.chat_template(True)
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The text of the tokenizer's own template, for the results; None if none is applied.

        Raises:
            ValueError: the tokenizer has no template, or `chat_template` is a name: the harness passes it for the
                results alone, and not when it applies a template.
        """
        if not chat_template:
            return None
        if isinstance(chat_template, str):
            raise ValueError(
                f"--apply_chat_template {chat_template}: no template is chosen by name here; leave the name out"
            )
        if not self.tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; run without --apply_chat_template")
        return self.tokenizer.get_chat_template()

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """For the results: the model's settings, and the price of its answers."""
        return {
            "model_dtype": str(self.runtime.dtype).removeprefix("torch."),
            "policy": str(self.runtime.policy),
            "memory_budget": str(self.runtime.ledger.budget),
            "max_gen_toks": self.defaults.max_gen_toks,
            "generation": {name: repr(value) for name, value in self.defaults.options.items()},
            "totals": self.totals.as_dict(),
        }


def _batch_size(batch_size: int | str, most: int | None) -> int:
    if isinstance(batch_size, str):
        if batch_size.partition(":")[0] == "auto":
            batch_size = AUTO_BATCH_SIZE if most is None else most
        elif batch_size.isdecimal():
            batch_size = int(batch_size)
        else:
            raise ValueError(f"batch_size = {batch_size!r}; a positive int or 'auto' is allowed")
    check_integer("batch_size", batch_size, least=1)
    return batch_size


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    loading, policy, generation = {}, {}, {}
    for name, value in options.items():
        if name in _LOADING or name in _CAPS:
            loading[name] = value
        elif name.startswith(POLICY_PREFIX):
            policy[name.removeprefix(POLICY_PREFIX)] = value
        elif name in MODEL_NAMES:
            generation[name] = value
        else:
            own = inspect.signature(TieredLM).parameters.keys() - {"options"}
            error = unknown_name("model argument", name, {*own, *_LOADING, *_CAPS, *MODEL_NAMES})
            raise ValueError(f"{error}; an option of the policy is written {POLICY_PREFIX}<option>")
    return loading, policy, generation


def _runtime(pretrained: str | Path | Runtime, loading: dict[str, Any], policy: dict[str, Any]) -> Runtime:
    given = {name: value for name, value in loading.items() if value is not None}
    if isinstance(pretrained, Runtime):
        named = given.pop("policy", None)
        if any(value not in ("auto", "raw") for value in given.values()):
            raise ValueError(
                "the runtime is loaded already: its memory, dtype, device and rotation are those it was loaded with"
            )
        return pretrained.with_policy(named or pretrained.policy, **policy) if named or policy else pretrained
    caps = {_CAPS[name]: given.pop(name) for name in _CAPS if name in given}
    memory = caps["device"] if isinstance(caps.get("device"), MemoryBudget) else MemoryBudget(**caps)
    if str(given.get("device", "")).startswith("cuda") and pick_device("auto").type != "cuda":
        logger.warning("device = %r, but there is no CUDA here: going on on the CPU", str(given.pop("device")))
    return from_pretrained(pretrained, memory=memory, **given, **policy)


def _seed(options: Any) -> int:
    """The option `seed`. If it is not given, torch's own seed, which the harness sets by `--seed`."""
    given = options.get("seed")
    return torch.initial_seed() % _SEEDS if given is None else given
