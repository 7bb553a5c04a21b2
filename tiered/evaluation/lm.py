"""The harness's model: answers of this runtime to requests of lm-evaluation-harness 0.4.13 and later."""

import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm import tqdm

from tiered.core.budget import MemoryBudget
from tiered.core.checks import check_switch
from tiered.evaluation.answering import Answering, answer_in_batches, parse_batch_size
from tiered.evaluation.arguments import split_options
from tiered.evaluation.likelihood import Likelihood
from tiered.evaluation.text import answer_text, chat_text, encode_pair, fit, template
from tiered.loading import from_pretrained
from tiered.models.tokenizer import TOKENIZER_SOURCES
from tiered.offload.device import pick_device
from tiered.policies import DEFAULT_POLICY
from tiered.policies.base import Policy
from tiered.runtime import Runtime

logger = logging.getLogger(__name__)


class TieredLM(LM):
    """A model under a caching policy and a memory budget, as `--model tiered`."""

    def __init__(
        self,
        pretrained: str | Path | Runtime = "embedded",
        *,
        policy: str | Policy | None = None,
        memory: MemoryBudget | int | str | None = None,
        host_memory: int | str | None = None,
        disk_memory: int | str | None = None,
        disk_path: str | Path | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        weights: str = "raw",
        kv: str = "raw",
        rope_theta: float | None = None,
        rope_scaling: Mapping[str, Any] | str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        add_bos_token: bool = False,
        mc_num: int = 128,
        is_check_greedy: bool = True,
        **options: Any,
    ) -> None:
        """Load the model; every option is checked here, before any task is.

        Args:
            pretrained, policy, memory, dtype, device, weights, kv, rope_theta, rope_scaling: as in
                `tiered.from_pretrained`; `pretrained` may be a `Runtime`. On a machine without CUDA, "cuda:0", which
                the harness asks for by default, is "auto".
            host_memory, disk_memory, disk_path: the other tiers of `memory`, where that is a size.
            batch_size: sequences of a call. "auto": `max_batch_size` (64), and half as many whenever memory is short.
            add_bos_token: put the beginning-of-sequence token in front of prompts that do not begin with it.
            mc_num, is_check_greedy: of `loglikelihood`; see `Likelihood`.
            **options: those of `Runtime.generate`, also under the names of official scripts, for requests that do not
                set them; `max_gen_toks` and its aliases are the answer's length; `policy_<option>` goes to the policy.

        Raises:
            TierCapacityError, TypeError, ValueError, FileNotFoundError: as `tiered.from_pretrained`; also an unknown
                option (names the nearest), options that do not go together, or a model without a tokenizer.
        """
        super().__init__()
        policy_options, generation = split_options(options, inspect.signature(TieredLM).parameters.keys() - {"options"})
        self.batch_size, self._auto_batch = parse_batch_size(batch_size, max_batch_size)
        check_switch("add_bos_token", add_bos_token)
        device, caps = _present(device), (memory, host_memory, disk_memory)
        loading = {"dtype": dtype, "device": device, "weights": weights, "kv": kv}
        loading |= {"rope_theta": rope_theta, "rope_scaling": rope_scaling}
        if isinstance(pretrained, Runtime):
            if any(size is not None for size in caps) or any(
                value not in (None, "auto", "raw") for value in loading.values()
            ):
                raise ValueError(
                    "the runtime is loaded already: its memory, dtype, device and rotation are those it was loaded with"
                )
            self.runtime = pretrained
            if policy is not None or policy_options:
                self.runtime = pretrained.with_policy(policy or pretrained.policy, **policy_options)
        else:
            if not isinstance(memory, MemoryBudget):
                memory = MemoryBudget(device=memory, host=host_memory, disk=disk_memory, disk_path=disk_path)
            self.runtime = from_pretrained(
                pretrained, policy=policy or DEFAULT_POLICY, memory=memory, **loading, **policy_options
            )
        if self.runtime.tokenizer is None:
            raise ValueError(f"{self.runtime.name!r} has no tokenizer ({TOKENIZER_SOURCES}, beside the weights)")
        self.tokenizer, self._device = self.runtime.tokenizer, self.runtime.device
        self.max_length, self.eot_token_id = self.runtime.model.shape.max_context, self.runtime.model.eos_token_id
        self._answering = Answering(self.runtime, self.tokenizer, generation, add_bos_token=add_bos_token)
        own = self._answering.defaults.options
        self._likelihood = Likelihood(
            self.runtime, mc_num=mc_num, batch_size=self.batch_size, check_greedy=is_check_greedy,
            cfg_scale=own.get("cfg_scale", 0.0), seed=self._answering.seed(own),
        )  # fmt: skip

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "TieredLM":
        """The model of `--model_args`. They win over `--batch_size` and `--device`, which the command line always has,
        given or not."""
        return cls(**{name: value for name, value in (additional_config or {}).items() if value is not None} | arg_dict)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> "TieredLM":
        """As `create_from_arg_obj`, of "name=value,name=value"."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers to (context, gen_kwargs), in the order of the requests.

        Requests with the same options are answered together, `batch_size` at a time and longest first. How they are
        batched changes no answer: where anything is drawn, the n-th of them has the seed + n.

        Raises:
            TypeError, ValueError: bad `gen_kwargs`, named, before any request is answered.
            TierCapacityError: a batch does not fit the budget.
        """
        arguments: list[Any] = [request.args for request in requests]
        jobs = self._answering.jobs(arguments)
        answers: dict[int, str] = {}
        with tqdm(total=len(jobs), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            for job, ids in answer_in_batches(jobs, self.batch_size, self._answering.answer, auto=self._auto_batch):
                text = answer_text(
                    self.tokenizer, ids, most=job.settings.max_gen_toks, eos_token_id=self.eot_token_id,
                    until=job.settings.until,
                )  # fmt: skip
                answers[job.index] = text
                self.cache_hook.add_partial("generate_until", requests[job.index].args, text)
                bar.update()
        return [answers[index] for index in range(len(requests))]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Of every (context, continuation): a lower bound on its log-probability in nats, and whether greedy decoding
        would give it; see `Likelihood`. Slow and noisy: tasks that generate are the better ones for these models.

        Raises:
            NotImplementedError: a model of uniform noise, or one that sees blocks.
        """
        pairs = [encode_pair(self._answering.encode, *request.args) for request in requests]
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
        """Of every (text,): the sum of the bounds of windows as long as the model's context, each given what the one
        before it leaves room for, as the harness cuts them."""
        results = []
        for request in tqdm(requests, disable=disable_tqdm, desc="Running loglikelihood_rolling requests"):
            (text,) = request.args
            windows = get_rolling_token_windows(
                self._answering.encode(text),
                prefix_token=self._answering.encode("")[0],
                max_seq_len=self.max_length - 1,  # and one for the prefix, which is no input of a causal model's last
                context_len=1,
            )
            scores = [self._likelihood.score(*make_disjoint_window(window))[0] for window in windows]
            results.append(sum(scores))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[-1])
        return results

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as one prompt, by the tokenizer's own template; see `chat_text`."""
        return chat_text(self.tokenizer, chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's text, for the results; None where none is applied."""
        return template(self.tokenizer, chat_template)

    @property
    def tokenizer_name(self) -> str:
        """What tells cached requests of one tokenizer from those of another."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """For the results: what answered, and at what price."""
        return {
            "model_dtype": str(self.runtime.dtype).removeprefix("torch."),
            "policy": str(self.runtime.policy),
            "memory_budget": str(self.runtime.ledger.budget),
            "max_gen_toks": self._answering.defaults.max_gen_toks,
            "generation": {name: repr(value) for name, value in self._answering.defaults.options.items()},
            "totals": self._answering.totals.as_dict(),
        }


def _present(device: str | torch.device | None) -> str | torch.device:
    """The device asked for, or "auto" where it is a CUDA device and there is none."""
    if device is None:
        return "auto"
    if str(device).startswith("cuda") and pick_device("auto").type != "cuda":
        logger.warning("device = %r, but there is no CUDA here: going on on the CPU", str(device))
        return "auto"
    return device
