"""The harness's model: answers of this runtime to requests of lm-evaluation-harness 0.4.13 and later."""

import inspect
import logging
import time
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm import tqdm

from tiered.core.budget import MemoryBudget
from tiered.core.checks import check_integer, check_switch, unknown_name
from tiered.evaluation.likelihood import Likelihood
from tiered.evaluation.settings import MODEL_NAMES, CallTotals, Defaults, RequestSettings
from tiered.evaluation.text import answer_text, chat_text, encode, encode_pair, fit, template
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


class TieredLM(LM):
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
        self.max_length, self.eot_token_id = self.runtime.model.shape.max_context, self.runtime.model.eos_token_id
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
        return cls(**{name: value for name, value in (additional_config or {}).items() if value is not None} | arg_dict)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> "TieredLM":
        """As `create_from_arg_obj`, of "name=value,name=value"."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers to (context, gen_kwargs), in the order of the requests.

        Up to `batch_size` requests share forwards. No answer depends on the others: if anything is drawn, request n
        has the seed + n.

        Raises:
            TypeError, ValueError: bad `gen_kwargs`, named, before any request is answered.
            TierCapacityError: the budget has no room for a request, even alone.
        """
        settings = self.defaults.all_settings([request.args[1] for request in requests])  # type: ignore[index]
        rooms = [self.max_length - own.columns for own in settings]
        prompts = fit([self.encode(request.args[0]) for request in requests], rooms)  # type: ignore[index]
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

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Of every (context, continuation): a lower bound on its log-probability in nats, and whether greedy decoding
        would give it; see `Likelihood`. Slow and noisy: prefer tasks that generate.

        Raises:
            NotImplementedError: a model of uniform noise, or one that sees blocks.
        """
        pairs = [encode_pair(self.encode, *request.args) for request in requests]
        wholes = fit([prefix + target for prefix, target in pairs], [self.max_length] * len(pairs))
        results = []
        for request, whole, (_, target) in zip(
            requests, tqdm(wholes, disable=disable_tqdm, desc="Running loglikelihood requests"), pairs, strict=True
        ):
            start = max(1, len(whole) - len(target))
            results.append(self._likelihood.score(whole[:start], whole[start:]))
            self.cache_hook.add_partial("loglikelihood", request.args, results[-1])
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of every (text,): the sum of the bounds of windows as long as the model's context, as the harness cuts
        them."""
        results = []
        for request in tqdm(requests, disable=disable_tqdm, desc="Running loglikelihood_rolling requests"):
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.encode(text),
                prefix_token=self.encode("")[0],
                max_seq_len=self.max_length - 1,  # and one for the prefix, which is no input of a causal model's last
                context_len=1,
            )
            results.append(sum(self._likelihood.score(*make_disjoint_window(window))[0] for window in windows))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[-1])
        return results

    def encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text, eos_token_id=self.eot_token_id, add_bos_token=self._bos)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as one prompt, by the tokenizer's own template; see `chat_text`."""
        return chat_text(self.tokenizer, chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's text, for the results; None if none is applied."""
        return template(self.tokenizer, chat_template)

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
        elif not batch_size.isdecimal():
            raise ValueError(f"batch_size = {batch_size!r}; a positive int or 'auto' is allowed")
    check_integer("batch_size", int(batch_size) if isinstance(batch_size, str) else batch_size, least=1)
    return int(batch_size)


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
    named = given.pop("policy", None)
    if isinstance(pretrained, Runtime):
        if any(value not in ("auto", "raw") for value in given.values()):
            raise ValueError(
                "the runtime is loaded already: its memory, dtype, device and rotation are those it was loaded with"
            )
        return pretrained.with_policy(named or pretrained.policy, **policy) if named or policy else pretrained
    caps = {_CAPS[name]: given.pop(name) for name in _CAPS if name in given}
    memory = caps["device"] if isinstance(caps.get("device"), MemoryBudget) else MemoryBudget(**caps)
    if str(given.get("device", "")).startswith("cuda") and pick_device("auto").type != "cuda":
        logger.warning("device = %r, but there is no CUDA here: going on on the CPU", str(given.pop("device")))
    return from_pretrained(pretrained, **({} if named is None else {"policy": named}), memory=memory, **given, **policy)


def _seed(options: Any) -> int:
    """The option `seed`. If it is not given, torch's own seed, which the harness sets by `--seed`."""
    given = options.get("seed")
    return torch.initial_seed() % _SEEDS if given is None else given
