"""One training run: its state, one step of it, and its checkpoints.

All draws of a step follow from the seed and the step; scores and checkpoints come at fixed steps. A killed run goes on
from its checkpoint to the same weights, bit for bit, on one machine with as many threads.
"""

import copy
import math
import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tiered.models.base import DiffusionModel
from training.batches import Batch
from training.checkpoint import (
    load_checkpoint,
    optimizer_tensors,
    prefixed,
    restore_optimizer,
    save_checkpoint,
    under,
)
from training.curriculum import FRESH_LEARNED, LIST_BOUNDS, LOOKUP_LEARNED, Curriculum
from training.fresh_batches import fresh_batch, fresh_task, mask_as_decoded
from training.fresh_losses import fresh_losses
from training.in_blocks import forward_in_blocks
from training.long_batches import long_batch
from training.lookup_batches import REACH, lookup_batch
from training.losses import (
    AUXILIARY_WEIGHT,
    CHAIN_FACTS,
    LOOKUP_FACTS,
    POINTER_LAYER,
    operand_losses,
    pointer_losses,
    token_loss,
)
from training.model import adopt, forward, new_model
from training.noise import process_of
from training.optimizer import optimizers, set_rate
from training.settings import Settings, Standing
from training.short_batches import ShortBatches
from training.tasks import FRESH_TASKS, TASKS

AVERAGE_DECAY = 0.996
LOSS_DECAY = 0.95  # of the smoothed losses, which are logged, and which widen the tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The results of one of a step's batches: its losses by name, its gradients, and the number of its tokens."""

    losses: dict[str, float]
    gradients: tuple[Tensor | None, ...]
    tokens: int


