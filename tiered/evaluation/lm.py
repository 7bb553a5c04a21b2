"""The model class of lm-evaluation-harness (0.4.13 and later), which answers its requests by this runtime."""

import inspect
import logging
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import maybe_truncate
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm import tqdm

from tiered.core.budget import MemoryBudget
from tiered.core.buffers import dtype_name
from tiered.core.checks import check_integer, check_switch, unknown_name
from tiered.evaluation.likelihood import Likelihood
from tiered.evaluation.requests import MODEL_NAMES, answer_text, request_options
from tiered.loading import from_pretrained
from tiered.models.tokenizer import TOKENIZER_SOURCES
from tiered.offload.device import pick_device
from tiered.runtime import Runtime
from tiered.serving.request import Request
from tiered.serving.scheduler import Scheduler

_BELOW = {"host_memory": "host", "disk_memory": "disk", "disk_path": "disk_path"}
_LOADING = {*inspect.signature(from_pretrained).parameters, *_BELOW} - {"path_or_name", "policy_options"}


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
            pretrained: path or name as in `tiered.from_pretrained`, or a `Runtime`.
            batch_size: most requests denoised at a time; the budget may allow fewer. "auto" for `max_batch_size`, or
                64.
            add_bos_token: whether prompts without the beginning-of-sequence token get it.
            mc_num, is_check_greedy: options of `loglikelihood`; see `Likelihood`.
            **options: arguments of `tiered.from_pretrained`, with `host_memory`, `disk_memory` and `disk_path` beside
                `memory`, and `policy_<option>` for the policy. Options of `Runtime.generate` are the defaults of
                requests.

        Raises:
            TierCapacityError, FileNotFoundError: as `tiered.from_pretrained`.
            TypeError, ValueError: a wrong or unknown option (with the nearest name), or a model without a tokenizer.
        """
        super().__init__()
        size = (max_batch_size or 64) if str(batch_size).startswith("auto") else batch_size
        self.batch_size: Any = int(size) if str(size).isdecimal() else size
        check_integer("batch_size", self.batch_size, least=1)
        check_switch("add_bos_token", add_bos_token)
        self.runtime, generation = _loaded(pretrained, options)
        if self.runtime.tokenizer is None:
            raise ValueError(f"{self.runtime.name!r} has no tokenizer ({TOKENIZER_SOURCES}, beside the weights)")
        self.tokenizer, self._device, self._bos = self.runtime.tokenizer, self.runtime.device, add_bos_token
        self.max_length = self.runtime.model.shape.max_context
        length = min(256, self.max_length // 2)  # 256 as in the harness's own models
        own, tokens, _ = request_options(generation, {"max_gen_toks": length}, self.runtime.model)
        self.runtime.prepare(torch.tensor([[self.eot_token_id]]), **own)
        self.defaults = {**own, "max_gen_toks": tokens}
        del self.defaults["max_new_tokens"]
        self._scheduler = Scheduler(self.runtime, max_running=self.batch_size, max_waiting=1 << 62)
        self._policies: Counter[str] = Counter()
        self._likelihood = Likelihood(
            self.runtime,
            mc_num=mc_num,
            batch_size=self.batch_size,
            check_greedy=is_check_greedy,
            cfg_scale=own.get("cfg_scale", 0.0),
            seed=_seed(own),
        )

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict | None = None) -> "TieredLM":
        """The model of `--model_args`, which override `--batch_size` and `--device`."""
        return super().create_from_arg_obj({}, (additional_config or {}) | arg_dict)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> "TieredLM":
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers to (context, gen_kwargs). Answers do not depend on each other: request n has the seed + n.

        Raises:
            TypeError, ValueError: bad `gen_kwargs`, named in the message, or no room for a prompt; no request is
                answered.
            TierCapacityError: the budget has no room for a request, even alone.
        """
        asked: list[Request] = []
        answers: dict[int, str] = {}
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests")

        def ended(index: int, tokens: int, until: list[str], done: Request) -> None:
            if done.output is not None:
                self._policies[str(done.output.choice.policy)] += 1
                ids = done.output.sequences[0, done.call.prompts.ids.shape[1] :][:tokens].tolist()
                ends = done.call.options.ends(*self.runtime.model.ends)
                answers[index] = answer_text(self.tokenizer, ids, ends, until)
                self.cache_hook.add_partial("generate_until", requests[index].args, answers[index])
                bar.update()

        try:
            for index, (context, gen_kwargs) in enumerate(request.args for request in requests):  # type: ignore[misc]
                own, tokens, until = request_options(gen_kwargs, self.defaults, self.runtime.model)
                columns = own["max_new_tokens"] + own.get("trailing_noise", 0)
                ids = self.tok_encode(context) or [self.prefix_token_id]
                ids, _ = maybe_truncate(ids, min(columns, self.max_length - 1), self.max_length)
                call = self.runtime.prepare(torch.tensor([ids]), **{**own, "seed": _seed(own, index)})
                asked.append(self._scheduler.submit(call, on_end=partial(ended, index, tokens, until)))
            self._scheduler.run()
        finally:
            for request in asked:
                request.cancel()
            self._scheduler.run()
        for request in asked:
            if request.error is not None:
                raise request.error
        return [answers[index] for index in range(len(requests))]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **options: object
    ) -> list[tuple[float, bool]]:
        results = []
        for request, context, target in tqdm(requests, disable=disable_tqdm, desc="Running loglikelihood requests"):
            whole, _ = maybe_truncate((context or [self.prefix_token_id]) + target, 0, self.max_length)
            start = max(1, len(whole) - len(target))
            results.append(self._likelihood.score(whole[:start], whole[start:]))
            self.cache_hook.add_partial("loglikelihood", request, results[-1])
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """For every (text,), the sum of the bounds of windows as long as the model's context."""
        results = []
        for request in tqdm(requests, disable=disable_tqdm, desc="Running loglikelihood_rolling requests"):
            ids, prefix = self.tok_encode(request.args[0]), self.prefix_token_id
            windows = get_rolling_token_windows(ids or [prefix], prefix, self.max_length - 1, context_len=1)
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
        """Ids of a text. A text that begins with the beginning-of-sequence token, as after a chat template, gets no
        second one. `add_special_tokens`: False for a text inside a sequence."""
        bos = str(self.tokenizer.bos_token or "")
        if self._bos and add_special_tokens is not False and not string.startswith(bos):
            string = bos + string
        special = not (bos and string.startswith(bos)) if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer(string, add_special_tokens=special)["input_ids"])  # type: ignore[arg-type]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        how: Any = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        how["continue_final_message"] = not add_generation_prompt  # a task's `gen_prefix` begins the answer
        return str(self.tokenizer.apply_chat_template(chat_history, **how))

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Settings and totals for the results. A shared forward counts once for each answer in it."""
        counts, ledger = self._scheduler.counts, self.runtime.ledger
        seconds = sum(counts.clock.seconds.values())
        return {
            "model_dtype": dtype_name(self.runtime.dtype),
            "policy": str(self.runtime.policy),
            "memory_budget": str(ledger.budget),
            "generation": {name: repr(value) for name, value in self.defaults.items()},
            "totals": {
                "sequences": self._policies.total(),
                "forwards": counts.taken,
                "tokens": counts.tokens,
                "seconds": seconds,
                "tokens_per_forward": counts.tokens_per_forward,
                "tokens_per_second": counts.tokens / seconds if seconds else 0.0,
                "policies": dict(self._policies),
                "peak_bytes": {str(tier): report.peak for tier, report in ledger.report().tiers.items()},
            },
        }


def _loaded(pretrained: str | Path | Runtime, options: dict[str, Any]) -> tuple[Runtime, dict[str, Any]]:
    """The runtime, and the remaining options, which are for `Runtime.generate`."""
    own = inspect.signature(TieredLM).parameters.keys() - {"options"}
    policy = {name.removeprefix("policy_"): options.pop(name) for name in [*options] if name.startswith("policy_")}
    for name in options:
        if name not in (*_LOADING, *MODEL_NAMES):
            raise unknown_name("model argument", name, {*own, *_LOADING, *MODEL_NAMES, "policy_<option>"})
    given = {name: options.pop(name) for name in [*options] if name in _LOADING}
    if isinstance(pretrained, Runtime):
        chosen = given.pop("policy", pretrained.policy)
        if given:
            raise ValueError(f"{', '.join(given)} cannot change, because the runtime is loaded already")
        return pretrained.with_policy(chosen, **policy), options
    below = {_BELOW[name]: given.pop(name) for name in _BELOW if name in given}
    memory = replace(MemoryBudget.of(given.pop("memory", None)), **below)
    if str(given.get("device", "")).startswith("cuda") and pick_device("auto").type != "cuda":
        logging.getLogger(__name__).warning(
            "device = %r, but there is no CUDA: using the CPU", str(given.pop("device"))
        )
    return from_pretrained(pretrained, memory=memory, **given, **policy), options


def _seed(options: dict[str, Any], place: int = 0) -> int:
    """The option `seed` plus `place`; without it, torch's seed, which the harness sets by `--seed`, plus `place`."""
    seed = options.get("seed")
    return ((torch.initial_seed() if seed is None else seed) + place) % 2**62
