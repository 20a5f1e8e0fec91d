"""Distillation: a student learns the features of frozen teachers; each of its tokens learns those of its place.

The student's layers say which part of its image a token sees, the plan of the augmentation says where that part lies in
the file, and the teacher's view and layers say where it lies on the teacher's last map. So a teacher may see another
image size, another crop or the whole image. A token's target is the mean of n x n linearly interpolated samples of that
map, extrapolated linearly at its border. A point does not count if the student or the teacher does not see it: it lies
outside the crop, is fill, or was dropped at an edge.

Shapes: B images, N tokens of the student, T = h * w cells of the teacher's map, C channels of the teacher.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tlt.data.batch import Batch
from tlt.errors import UserError, in_range, size_of
from tlt.kinds import KINDS, Forward, Kind, kind_of
from tlt.label_map import FULL_AREA, Area
from tlt.mixtoken import Box
from tlt.models.extension import Extension, extend
from tlt.models.spatial import Size
from tlt.models.wrap import TOKEN_LABEL_MODELS, bare, check_interface
from tlt.targets import TokenPlaces, linear_weights, points_per_token, token_points
from tlt.teacher import Teacher, TeacherScale, View, token_map, width_of


def _numbered(name: str, number: int) -> str:
    """Return the name of a student's attribute for a teacher; the first teacher's has no number."""
    return name if number == 0 else f"{name}_{number + 1}"


def _for_each(name: str, value: Any, count: int) -> list[Any]:
    """Return a list with one value per teacher, from such a list or from one value for all."""
    values = list(value) if isinstance(value, list | tuple) else [value] * count
    if len(values) != count or not values:
        raise UserError(f"{name}: {len(values)} values for {count} teachers: give one for all, or one for each")
    return values


class Student(Extension):
    """The class that `with_projector` gives a model. With `taught=True` it also returns what is compared with the
    teacher: un-mixed tokens (B, N, C), pooled features (B, C), or logits; for a list of teachers, a list of these."""

    kd_kinds: list[str]
    kd_listed: bool  # several teachers, or a list of one

    def forward(
        self, x: Tensor, taught: bool = False, dense: bool = False, mix_box: Box | None = None, **options: Any
    ) -> Any:
        """Return the model's own result; with `taught` a pair of it and the features.

        Raises:
            UserError: `dense` or `mix_box` is given, and the model has no dense head; or `taught` with other options.
        """
        two_heads = isinstance(self, TOKEN_LABEL_MODELS)
        if (dense or mix_box is not None) and not two_heads:
            raise UserError(
                "dense=True and mix_box need the dense head: call tlt.with_dense_head(model, img_size) first"
            )
        if not taught:
            options |= {"dense": dense, "mix_box": mix_box} if two_heads else {}
            return super().forward(x, **options)
        if options:
            raise UserError(f"{', '.join(options)}: not together with taught=True")
        model = cast(Any, self)
        size = (x.shape[-2], x.shape[-1])
        if two_heads:
            features = model.mixed_features(x, mix_box)
            outputs = model.apply_heads(features, size, dense, mix_box)
        else:
            features = model.forward_features(x)
            outputs = model.forward_head(features)
        forward = Forward(model, size, features, outputs, mix_box)
        features_of = {name: kind.of_pass(forward) for name, kind in KINDS.items() if name in self.kd_kinds}
        projectors = (getattr(self, _numbered("kd_projector", n)) for n in range(len(self.kd_kinds)))
        compared = [project(features_of[name]) for project, name in zip(projectors, self.kd_kinds, strict=True)]
        return outputs, compared if self.kd_listed else compared[0]


def with_projector(
    model: Any,
    teacher: Teacher | Sequence[Teacher],
    img_size: Size,
    kind: str | Sequence[str] = "token",
    dense_loss: str | Sequence[str] = "cosine",
) -> Any:
    """Give a model a projector (layer norm and linear layer) from its features to each teacher's, in place, and return
    the model, which is a `Student` then. Several teachers also get a `TeacherScale` each. Call this before the model is
    compiled or distributed.

    Args:
        img_size: (H, W) of the student's images.
        kind, dense_loss: As in `DistillLoss`, one value or a list of one per teacher. "gram" and "logit" need no
            projector.

    Raises:
        UserError: Student or teacher has no tokens or does not take its image size, or the kind or loss is unknown.
    """
    teachers = [teacher] if isinstance(teacher, Teacher) else list(teacher)
    names = _for_each("kind", kind, len(teachers))
    losses = _for_each("dense_loss", dense_loss, len(teachers))
    kinds = [kind_of(name, loss) for name, loss in zip(names, losses, strict=True)]
    bare(model, "with_projector")
    check_interface(model, "forward_features", "forward_head")
    like = next(model.parameters())
    widths = {name: width_of(model, img_size, name) for name in dict.fromkeys(names)}
    channels = [each.width(name) for each, name in zip(teachers, names, strict=True)]
    parts: dict[str, nn.Module] = {}
    extend(model, Student, outermost=True)
    model.kd_kinds = names
    model.kd_listed = not isinstance(teacher, Teacher)
    for number, name in enumerate(names):
        projector = kinds[number].projector(widths[name], channels[number])
        if len(projector) and len(teachers) > 1:
            parts[_numbered("kd_scale", number)] = TeacherScale(channels[number]).to(like.device)
        parts[_numbered("kd_projector", number)] = projector.to(like)
    for name in [name for name, _ in model.named_children() if name.startswith(("kd_projector", "kd_scale"))]:
        if name not in parts:
            delattr(model, name)  # of earlier teachers, of which there were more
    for name, part in parts.items():
        setattr(model, name, part)
    return model


class TeacherTargets(NamedTuple):
    """The teacher's targets for B images: of tokens (B, N, C), with the share (B, N) of each that both networks see; or
    pooled features or logits (B, C), with 1 (B,) for images of which the teacher has a view, or None for all."""

    target: Tensor
    weight: Tensor | None


@dataclass(frozen=True)
class DistillLoss(TokenPlaces):
    """The distance of a student from its teacher. `DistillLoss.of(model, img_size, teacher)` makes one for a model.

    Args:
        kind: What is compared, by its name in `tlt.kinds`.
        dense_loss: The loss of tokens: "cosine" (1 - cosine), "smooth-l1", or "gram", the mean squared error of the
            cosines between all tokens of an image (DINOv3).
        temperature: Divides logits; the loss of logits is multiplied by its square.
        grid, window, places: Those of the student's tokens, as in `tlt.TokenLabelLoss`.
        scale: Normalises the teacher's features; None leaves them as they are.
    """

    teacher: Teacher
    kind: str = "token"
    dense_loss: str = "cosine"
    temperature: float = 4.0
    grid: Size = (1, 1)
    window: Area = FULL_AREA
    places: Mapping[Size, tuple[Size, Area]] = field(default_factory=dict)
    scale: TeacherScale | None = None

    def __post_init__(self) -> None:
        _ = self._kind  # raises here if a setting is wrong

    @property
    def _kind(self) -> Kind:
        return kind_of(self.kind, self.dense_loss, self.temperature)

    @classmethod
    def of(
        cls,
        model: Any,
        img_size: Size,
        teacher: Teacher | Sequence[Teacher],
        sizes: Sequence[Size] = (),
        **settings: Any,
    ) -> Any:
        """Return the loss for a student and images of (H, W), or of other `sizes`; `settings` are further arguments of
        the class. For a list of teachers return a `DistillLosses`; a setting may then be a list, and `weight` and
        `drop` are settings, too. Call `with_projector` before.

        Raises:
            UserError: The student has no tokens, or a list does not have one value per teacher.
        """
        count = 1 if isinstance(teacher, Teacher) else len(teacher)
        kinds = _for_each("kind", settings.get("kind", cls.kind), count)
        fitted: dict[str, Any] = {}
        of_places = any(kind_of(kind).of_places for kind in kinds)
        model = bare(model, "DistillLoss.of" if of_places else "", inside=True)
        if of_places:
            sizes = [size_of("img_size", size) for size in (img_size, *sizes)]
            fitted["places"] = {size: token_map(model, size)[:2] for size in sizes}
            fitted["grid"], fitted["window"] = fitted["places"][sizes[0]]
        if isinstance(teacher, Teacher):
            return cls(teacher, **settings, **fitted)
        if count > 1 and getattr(model, "kd_kinds", None) != kinds:
            raise UserError(f"give `with_projector` these {count} teachers and their kinds before: it normalises them")
        drop = settings.pop("drop", 0.0)
        weight = _for_each("weight", settings.pop("weight", 1.0), count)
        lists = {name: _for_each(name, given, count) for name, given in settings.items()}
        lists["scale"] = [getattr(model, _numbered("kd_scale", number), None) for number in range(count)]
        rows = ({name: values[number] for name, values in lists.items()} for number in range(count))
        parts = [cls(each, **row, **fitted) for each, row in zip(teacher, rows, strict=True)]
        return DistillLosses(parts, weight, drop)

    def lesson(self, batch: Batch, seen: Batch | None = None, images: Tensor | None = None) -> TeacherTargets:
        """Return the teacher's targets for a batch, after adding its features to the running scale if there is one; all
        ranks must call this.

        Args:
            seen: The teacher's views of the same images, normalised as the batch; None if it sees the batch.
            images: The images as the student sees them, if Mixup or CutMix has mixed them.

        Raises:
            UserError: `seen` shows other images, or is given together with `images`; or these have another number.
        """
        view = self.teacher.see(batch, self.kind, seen, images)
        outputs = view.outputs
        if self.scale is not None:
            self.scale.update(outputs, view.indices >= 0)
            outputs = self.scale(outputs)
        if not self._kind.of_places:  # a view of another image replaces one that could not be decoded
            return TeacherTargets(outputs, None if seen is None else (batch.indices == view.indices).to(outputs))
        with torch.autocast(outputs.device.type, enabled=False):
            shares, weight = self.place_shares(batch, view)
            return TeacherTargets(shares @ outputs, weight)

    def place_shares(self, batch: Batch, seen: Batch | View) -> tuple[Tensor, Tensor]:
        """Return (B, N, T), the shares of the teacher's cells in the target of each token, and (B, N), the share of the
        token that the teacher sees. Both are 0 where the batches hold different images, because one of the views could
        not be decoded."""
        (row_count, col_count), (x0, y0, x1, y1), _ = self.teacher.tokens
        grid, window = self.place(batch.images)
        n = points_per_token((row_count, col_count), grid)
        low, high = torch.maximum(batch.visible, seen.visible), torch.minimum(batch.visible, seen.visible)
        visible = torch.cat([low[:, :2], high[:, 2:]], 1)
        source, inside = token_points(batch.affine, visible, grid, window, n)  # (B, 2, N, P), (B, N, P)
        x, y = _places_in_view(source, seen.affine)  # (B, N, P)
        inside = inside & (x > max(x0, 0)) & (x < min(x1, 1)) & (y > max(y0, 0)) & (y < min(y1, 1))
        same_image = (batch.indices == seen.indices)[:, None, None]
        counted = (inside & same_image).to(x.dtype)
        total = counted.sum(-1)
        share = counted / total.clamp(min=1)[..., None]
        down = linear_weights((y - y0) / (y1 - y0) * row_count - 0.5, row_count) * share[..., None]
        across = linear_weights((x - x0) / (x1 - x0) * col_count - 0.5, col_count)
        return torch.einsum("bnpr,bnpc->bnrc", down, across).flatten(2), total / n**2

    def __call__(self, student: Tensor, targets: TeacherTargets, mixed: float | Tensor = 0.0) -> Tensor:
        """Return the loss, a scalar: the mean over images, and over tokens by their weight.

        Args:
            student: The second value of `model(images, taught=True)`; for "logit" the student's logits.
            mixed: The partner's share of logits and pooled features, which is MixToken's share of tokens.
        """
        return self.distances(student, targets, mixed).mean()

    def distances(self, student: Tensor, targets: TeacherTargets, mixed: float | Tensor = 0.0) -> Tensor:
        """Return the terms whose mean is the loss: (B,), or (B, N) for tokens, or (B, N, N) for pairs of tokens."""
        kind = self._kind
        target, weight = targets
        axes = 2 if kind.of_places and not kind.projected else 3  # gram compares tokens of any width
        if student.shape[:axes] != target.shape[:axes]:
            raise UserError(
                f"the student gives {tuple(student.shape)}, its teacher {tuple(target.shape)}: give `with_projector` "
                "the kind, dense_loss and img_size of the loss"
            )
        weight = target.new_ones(target.shape[:-1]) if weight is None else weight
        with torch.autocast(student.device.type, enabled=False):
            return kind.distances(student.float(), target, weight, mixed)


@dataclass(frozen=True)
class DistillLosses:
    """The losses of several teachers, which `DistillLoss.of(model, img_size, teachers)` fits to a model.

    Args:
        parts: The loss of each teacher.
        weight: The weight of each loss in the sum.
        drop: The probability with which an image leaves out a teacher, but never the one with its greatest loss (UNIC),
            because the student has most to learn from that one. torch's generator on the device draws it
            (`tlt.StepKey.seed_torch`), and all teachers are computed. The sum is divided by the share of losses that is
            kept on average, so that the teachers' weight beside labels stays.
    """

    parts: Sequence[DistillLoss]
    weight: Sequence[float]
    drop: float = 0.0

    def __post_init__(self) -> None:
        in_range("drop", self.drop, 0, 1)

    def lesson(self, batch: Batch, seen: Any = None, images: Tensor | None = None) -> list[TeacherTargets]:
        """Return each teacher's targets for a batch, as `DistillLoss.lesson` does.

        Args:
            seen: A list with the views of each teacher, or one value for all.
            images: As in `DistillLoss.lesson`, for the teachers that see the batch.
        """
        views = _for_each("seen", seen, len(self.parts))
        return [
            part.lesson(batch, view, images if view is None else None)
            for part, view in zip(self.parts, views, strict=True)
        ]

    def __call__(self, student: Any, targets: Any, mixed: float | Tensor = 0.0) -> Tensor:
        """Return the sum of the weighted losses, a scalar. The arguments are lists of those of `DistillLoss`."""
        return self.terms(student, targets, mixed)[0]

    def terms(self, student: Any, targets: Any, mixed: float | Tensor = 0.0) -> tuple[Tensor, list[Tensor]]:
        """Return that sum, and for each teacher its unweighted loss over all images."""
        rows = zip(self.parts, student, targets, strict=True)
        distances = [part.distances(features, wanted, mixed) for part, features, wanted in rows]
        losses = counted = [per_image.mean() for per_image in distances]
        if self.drop:
            of_images = torch.stack([values.reshape(len(values), -1).mean(1) for values in distances])  # (teachers, B)
            counts = (torch.rand_like(of_images) >= self.drop) | (of_images == of_images.amax(0))
            counted = [*(of_images * counts).mean(1) / (1 - self.drop * (1 - 1 / len(losses)))]
        return cast(Tensor, sum(w * loss for w, loss in zip(self.weight, counted, strict=True))), losses


def _places_in_view(source: Tensor, affine: Tensor) -> tuple[Tensor, Tensor]:
    """Map places (B, 2, N, P), in shares of the source, to x and y (B, N, P) in shares of the view with `affine`."""
    inverse = torch.linalg.inv_ex(affine[:, :, :2])[0][..., None, None]  # (B, 2, 2, 1, 1); does not wait for the device
    from_corner = source - affine[:, :, 2, None, None]
    # Elementwise rather than a matrix product: TF32 would move the points.
    x, y = (inverse[:, :, 0] * from_corner[:, None, 0] + inverse[:, :, 1] * from_corner[:, None, 1]).unbind(1)
    return x, y
