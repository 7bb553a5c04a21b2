"""Many workers by Ray: offline batches over `ray.data`, and the server as a deployment of Ray Serve (extra `ray`).

    ray.init("auto")                                            # a cluster; without it Ray starts one on this machine
    told = answered(ray.data.read_parquet("prompts/"), "GSAI-ML/LLaDA-8B-Instruct", workers=8, num_gpus=1,
                    memory="20GiB", options={"max_new_tokens": 256, "confidence_threshold": 0.9})
    told.write_parquet("answers/")

    serve.run(deployment("GSAI-ML/LLaDA-8B-Instruct", replicas=4, num_gpus=1, memory="20GiB"))

What moves, what is retried and where work runs is Ray's; a worker is one runtime, with one budget, under one scheduler.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tiered.core.extras import Extra
from tiered.loading import from_pretrained
from tiered.serving.openai_fields import Limits
from tiered.serving.scheduler import Scheduler

if TYPE_CHECKING:
    from ray.data import Dataset  # pyright: ignore[reportMissingImports]
    from ray.serve import Application  # pyright: ignore[reportMissingImports]

Columns = dict[str, np.ndarray]


class Answerer:
    """The worker of `answered`, for `ray.data.Dataset.map_batches`: loads once, and answers batch after batch.

    Every row is a request of its own, and its answer that of `Runtime.generate` for it alone: which worker has it, with
    which others, and whether it is the first to try changes nothing.
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
            prompt: the column that has them: text, or chats.
            seed: the column that has the seed of each row; None: `options` has it.
            options: of `Runtime.generate`.
            max_running: rows that are denoised at a time, if the budget has room.
        """
        self._prompt, self._seed, self._options = prompt, seed, dict(options or {})
        self._max_running = max_running
        self._runtime = from_pretrained(model, **loading)

    def __call__(self, batch: Columns) -> Columns:
        """The columns of a batch, and beside them "answer", and its "tokens" and "forwards".

        Raises:
            TypeError, ValueError, TierCapacityError, NonFiniteError: a row that cannot be answered.
        """
        prompts, runtime = batch[self._prompt].tolist(), self._runtime
        scheduler = Scheduler(runtime, max_running=self._max_running, max_waiting=max(1, len(prompts)))
        requests = []
        for number, prompt in enumerate(prompts):
            own: dict[str, Any] = {} if self._seed is None else {"seed": int(batch[self._seed][number])}
            requests.append(scheduler.submit(runtime.ask(prompt, **self._options | own)))
        scheduler.run()
        outputs = []
        for request in requests:
            if request.error is not None:
                raise request.error
            assert request.output is not None, "it has run"
            outputs.append(request.output)
        return batch | {
            "answer": np.array([(output.text or [""])[0] for output in outputs], dtype=object),
            "tokens": np.array([output.timings.tokens for output in outputs]),
            "forwards": np.array([output.num_forwards for output in outputs]),
        }


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
    """`dataset` with an answer to each of its rows, in its order.

    Ray shows progress, and gives the batches of a worker that dies to another, which answers them the same.

    Args:
        workers: actors, each with a runtime and a budget of its own.
        batch_size: rows that a worker gets at a time, and loses with its machine.
        num_gpus, num_cpus: of each worker.
        of_worker: as for `Answerer`: options, memory, policy.

    Raises:
        ModuleNotFoundError: Ray is not installed.
    """
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
        num_gpus, num_cpus: of each replica.
        defaults, limits, key: as in `tiered.serving.server.Service`.
        scheduler: arguments of `Scheduler`.

    Raises:
        ModuleNotFoundError: Ray Serve is not installed.
    """
    with Extra("ray"):
        from ray import serve  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
    options, of_scheduler = dict(defaults or {}), dict(scheduler or {})

    def app() -> Any:
        """Made on the replica."""
        with Extra("serve"):
            from tiered.serving.server import Service, make_app

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
