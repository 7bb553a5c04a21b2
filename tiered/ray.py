"""Ray workers (extra `ray`), each a runtime with its own budget: docs/batch-jobs.md."""

from typing import Any

from tiered import TierCapacityError, from_pretrained
from tiered.offload.device import pick_device
from tiered.serving.app import Service, make_app
from tiered.serving.scheduler import Scheduler


def answered(dataset: Any, model: str, *, workers: int = 1, num_gpus: float = 0, **worker: Any) -> Any:
    """`dataset` of `ray.data` with an answer or an error for each `prompt`; `worker`: arguments of `Answerer`."""
    _check_gpus(num_gpus, worker)
    from ray.data import ActorPoolStrategy  # pyright: ignore[reportMissingImports]

    dataset.context.execution_options.preserve_order = True
    pool: dict[str, Any] = {"compute": ActorPoolStrategy(size=workers), "num_gpus": num_gpus, "batch_size": 64}
    return dataset.map_batches(Answerer, fn_constructor_args=(model,), fn_constructor_kwargs=worker, **pool)


def deployment(model: str, *, replicas: int = 1, num_gpus: float = 0, service: Any = None, **loading: Any) -> Any:
    """The server of `tiered serve` for `ray.serve.run`; `service`: fields of `Service`, such as `key` or `defaults`."""
    _check_gpus(num_gpus, loading)
    from ray import serve  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    def app() -> Any:
        scheduler = Scheduler(from_pretrained(model, **loading))
        scheduler.start()
        return make_app(Service(**{"scheduler": scheduler, "model": model} | (service or {})))

    made = serve.deployment(num_replicas=replicas, max_ongoing_requests=272, ray_actor_options={"num_gpus": num_gpus})
    return made(serve.ingress(app)()).bind()


def _check_gpus(num_gpus: float, loading: dict[str, Any]) -> None:
    if not num_gpus and loading.get("device", "auto") == "auto" and pick_device("auto").type == "cuda":
        raise ValueError(f"num_gpus = {num_gpus} hides this machine's GPUs from the workers: pass 1, or device='cpu'")


def _seed(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"seed = {value}; an int is allowed") from None


class Answerer:  # of `answered`
    def __init__(self, model: str, *, options: dict[str, Any] | None = None, **loading: Any) -> None:
        self._runtime, self._options = from_pretrained(model, **loading), options or {}
        self._runtime.prepare([0], **self._options)  # an option that is invalid for every row ends the job

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        scheduler, requests = Scheduler(self._runtime, max_waiting=1 << 31), {}
        answers, errors = [""] * len(batch["prompt"]), [""] * len(batch["prompt"])
        for row, prompt in enumerate(p.tolist() if hasattr(p, "tolist") else p for p in batch["prompt"]):
            try:
                own: dict[str, Any] = {"seed": _seed(batch["seed"][row])} if "seed" in batch else {}
                requests[row] = scheduler.submit(self._runtime.prepare(prompt, **self._options | own))
            except (TypeError, ValueError, TierCapacityError) as error:
                errors[row] = str(error)
        scheduler.run()
        for row, request in requests.items():
            if not isinstance(request.error, ValueError | TierCapacityError | None):
                raise request.error
            answers[row] = (request.output.text or [""])[0] if request.output else ""
            errors[row] = str(request.error or "")
        return batch | {"answer": answers, "error": errors}
