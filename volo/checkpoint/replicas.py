"""Compares the copies of the model that the ranks hold, by checksums of their bits, and names a rank that differs.

All ranks start from the same weights and apply the same gradients, so their copies are equal bit for bit. A copy that
differs has been computed or stored wrong: saving it, or going on, would spoil the run. With `--audit N` the ranks also
keep a checksum of each update, so that the first update that differs is known, and a copy of the state from which they
agreed last: `volo.train.loop.named` does what came after it once more if the copies are too few for a majority.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tlt.errors import UserError
from tlt.io.weights import EMA_KEYS
from volo.checkpoint.state import MOMENTS, TrainState
from volo.cluster.distributed import World, from_all
from volo.cluster.shard import local
from volo.cluster.topology import listed
from volo.config.settings_train import Distributed

_LARGE = 1 << 26  # bytes of small tensors that a GPU sums at once
_BLOCK = 1024  # numbers of 8 bytes in each sum
_FADING = "exp_avg", "momentum_buffer"  # moments that forget a change within a few updates


class WrongRank(UserError):
    """A rank computes or stores wrong. The last saved checkpoint is not affected.

    Attributes:
        ranks: The ranks that may be wrong.
        nodes: The machines of these ranks.
        doubt: Whether it can't be told which of `ranks` is wrong.
        row: Number of the first checksum since the last agreement that differs, of those in `Replicas.log` or beyond.
        values: This checksum of each rank; none if the ranks differ in something else.
    """

    exit_code = 7

    def __init__(
        self, what: str, ranks: Sequence[int], doubt: bool = False, row: int = 0, values: Sequence[Hashable] = ()
    ) -> None:
        self.what = what
        self.ranks = ranks
        self.doubt = doubt
        self.row = row
        self.values = values
        names = from_all(os.environ.get("SLURMD_NODENAME") or socket.gethostname())
        self.nodes = list(dict.fromkeys(names[rank] for rank in ranks))
        who = f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} on {', '.join(self.nodes)}"
        unknown = " (it is one of them, but these are too few to tell which)" if doubt else ""
        super().__init__(
            f"{who} computed or stored {what} wrong{unknown}: nothing is saved, and the last checkpoint is good; "
            "--resume auto goes on from it, best on other machines"
        )


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """Return (2,) int64, on their device, of the bits of these tensors: the sum of the numbers that 8 bytes each make,
    and a sum that depends on their places. Any changed bit changes both."""
    sums = []
    group = list[Tensor]()
    for value in tensors:
        flat = local(value).flatten()
        bits = (flat.clone() if flat.data_ptr() % 8 else flat).view(torch.uint8)
        if not bits.is_cuda:
            whole = len(bits) // 8 * 8
            sums.append(bits[:whole].view(torch.int64).sum())
            sums += [bits[whole:].sum()] if whole < len(bits) else []
            continue
        group.append(bits)
        if sum(map(len, group)) >= _LARGE:
            sums.append(_of_blocks(group))
            group = []
    sums += [_of_blocks(group)] if group else []
    each = torch.cat([part.to(sums[0].device).view(-1) for part in sums])
    return torch.stack([each.sum(), (each * torch.arange(1, 2 * len(each), 2, device=each.device)).sum()])


def _of_blocks(group: list[Tensor]) -> Tensor:
    """Return the sums of blocks of these bytes. A GPU launches few kernels for many tensors."""
    filled = group[0].new_zeros(-sum(map(len, group)) % (8 * _BLOCK))
    return torch.cat([*group, filled]).view(torch.int64).view(-1, _BLOCK).sum(1)


def differing(values: Sequence[Hashable]) -> list[int]:
    """Return the places of the values that differ from the most frequent one; all if two are equally frequent."""
    (value, most), *others = Counter(values).most_common(2)
    clear = not others or others[0][1] < most
    return [place for place, other in enumerate(values) if not clear or other != value]


class StateCopy(NamedTuple):
    """A copy of the state: its position, its tensors by name, in host memory, and what the loss scaler has."""

    epoch: int
    update: int
    tensors: dict[str, Tensor]
    scale: dict[str, Any] | None


class Replicas:
    """The copies of the state that ranks hold, of which this rank has one or a part of one.

    Attributes:
        stride: Ranks that hold one copy together; each rank compares its part with those `stride` ranks further on.
        every: `--audit`, the most updates between two agreements; 0 keeps no checksums of updates.
    """

    def __init__(self, state: TrainState, flags: Distributed, world: World) -> None:
        stride = flags.shard * flags.tensor_parallel
        every = flags.audit
        if every and world.size == stride:
            raise UserError(f"--audit {every}: no two ranks hold the same weights, so none are compared; leave it out")
        self.state = state
        self.stride = stride
        self.size = world.size
        self.every = every
        # Two checksums of each update since the last agreement, and their number.
        self.log = torch.zeros(2 * every, 2, dtype=torch.int64, device=world.device)
        self.noted = torch.zeros(1, dtype=torch.int64, device=world.device)
        self._agreed: StateCopy | None = None

    def note(self, gradients: bool = False) -> None:
        """Record half an update for `--audit`: the weights and first moments that it begins with, when its gradients
        are averaged; after the optimizer's step these `gradients`. This waits for nothing.

        Wrong weights spoil the gradients of all ranks, so each half has a checksum of its own. What changes in second
        moments and averages reaches the weights, or is still there at the next agreement.
        """
        if self.every:
            weights = list(self.state.model.parameters())
            states = self.state.optimizer.state.values()
            moments = [state[name] for state in states for name in _FADING if name in state]
            averaged = [weight.grad for weight in weights if weight.grad is not None]
            self.log.index_copy_(0, self.noted, checksum(averaged if gradients else weights + moments)[None])
            self.noted.add_(1)

    def row(self, number: int) -> list[int]:
        """Return a checksum of the log; beyond its end, that of the state as it is now."""
        row = self.log[number] if number < int(self.noted) else checksum(self._shared()[0])
        return [int(part) for part in row]

    def compare(self) -> None:
        """Raise WrongRank on all ranks if a copy differs. The hosts wait for the devices: for saves and audits only."""
        if self.size == self.stride:
            return
        noted = int(self.noted)
        rows = torch.cat([self.log[:noted], *(checksum(part)[None] for part in self._shared())]).cpu()
        digest = checksum([rows])
        digests = [torch.empty_like(digest) for _ in range(self.size)]
        dist.all_gather(digests, digest)
        if all(torch.equal(digests[rank], digests[rank % self.stride]) for rank in range(self.size)):
            return
        of_ranks = from_all(rows.tolist())
        for number in range(len(rows)):
            values = [tuple(of_rank[number]) for of_rank in of_ranks]
            for ranks in (range(first, self.size, self.stride) for first in range(self.stride)):
                if places := differing([values[rank] for rank in ranks]):
                    update = min(self.state.update, self.state.update - noted // 2 + number // 2 + 1)
                    what = f"the gradients, weights, moments or averages of update {update}"
                    doubt = len(places) == len(ranks)
                    raise WrongRank(what, [ranks[place] for place in places], doubt, number, values)

    def _shared(self) -> list[list[Tensor]]:
        """Return what all copies have alike: all but BatchNorm's statistics, and between two epochs these."""
        parts: list[list[Tensor]] = [[], []]
        on_host = self.state.ema is not None and self.state.ema.device is not None
        for name, value in self.state.tensors().items():
            of_batches = "running_" in name
            if not (of_batches and on_host and name.startswith(EMA_KEYS[0])):  # which nobody validates or averages
                parts[of_batches].append(value)
        return parts[:1] if self.state.within_epoch or not parts[1] else parts

    def agree(self) -> None:
        """Compare, and keep a copy of the state from which all go on, if `--audit` may need it. Raises WrongRank."""
        self.compare()
        if self.every:
            self.noted.zero_()
            self._agreed = self.copied()

    def copied(self) -> StateCopy:
        """Return a copy of the state in host memory."""
        scale = None if self.state.scaler is None else self.state.scaler.state_dict()
        tensors = {name: value.to("cpu", copy=True) for name, value in self.state.tensors().items()}
        return StateCopy(self.state.epoch, self.state.update, tensors, scale)

    def put(self, copied: StateCopy | None = None) -> None:
        """Set the state to a copy, or to that of the last agreement. Moments that it lacks are begun anew."""
        copied = copied or self._agreed
        assert copied is not None
        if not any(name.startswith(MOMENTS) for name in copied.tensors):
            self.state.optimizer.state.clear()
        for name, value in self.state.tensors().items():
            value.copy_(copied.tensors[name])
        if self.state.scaler is not None and copied.scale:
            self.state.scaler.load_state_dict(copied.scale)
        self.state.epoch = copied.epoch
        self.state.update = copied.update
        self.noted.zero_()
