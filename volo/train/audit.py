"""`--audit N`: every N updates each rank computes another rank's micro-batch again, and names a rank that is wrong.

All that a step computes follows from its batch and its `StepKey`, so any rank can compute any other's micro-batch: the
loss and the gradients before they are averaged. Where all ranks compute alike (CPUs of one kind, or deterministic
algorithms) these are equal bit for bit, elsewhere within a tolerance. If two differ, all ranks compute the same batches
in turns, and what most of them get is right.

A copy of the state that differs needs no second opinion where three ranks hold one. Two do the updates since they
agreed last once more: a fault that comes from chance does not come again, and the first update that one of them gets
otherwise than before names it.
"""

from __future__ import annotations

import math
import statistics
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.api import StepKey
from tlt.data.batch import Batch
from volo.checkpoint.replicas import WrongRank, checksum, differing
from volo.cluster.distributed import from_all
from volo.cluster.shard import is_sharded, local, synchronised, whole_weights
from volo.train.compilation import begin_step
from volo.train.criterion import step_loss
from volo.train.run import Run, Training
from volo.train.step import Step

_TURNS = 5  # ranks that compute a batch on which two do not agree
# Relative differences of losses and norms of gradients where algorithms are not deterministic.
_TOLERANCES = 5e-3, 0.05


class Outcome(NamedTuple):
    """What a micro-batch gives: the loss, the 2-norm of the gradients, and the checksum of the bits of all."""

    loss: float
    norm: float
    first: int
    second: int


class Audit:
    """Compares what this rank and others compute in every N-th update. Without `--audit` nothing happens.

    Attributes:
        again: The argument of that name of `Loader.epoch`.
        exact: Whether all ranks compute alike, bit for bit.
    """

    def __init__(self, run: Run, training: Training, step: Step) -> None:
        self._run = run
        self._training = training
        self._step = step
        self._replicas = training.replicas
        self._theirs: Outcome | None = None
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self._watching = list[torch.utils.hooks.RemovableHandle]()
        every = run.settings.distributed.audit
        self.again = (self._data_rank(1), every) if every else None
        if not every:
            return
        with whole_weights(step.forward_model):  # gradients flow to the whole weights, not to this rank's parts
            self._weights = [p for p in step.forward_model.parameters() if p.requires_grad]
        device = run.world.device.type
        kind = torch.backends.cpu.get_cpu_capability() if device == "cpu" else torch.cuda.get_device_name()
        alike = len(set(map(tuple, from_all([kind, torch.get_num_threads()])))) == 1
        # SyncBatchNorm sums in the order of the ranks: with more than two, another order rounds otherwise.
        in_order = not run.settings.norms.sync_bn or run.world.data_size == 2
        deterministic = device == "cpu" or torch.are_deterministic_algorithms_enabled()
        self.exact = alike and in_order and deterministic

    def begin(self, batch: Batch) -> None:
        """Agree on the state, compute the last micro-batch of another rank's update, and watch the gradients of this
        rank's. Raises WrongRank."""
        self._replicas.agree()
        self._step.release_memory()  # of graphs, which this work is not part of
        self._theirs = self._computed(batch, 1)
        self._watch()

    def end(self, loss: Tensor) -> None:
        """Compare the update that has begun with `begin`, whose last micro-batch has this loss. Raises WrongRank."""
        if self._theirs is None:
            return
        outcomes = [(0, self._outcome(loss)), (1, self._theirs)]
        self._theirs = None
        update = self._training.state.update
        if not self._suspects(outcomes, self.exact):
            return
        after = self._replicas.copied()
        self._replicas.put()
        self._step.precision.begin(self._step.forward_model)
        for turn in range(min(_TURNS, self._replicas.size // self._replicas.stride)):
            batch = next(self._training.batches((self._data_rank(turn), 1)))
            outcomes.append((turn, self._computed(batch, turn)))
        wrong = self._suspects(outcomes, self.exact, vote=True) or self._suspects(outcomes, exact=False)
        if wrong:
            raise WrongRank(f"the loss or the gradients of update {update}", wrong, doubt=len(wrong) > 1)
        self.exact = False
        self._run.logger.line("--audit: ranks round in other ways, and from here on are compared within a tolerance")
        self._replicas.put(after)
        self._step.precision.begin(self._step.forward_model)
        self._replicas.agree()

    def _data_rank(self, turn: int) -> int:
        world = self._run.world
        return (world.rank + turn * self._replicas.stride) % world.size // world.tensor_parallel

    def _computed(self, batch: Batch, turn: int) -> Outcome:
        """Return what a batch gives; it is the last micro-batch of the rank that is `turn` copies further on."""
        step, state = self._step, self._training.state
        key = StepKey(self._run.settings.run.seed, state.update, batch.key.again - 1, self._data_rank(turn))
        key.seed_torch()
        begin_step()
        drawn = step.criterion.draw(batch, key)
        self._watch()
        # FSDP2 would keep gradients that it doesn't reduce.
        with synchronised(step.forward_model, is_sharded(step.forward_model)):
            with step.precision.autocast():
                loss = step_loss(step.criterion, step.teachers, step.forward_model, batch, drawn)
            step.precision.backward(loss.total * (batch.size / batch.key.update_samples))
        outcome = self._outcome(loss.total)
        step.precision.forget(step.state.optimizer)
        return outcome

    def _watch(self) -> None:
        """Look at the gradients of each backward pass, before they are added up and averaged, until `_outcome`."""
        self._step.watched = True
        self._watching = [p.register_hook(partial(self._look, number)) for number, p in enumerate(self._weights)]

    def _look(self, number: int, gradient: Tensor | None) -> None:
        if gradient is not None:  # what does not reach the loss gets none from DistributedDataParallel
            values = local(gradient)
            self._seen[number] = torch.linalg.vector_norm(values, dtype=torch.float64), checksum([values])

    def _outcome(self, loss: Tensor) -> Outcome:
        """Return the loss and what was seen of the gradients of the last backward pass. Waits for the device."""
        for hook in self._watching:
            hook.remove()
        self._step.watched = False
        norms, sums = zip(*(self._seen[number] for number in sorted(self._seen)), strict=True)
        self._seen.clear()
        first, second = checksum([local(loss), *sums]).tolist()
        return Outcome(float(loss.detach()), float(torch.stack(norms).norm()), first, second)

    def _suspects(self, outcomes: list[tuple[int, Outcome]], exact: bool, vote: bool = False) -> list[int]:
        """Return the ranks whose outcomes differ from those of others, of the same batches. In a `vote` only those are
        wrong that differ from the most frequent one."""
        replicas = self._replicas
        by_batch: dict[int, list[tuple[int, Outcome]]] = {}
        for rank, of_rank in enumerate(from_all(outcomes)):
            for turn, outcome in of_rank:
                batch = (rank + turn * replicas.stride) % replicas.size
                by_batch.setdefault(batch, []).append((rank, Outcome(*outcome)))
        wrong = set[int]()
        for pairs in by_batch.values():
            ranks = [rank for rank, _ in pairs]
            if exact:
                places = differing([outcome[2:] for _, outcome in pairs])
                wrong |= {ranks[place] for place in places if not vote or len(places) < len(pairs)}
                continue
            for number, tolerance in enumerate(_TOLERANCES):
                values = [outcome[number] for _, outcome in pairs]
                middle = statistics.median(values)
                far = [not abs(value - middle) <= tolerance * abs(middle) for value in values]
                finite = any(map(math.isfinite, values))
                wrong |= {rank for rank, is_far in zip(ranks, far, strict=True) if is_far and finite}
        return sorted(wrong)
