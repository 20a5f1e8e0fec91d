"""Predicts the memory of activations, and chooses blocks to recompute so that they fit (`--activation-memory`).

Forward passes on tensors without contents (`volo.memory.fake_step`), one for each level of recomputation, give a fixed
part and a part per image. Predictions are for eager mode; torch.compile keeps less.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from tlt.models.recompute import EVERYTHING, LEVELS, NOTHING, POINTWISE
from tlt.models.token_labeling import TokenLabelModel
from volo.memory.fake_step import Mark, StepShape, forward_marks

# The most gradients that the backward pass of a block holds at once, in units of its output: those of the output and of
# the MLP's hidden layer, which is three to four times as wide.
_IN_FLIGHT = 4
_BATCHES = 16, 32  # batch sizes from which the two terms are computed; all cost the same
MOST_IMAGES = 1 << 16  # the largest batch that is considered


@dataclass(frozen=True)
class BatchBytes:
    """Bytes that grow with the batch."""

    fixed: float
    per_image: float

    def at(self, batch: int) -> float:
        """Bytes for `batch` images."""
        return self.fixed + self.per_image * batch


@dataclass(frozen=True)
class BlockMemory:
    """Memory and operations of one block.

    Attributes:
        kept: Bytes that the block keeps, by level of recomputation.
        flops: Operations per image that are repeated, by level.
    """

    name: str
    kept: dict[str, BatchBytes]
    flops: dict[str, float]


@dataclass(frozen=True)
class Activations:
    """The memory that a step keeps for its backward pass.

    Attributes:
        blocks: In the order in which they run; empty for models that can't recompute single blocks.
        between: Memory kept before the first block, between blocks, and after the last one up to the loss.
    """

    blocks: tuple[BlockMemory, ...]
    between: tuple[BatchBytes, ...]

    def peak(self, batch: int, levels: Sequence[str]) -> float:
        """Return the peak in bytes: at the end of the forward pass, or in the backward pass of a recomputed block.

        In the latter the blocks behind it have been released, those before it have not.

        Args:
            batch: Number of images.
            levels: Level of recomputation of each block.
        """
        held = highest = 0.0
        for block, before, level in zip(self.blocks, self.between, levels, strict=False):
            held += before.at(batch)
            kept = block.kept[level].at(batch)
            gradients = _IN_FLIGHT * block.kept[EVERYTHING].per_image * batch
            highest = max(highest, held + max(kept, block.kept[NOTHING].at(batch)) + gradients)
            held += kept
        return max(highest, held + self.between[-1].at(batch))

    def per_image(self, levels: Sequence[str]) -> float:
        """Return the bytes that one more image takes in a large batch."""
        return (self.peak(MOST_IMAGES, levels) - self.peak(MOST_IMAGES // 2, levels)) / (MOST_IMAGES // 2)

    def largest_batch(self, budget: float, levels: Sequence[str]) -> int:
        """Return the number of images whose activations fit into `budget` bytes; 0 if none fit."""
        return bisect.bisect_right(range(1, MOST_IMAGES + 1), budget, key=lambda batch: self.peak(batch, levels))

    def everywhere(self, level: str) -> list[str]:
        """Return the same level for each block."""
        return [level] * len(self.blocks)

    def fit(self, batch: int, budget: float, choice: Sequence[str] = LEVELS) -> list[str]:
        """Return levels with which the activations fit; first those that free the most bytes per repeated operation.

        Of equal blocks the first is chosen first: when it is recomputed, those behind it have been released. If nothing
        fits, everything is recomputed.

        Args:
            choice: The allowed levels, from the most memory to the least.
        """
        levels = self.everywhere(NOTHING)
        for index, level in self._candidates(choice):
            if self.peak(batch, levels) <= budget:
                break
            levels[index] = max(level, levels[index], key=choice.index)
        return self._given_back(levels, batch, budget, choice)

    def _given_back(self, levels: list[str], batch: int, budget: float, choice: Sequence[str]) -> list[str]:
        """Undo recomputation where memory is left, first in the blocks that repeat the most operations."""
        for index in sorted(range(len(levels)), key=lambda i: -self.blocks[i].flops[levels[i]]):
            for less in choice[: choice.index(levels[index])]:
                tried = [*levels[:index], less, *levels[index + 1 :]]
                if self.peak(batch, tried) <= budget:
                    levels = tried
                    break
        return levels

    def repeated(self, levels: Sequence[str]) -> float:
        """Return the repeated operations as a share of those of all blocks in a forward and a backward pass."""
        anew = sum(block.flops[level] for block, level in zip(self.blocks, levels, strict=True))
        return anew / max(3 * sum(block.flops[EVERYTHING] for block in self.blocks), 1)

    def _candidates(self, choice: Sequence[str]) -> list[tuple[int, str]]:
        """(block, level), sorted by the operations done twice per byte freed, compared with the level before."""
        prices = {}
        for index, block in enumerate(self.blocks):
            for before, level in itertools.pairwise(choice):
                freed = block.kept[before].per_image - block.kept[level].per_image
                if freed > 0:
                    prices[index, level] = (block.flops[level] - block.flops[before]) / freed
        return sorted(prices, key=prices.__getitem__)


def activations_of(model: nn.Module, shape: StepShape) -> Activations:
    """Predict the memory that a training step keeps; the model must be in the mode in which it is trained.

    Raises:
        NotImplementedError, RuntimeError: The model depends on values of tensors; VOLO and LV-ViT don't.
    """
    if not isinstance(model, TokenLabelModel):
        ends = [_marks(model, shape, batch)[-1].held for batch in _BATCHES]
        return Activations((), (_size(*ends),))
    names = [name for name, _ in model.named_blocks()]
    chosen, checkpointing, marks = model.recompute, model.grad_checkpointing, {}
    try:
        for level in reversed(LEVELS):
            model.set_recompute(dict.fromkeys(names, level))
            marks[level] = _marks(model, shape, _BATCHES[-1])
        fewer = _marks(model, shape, _BATCHES[0])
    finally:
        model.set_recompute({} if checkpointing else chosen)
        model.set_grad_checkpointing(checkpointing)
    return _assemble(names, marks, fewer)


def _marks(model: nn.Module, shape: StepShape, batch: int) -> list[Mark]:
    blocks = [block for _, block in model.named_blocks()] if isinstance(model, TokenLabelModel) else []
    return forward_marks(model, shape, batch, blocks)


def _assemble(names: list[str], marks: dict[str, list[Mark]], fewer: list[Mark]) -> Activations:
    """Combine marks, which are at the beginning and the end of block 0, of block 1, ..., and at the end."""
    grown = [_size(*pair) for pair in zip(_growth(fewer), _growth(marks[NOTHING]), strict=True)]
    growths = {level: _growth(each) for level, each in marks.items()}
    blocks = []
    for index, name in enumerate(names):
        first, last = marks[NOTHING][2 * index : 2 * index + 2]
        # The part that does not grow with the batch is the weights in the type of autocast, equal at all levels.
        fixed = grown[2 * index + 1].fixed
        kept = {level: BatchBytes(fixed, (growths[level][2 * index + 1] - fixed) / _BATCHES[-1]) for level in LEVELS}
        rest = (last.rest - first.rest) / _BATCHES[-1]
        products = (last.products - first.products) / _BATCHES[-1]
        blocks.append(BlockMemory(name, kept, {NOTHING: 0.0, POINTWISE: rest, EVERYTHING: products + rest}))
    return Activations(tuple(blocks), tuple(grown[::2]))


def _growth(marks: list[Mark]) -> list[int]:
    """Return the bytes added between marks."""
    held = [0, *(mark.held for mark in marks)]
    return [after - before for before, after in itertools.pairwise(held)]


def _size(fewer: float, more: float) -> BatchBytes:
    per_image = (more - fewer) / (_BATCHES[1] - _BATCHES[0])
    return BatchBytes(fewer - per_image * _BATCHES[0], per_image)
