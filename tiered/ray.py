"""Many workers by Ray: offline batches over `ray.data`, and the server as a deployment of Ray Serve (extra `ray`).

    ray.init("auto")                                            # a cluster; without it Ray starts one on this machine
    told = answered(ray.data.read_parquet("prompts/"), "GSAI-ML/LLaDA-8B-Instruct", workers=8, num_gpus=1,
                    memory="20GiB", options={"max_new_tokens": 256, "confidence_threshold": 0.9})
    told.write_parquet("answers/")

    serve.run(deployment("GSAI-ML/LLaDA-8B-Instruct", replicas=4, num_gpus=1, memory="20GiB"))

Ray moves rows, places workers and starts them again; a worker is one runtime with one budget.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiered.core.errors import TierCapacityError
from tiered.core.extras import Extra
from tiered.loading import from_pretrained
from tiered.offload.device import pick_device
from tiered.output import GenerationOutput
from tiered.serving.openai_fields import Limits
from tiered.serving.request import Request
from tiered.serving.scheduler import Scheduler

if TYPE_CHECKING:
    from ray.data import Dataset  # pyright: ignore[reportMissingImports]
    from ray.serve import Application  # pyright: ignore[reportMissingImports]

Columns = dict[str, np.ndarray]
_COLUMNS: Mapping[str, Any] = {"answer": object, "tokens": np.int64, "forwards": np.int64, "error": object}
_OF_ROW = (TypeError, ValueError, TierCapacityError)


class Answerer:
    """The worker of `answered`, for `ray.data.Dataset.map_batches`: loads once, and answers batch after batch.

    Each row is a request of its own. On the CPU its answer is that of `Runtime.generate` for it alone, whichever worker
    and rows it shares. On CUDA libraries choose kernels by the number of rows, so that last bits can differ.
    """

    def __init__(
        self,
        model: str,
        *,
        prompt: str = "prompt",
        seed: str | None = None,
        options: Mapping[str, Any] | None = None,
        max_running: int = 16,
        **loading: Any,
    ) -> None:
        """
        Args:
            model: as for `from_pretrained`, on the worker's machine; `loading`: the rest of its arguments.
            prompt: the column of prompts: text, chats, or ids.
            seed: the column of seeds; None for that of `options`.
            options: of `Runtime.generate`.
            max_running: rows that are denoised at a time, if the budget has room.

        Raises:
            TypeError, ValueError: the model or `options` are wrong, for whatever row.
        """
        self._prompt, self._seed, self._options = prompt, seed, dict(options or {})
        self._max_running = max_running
        self._runtime = from_pretrained(model, **loading)
        self._runtime.ask(torch.tensor([[0]]), **self._options)

    def __call__(self, batch: Columns) -> Columns:
        """The columns of a batch, and beside them "answer", "tokens", "forwards" and "error": empty if there is
        an answer, and else says why there is none."""
        prompts = batch[self._prompt]
        seeds = [None] * len(prompts) if self._seed is None else batch[self._seed].tolist()
        scheduler = Scheduler(self._runtime, max_running=self._max_running, max_waiting=max(1, len(prompts)))
        asked = [self._submitted(scheduler, *row) for row in zip(prompts, seeds, strict=True)]
        scheduler.run()
        rows = [_row(each.output or each.error if isinstance(each, Request) else each) for each in asked]
        return batch | {name: np.array([row[name] for row in rows], dtype=kind) for name, kind in _COLUMNS.items()}

    def _submitted(self, scheduler: Scheduler, prompt: Any, seed: int | None) -> Request | Exception:
        if isinstance(prompt, np.ndarray):  # a list in Arrow: of ids, or of messages
            prompt = torch.from_numpy(prompt)[None] if prompt.dtype.kind == "i" else prompt.tolist()
        own: dict[str, Any] = {} if seed is None else {"seed": seed}
        try:
            return scheduler.submit(self._runtime.ask(prompt, **self._options | own))
        except _OF_ROW as error:
            return error


def _row(end: GenerationOutput | Exception | None) -> dict[str, Any]:
    if isinstance(end, GenerationOutput):
        text, tokens = (end.text or [""])[0], end.timings.tokens
        return {"answer": text, "tokens": tokens, "forwards": end.num_forwards, "error": ""}
    if isinstance(end, _OF_ROW):
        return {"answer": "", "tokens": 0, "forwards": 0, "error": str(end)}
    assert end is not None, "it has run"
    raise end


def _check_gpus(num_gpus: float | None, loading: Mapping[str, Any]) -> None:
    # Ray hides all GPUs from a worker that asks for none.
    if not num_gpus and loading.get("device", "auto") == "auto" and pick_device("auto").type == "cuda":
        raise ValueError(
            f"num_gpus = {num_gpus} hides this machine's GPUs from the workers, which would answer on the CPU: pass "
            "num_gpus=1, or device='cpu'"
        )
    if num_gpus and num_gpus < 1 and loading.get("memory") is None:
        raise ValueError(f"num_gpus = {num_gpus} lets workers share a GPU: pass memory, the bytes of each")


def answered(
    dataset: "Dataset",
    model: str,
    *,
    workers: int = 1,
    batch_size: int = 64,
    num_gpus: float | None = None,
    num_cpus: float | None = None,
    **of_worker: Any,
) -> "Dataset":
    """`dataset` with an answer, or an error, to each of its rows, in its order.

    If a worker dies, Ray gives its batches to another, which answers them again.

    Args:
        workers: actors, each with a runtime and a budget of its own.
        batch_size: rows that a worker gets at a time, and loses with its machine.
        num_gpus, num_cpus: of each worker. Workers that share a GPU need `memory`.
        of_worker: as for `Answerer`: options, memory, policy.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ValueError: `num_gpus` hides this machine's GPUs from workers that may use them, or shares one without `memory`.
    """
    _check_gpus(num_gpus, of_worker)
    with Extra("ray"):
        from ray.data import ActorPoolStrategy  # pyright: ignore[reportMissingImports]

    dataset.context.execution_options.preserve_order = True
    return dataset.map_batches(
        Answerer,
        fn_constructor_args=(model,),
        fn_constructor_kwargs=of_worker,
        compute=ActorPoolStrategy(size=workers),
        batch_size=batch_size,
        num_gpus=num_gpus,
        num_cpus=num_cpus,
    )


def deployment(
    model: str,
    *,
    name: str | None = None,
    replicas: int = 1,
    num_gpus: float = 0,
    num_cpus: float = 1,
    defaults: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    key: str | None = None,
    scheduler: Mapping[str, Any] | None = None,
    **loading: Any,
) -> "Application":
    """The server of `tiered serve` for `ray.serve.run`; each replica is a runtime, a budget and a scheduler.

    Args:
        model: as for `from_pretrained`, on the replicas' machines; `loading`: the rest of its arguments.
        name: of the model for clients; None: `model`.
        num_gpus, num_cpus: of each replica. Replicas that share a GPU need `memory`.
        defaults, limits, key: as in `tiered.serving.server.Service`.
        scheduler: arguments of `Scheduler`.

    Raises:
        ModuleNotFoundError: Ray Serve is not installed.
        ValueError: as `answered`.
    """
    _check_gpus(num_gpus, loading)
    with Extra("ray"):
        from ray import serve  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
    options, of_scheduler = dict(defaults or {}), dict(scheduler or {})

    def app() -> Any:
        """Made on the replica."""
        with Extra("serve"):
            from tiered.serving.app import Service, make_app

        scheduler = Scheduler(from_pretrained(model, **loading), **of_scheduler)
        scheduler.start()
        return make_app(
            Service(scheduler=scheduler, model=name or model, defaults=options, limits=limits or Limits(), key=key)
        )

    most = of_scheduler.get("max_running", 16) + of_scheduler.get("max_waiting", 256)
    replica = serve.deployment(
        name="tiered",
        num_replicas=replicas,
        max_ongoing_requests=most,
        ray_actor_options={"num_gpus": num_gpus, "num_cpus": num_cpus},
    )
    return replica(serve.ingress(app)()).bind()