class Trainer:
    """The state of a run.

    Attributes:
        model, average: the trained model, and the moving average of its weights, which is scored and exported.
        curriculum, standing: the bounds of the next draws, and the state of the run.
    """

    def __init__(self, config: Mapping[str, Any], settings: Settings) -> None:
        """`config` as in config.json.

        Raises:
            ValueError: `FRESH_TASKS` for a model of uniform noise, or for one that sees blocks.
        """
        self.settings = settings
        self.model = new_model(config, settings.seed)
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.curriculum, self.standing = Curriculum(), Standing()
        if settings.fresh_tokens and (self.model.shape.block_causal or self.model.shape.noise != "mask"):
            raise ValueError("fresh_tokens: models that see the whole canvas under masks alone learn FRESH_TASKS")
        width, vocab = self.model.shape.width, self.model.shape.vocab_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self._probes = nn.ModuleDict(
                {"short": nn.Linear(width, CHAIN_FACTS * vocab), "lookup": nn.Linear(width, LOOKUP_FACTS * vocab)}
            )
            if settings.fresh_tokens:
                self._probes["fresh"] = nn.Linear(width, 1)
        self._short = ShortBatches(settings.seed, settings.short_tokens)
        self._process = process_of(self.model.shape)
        self._optimizers = optimizers(self.model, self._probes)
        self._parameters = [*self.model.parameters(), *self._probes.parameters()]

    def start_from(self, model: DiffusionModel) -> None:
        """Go on from the weights of a model that has learned answers of one block. Its family may be another one that
        shares weights with this one."""
        learned = replace(self.curriculum, list_high=LIST_BOUNDS[1], lookup_high=float(TASKS["lookup"].sizes[1]))
        known = lookup_batch(self.settings.seed, -1, learned, self.settings.lookup_tokens).ids
        for own in (self.model, self.average):
            adopt(own, model, known)
        self.curriculum = learned

    def step(self, pool: ThreadPoolExecutor) -> None:
        """One update from one batch of each stream, each in a thread of its own.

        One batch a core is a third faster than two cores on one batch, because the matrices are small.
        """
        began, standing = time.perf_counter(), self.standing
        learned = standing.losses.get("lookup", math.inf) < LOOKUP_LEARNED[self.model.shape.noise]
        self.curriculum = self.curriculum.advanced(standing.step, self.settings.grow, learned)
        fresh = [fresh_task(self.settings.seed, standing.step, self.curriculum)] if self.settings.fresh_tokens else []
        # Answers of one block are rehearsed at every other step, once there are longer ones. Beside fresh tasks a step
        # rehearses one stream, lookups more often than others: they are the first to be forgotten.
        streams = ["long" if self.curriculum.stretch and standing.step % 2 else "short", "lookup"]
        if fresh:
            streams = [("lookup", "short", "lookup", "long")[standing.step % 4], *fresh]
        for part in pool.map(self._part, streams):
            standing.tokens += part.tokens
            for name, loss in part.losses.items():
                standing.losses[name] = LOSS_DECAY * standing.losses.get(name, loss) + (1 - LOSS_DECAY) * loss
            for parameter, gradient in zip(self._parameters, part.gradients, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        for task in fresh:
            self.curriculum = self.curriculum.with_fresh(task, standing.losses[task])
        set_rate(self._optimizers, standing.step, self.settings.steps, self.settings.rate / 100)
        for optimizer in self._optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        standing.step += 1
        with torch.no_grad():
            share = 1 - min(AVERAGE_DECAY, (1 + standing.step) / (10 + standing.step))
            for mean, latest in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(latest, share)
        standing.seconds += time.perf_counter() - began

    def _part(self, stream: str) -> Part:
        step, seed, settings = self.standing.step, self.settings.seed, self.settings
        if stream == "short":
            batch = self._short.next(self.curriculum)
        elif stream == "long":
            batch = long_batch(seed, step, self.curriculum, settings.short_tokens)
        elif stream in FRESH_TASKS:
            batch = fresh_batch(stream, seed, step, self.curriculum, settings.fresh_tokens)
        else:
            reach = max(REACH, self.model.shape.max_context)
            batch = lookup_batch(seed, step, self.curriculum, settings.lookup_tokens, reach)
        noise = random.Random(f"mask/{stream}/{seed}/{step}").getrandbits(63)
        losses = self.losses(stream, batch, torch.Generator().manual_seed(noise))
        total = losses[stream] + AUXILIARY_WEIGHT * sum(loss for name, loss in losses.items() if name != stream)
        gradients = torch.autograd.grad(total, self._parameters, allow_unused=True)
        return Part(
            losses={name: loss.item() for name, loss in losses.items()}, gradients=gradients, tokens=batch.ids.numel()
        )

    def losses(self, stream: str, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        """Losses of a batch under noise from `generator`: that of its tokens under the stream's name, then others."""
        if stream in FRESH_TASKS:
            noised, rest = mask_as_decoded(batch, generator)
        else:
            noised, rest = self._process(batch, generator), None
        first = int(batch.prompt.min())
        wanted = {"first": first, "tap_layer": POINTER_LAYER}
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(self.settings.bfloat16)):
            if self.model.shape.block_causal:
                hidden, tap = forward_in_blocks(self.model, batch.ids, noised.ids, batch.positions, **wanted)
            else:
                hidden, tap = forward(self.model, noised.ids, batch.positions, clean=noised.clean, **wanted)
        losses = {stream: token_loss(self.model, hidden, batch.ids[:, first:], noised.weight[:, first:])}
        if rest is not None:
            probe = self._probes["fresh"]
            assert isinstance(probe, nn.Linear)
            losses[f"rest {stream}"] = token_loss(self.model, hidden, batch.ids[:, first:], rest[:, first:])
            losses |= fresh_losses(stream, batch, noised, probe, tap)
            if self.standing.losses.get(stream, math.inf) < FRESH_LEARNED:
                # Lookups find their digits with the same heads; a learned task needs no pointer.
                del losses[f"point {stream}"]
        elif bool(noised.asked.any()):
            auxiliary = pointer_losses if stream == "lookup" else operand_losses
            probe = self._probes["lookup" if stream == "lookup" else "short"]
            assert isinstance(probe, nn.Linear)
            losses |= auxiliary(batch, noised, probe, tap)
        return losses

    def follow(self, scores: Mapping[str, float]) -> None:
        """Let the curriculum follow a validation (exact match by task)."""
        self.standing.scores = dict(scores)
        self.curriculum = self.curriculum.following(scores)

    def save(self, path: Path) -> None:
        """Write everything that the next step depends on."""
        tensors = prefixed("model", self.model.state_dict()) | prefixed("average", self.average.state_dict())
        tensors |= prefixed("probes", self._probes.state_dict())
        for name, optimizer in self._optimizers.items():
            tensors |= prefixed(f"optimizer.{name}", optimizer_tensors(optimizer))
        values = {"curriculum": asdict(self.curriculum), "standing": asdict(self.standing)}
        save_checkpoint(path, tensors, values | {"short": self._short.state()})

    def restore(self, path: Path) -> None:
        """The inverse of `save`; the settings are the caller's."""
        tensors, values = load_checkpoint(path)
        self.model.load_state_dict(under("model", tensors))
        self.average.load_state_dict(under("average", tensors))
        self._probes.load_state_dict(under("probes", tensors))
        for name, optimizer in self._optimizers.items():
            restore_optimizer(optimizer, under(f"optimizer.{name}", tensors))
        self.curriculum, self.standing = Curriculum(**values["curriculum"]), Standing(**values["standing"])
        self._short.restore(values["short"])
