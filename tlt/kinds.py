"""The kinds of teachers: what each gives, what its student compares with it, and how far apart the two are.

To add one: its class here, and its row in `KINDS`. Flags are checked with these before torch is imported, so methods
import what they compute with.

Shapes: B images, N tokens, C channels or classes; h x w is the grid of a network's last map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from tlt.errors import in_range, one_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tlt.mixtoken import Box

DENSE_LOSSES = ("cosine", "smooth-l1", "gram")


class Forward(NamedTuple):
    """A forward pass of a network: its `forward_features` of images (H, W), and what came of them."""

    model: Any
    size: tuple[int, int]
    features: Any
    outputs: Any = None
    mix_box: Box | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of teacher, with the settings of `tlt.DistillLoss`; what a kind does not change is that of `Features`.

    Attributes:
        of_classes: Whether the teacher gives logits, which train the student's heads and need no projector.
        of_places: Whether each token of the student learns what the teacher says of its place.
    """

    dense_loss: str = "cosine"
    temperature: float = 4.0
    of_classes: ClassVar[bool] = False
    of_places: ClassVar[bool] = False

    @property
    def projected(self) -> bool:
        """Whether a projector brings the student's features to the teacher's channels, whose size is normalised."""
        return not self.of_classes

    @classmethod
    def of_teacher(cls, model: Any, images: Tensor) -> Tensor:
        """Return what a teacher gives for images (B, channels, H, W)."""
        size = images.shape[-2], images.shape[-1]
        return cls.of_pass(Forward(model, size, model.forward_features(images)))

    @staticmethod
    def of_pass(forward: Forward) -> Tensor:
        """Return what is compared: (B, C), or un-mixed tokens (B, N, C)."""
        return cast("Tensor", forward.model.forward_head(forward.features, pre_logits=True))

    def projector(self, width: int, channels: int) -> nn.Sequential:
        """Return the layers from the student's features to the teacher's channels; none if there is no projector."""
        from torch import nn

        return nn.Sequential(*((nn.LayerNorm(width), nn.Linear(width, channels)) if self.projected else ()))

    def distances(self, student: Tensor, target: Tensor, weight: Tensor, mixed: float | Tensor) -> Tensor:
        """Return the terms (B,) whose mean is the loss. The partner's vector has the share `mixed`."""
        own_image, partner = (self.distance(student, image) for image in (target, target.flip(0)))
        return own_image * (1 - mixed) * weight + partner * mixed * weight.flip(0)

    def distance(self, student: Tensor, target: Tensor) -> Tensor:
        """Return the distance (B,) of vectors (B, C)."""
        return (student - target).square().mean(-1)


class Features(Kind):
    """One vector per image, the features after pooling; the mean squared error."""


class Logits(Kind):
    """The logits of the same classes; the Kullback-Leibler divergence at a temperature."""

    of_classes = True

    @classmethod
    def of_teacher(cls, model: Any, images: Tensor) -> Tensor:
        return cast("Tensor", model(images))

    @staticmethod
    def of_pass(forward: Forward) -> Tensor:
        outputs = forward.outputs
        return cast("Tensor", outputs[0] if isinstance(outputs, tuple) else outputs)

    def distance(self, student: Tensor, target: Tensor) -> Tensor:
        own, wanted = ((logits / self.temperature).log_softmax(-1) for logits in (student, target))
        return (wanted.exp() * (wanted - own)).sum(-1) * self.temperature**2


class Tokens(Kind):
    """The last map, of which each token learns its place; cosine, smooth L1, or "gram" of all pairs of tokens."""

    of_places = True

    @property
    def projected(self) -> bool:
        return self.dense_loss != "gram"  # which compares tokens of any width

    @staticmethod
    def of_pass(forward: Forward) -> Tensor:
        from tlt.mixtoken import mix_tokens
        from tlt.models.spatial import feature_map

        tokens = feature_map(forward.model, forward.features, forward.size)  # (B, h, w, C)
        if forward.mix_box is not None:
            tokens = mix_tokens(tokens, forward.mix_box)  # mixing twice changes nothing
        return tokens.flatten(1, 2)

    def distances(self, student: Tensor, target: Tensor, weight: Tensor, mixed: float | Tensor) -> Tensor:
        """Return the terms (B, N), or (B, N, N) for pairs of tokens, by how much of each both networks see."""
        import torch.nn.functional as F

        if self.dense_loss == "cosine":
            return (1 - F.cosine_similarity(student, target, dim=-1)) * weight
        if self.dense_loss == "smooth-l1":
            return F.smooth_l1_loss(student, target, reduction="none").mean(-1) * weight
        cosines, wanted = (unit @ unit.mT for unit in (F.normalize(student, dim=-1), F.normalize(target, dim=-1)))
        return (cosines - wanted).square() * weight[:, :, None] * weight[:, None, :]


KINDS: dict[str, type[Kind]] = {"logit": Logits, "feature": Features, "token": Tokens}


def kind_of(name: str, dense_loss: str = "cosine", temperature: float = 4.0) -> Kind:
    """Return the kind of this name with its settings. Raise UserError if there is none, or a setting is wrong."""
    one_of("kind", name, [*reversed(KINDS)])
    one_of("dense_loss", dense_loss, DENSE_LOSSES)
    in_range("temperature", temperature, 1e-6)
    return KINDS[name](dense_loss, temperature)
