"""`--token-label-teacher`: an annotator network labels each training batch, so that no label files are needed.

It sees the student's images, after augmentation and before they are mixed. Its prediction at a position is the
label of that position, so that no geometry has to be undone. The annotator is not trained, averaged or saved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tlt.data.batch import Batch
from tlt.io.files import blamed_on
from tlt.label_map import FULL_AREA, Area, LabelBatch
from tlt.labels.annotate import Annotator, check_dense, labelled_area
from tlt.labels.store import relative_to_tail
from tlt.models.spatial import Size
from tlt.teacher import MeanStd, Renormalise
from volo.cluster.distributed import World
from volo.config.rules import other_sizes
from volo.config.settings_train import TrainSettings
from volo.train.model import TimmModel, compiler_of, place_model
from volo.train.precision import compute_dtype
from volo.train.trained_model import load_frozen


@dataclass(eq=False)
class OnlineAnnotator:
    """Labels batches with an annotator network.

    Attributes:
        annotator: The network, on the training device.
        student, own: (mean, std) with which a batch is normalised, and which the annotator expects.
        areas: For each image size (H, W), the area that the annotator labels (`tlt.labels.annotate.labelled_area`).
        exact_tail: Whether `--label-tail exact` is used (`tlt.labels.store.relative_to_tail`).
    """

    name: str
    annotator: Annotator
    student: MeanStd
    own: MeanStd
    areas: Mapping[Size, Area]
    exact_tail: bool = False
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        model: Any = self.annotator.model  # has timm's interface
        self._num_classes = int(model.num_classes)
        device = next(model.parameters()).device
        self._renormalise = Renormalise(self.student, self.own, device)
        self._affine = torch.eye(2, 3, device=device)
        self._areas = {size: torch.tensor(area, device=device) for size, area in self.areas.items()}
        self._visible = torch.tensor(FULL_AREA, device=device)

    def label(self, batch: Batch) -> Batch:
        """Return the batch with the annotator's labels, at the positions where it saw them."""
        prediction = self.annotator(self._renormalise(batch.images))
        values = prediction.values
        if self.exact_tail:
            values = relative_to_tail(values, prediction.log_sum_exp, self._num_classes)
        area = self._areas[batch.images.shape[-2], batch.images.shape[-1]]
        labels = LabelBatch(values, prediction.ids, area.expand(batch.size, 4))
        affine = self._affine.expand(batch.size, 2, 3)
        visible = self._visible.expand(batch.size, 4)
        return replace(batch, labels=labels, affine=affine, visible=visible)


def load_online_annotator(
    settings: TrainSettings, student: TimmModel, data_config: dict[str, Any], class_names: list[str], world: World
) -> OnlineAnnotator:
    """Load the annotator that the flags name, for training images of the student's `data_config` (input_size, mean and
    std) and folders of `class_names`. Raise UserError if it does not exist, has no exact dense logits, has other
    classes than the student, or can't take images of this size."""
    name, path = settings.labels.token_label_teacher, settings.labels.token_label_teacher_checkpoint
    size, flag = data_config["input_size"], f"--token-label-teacher {name}"
    reason = f"does not take images of {size[1]} x {size[2]} px"
    with blamed_on(flag, reason, "use another annotator, or another --img-size"):
        classes = class_names, student.num_classes, f"--model {settings.network.model} has {student.num_classes}"
        others = other_sizes(replace(settings.sizes, val_img_size=None))
        trained = load_frozen(name, path or None, size, others, classes)
        sizes = [(size[1], size[2]), *others]
        model = place_model(trained.model.requires_grad_(False), settings.precision.channels_last, world)
        for image_size in sizes:
            check_dense(model, torch.randn(2, size[0], *image_size, device=world.device), f"--model {name}")
    dtype = compute_dtype(settings.precision.mixed, world.device)
    compiled = compiler_of(settings).features(model)
    annotator = Annotator(model, settings.labels.token_label_teacher_top_k, dtype, compiled)
    seen, expected = ((config["mean"], config["std"]) for config in (data_config, trained.data_config))
    name += " (EMA)" if trained.ema else ""
    areas = {image_size: labelled_area(model, image_size) for image_size in sizes}
    exact_tail = settings.labels.maps.label_tail == "exact"
    return OnlineAnnotator(name, annotator, seen, expected, areas, exact_tail, trained.notes)
