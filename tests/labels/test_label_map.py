"""The label format: what is accepted, how maps are batched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tlt.errors import UserError
from tlt.label_map import NO_AREA, LabelBatch, LabelMap, centre_square


def example(k: int = 2, h: int = 3, w: int = 4, seed: int = 0) -> LabelMap:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((k, h, w)).astype(np.float16)
    return LabelMap(values, rng.integers(0, 10, (k, h, w), dtype=np.int32), (0.1, 0.0, 0.9, 1.0))


def test_what_can_not_be_trained_on_is_refused_with_its_source() -> None:
    good = example()
    assert good.validate(10) is good
    assert LabelMap.unknown((2, 3, 4)).validate(1).area == NO_AREA
    for label_map, message in (
        (replace(good, values=np.where(good.values > 1, np.nan, good.values)), "NaN or infinite"),
        (replace(good, values=np.where(good.values > 1, -np.inf, good.values)), "NaN or infinite"),
        (replace(good, ids=good.ids - 10), r"class id -\d+ is not in 0\.\.9"),
        (replace(good, ids=good.ids + 10), r"class id 1\d is not in 0\.\.9"),
        (replace(good, ids=good.ids[:1]), "not one .k, h, w. map"),
        (replace(good, area=(0.5, 0.0, 0.2, 1.0)), "area"),
    ):
        with pytest.raises(UserError, match=rf"^a/x\.pt: .*{message}"):
            replace(label_map, source="a/x.pt").validate(10)


def test_a_batch_holds_the_maps_in_order() -> None:
    maps = [example(seed=seed) for seed in range(3)]
    batch = LabelBatch.stack(maps)
    assert (batch.values.dtype, batch.ids.dtype, batch.area.dtype) == (torch.float16, torch.int32, torch.float32)
    for row, label_map in enumerate(maps):
        np.testing.assert_array_equal(batch.values[row].numpy(), label_map.values)
        np.testing.assert_array_equal(batch.ids[row].numpy(), label_map.ids)
        np.testing.assert_allclose(batch.area[row].numpy(), label_map.area, rtol=1e-6)
    part = batch.to("cpu")[1:2]
    assert len(part) == 1 and torch.equal(part.ids[0], batch.ids[1])
    with pytest.raises(UserError, match="different shapes"):
        LabelBatch.stack([example(), example(w=5)])


@pytest.mark.parametrize("width,height", [(500, 375), (375, 500), (64, 64)])
def test_centre_square_is_what_a_centre_crop_keeps(width: int, height: int) -> None:
    from torchvision.transforms import CenterCrop

    kept = CenterCrop(min(width, height))(
        torch.stack(torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy"))
    )
    x0, y0, x1, y1 = centre_square(width, height)
    edges = [*kept[:, 0, 0].tolist(), *(kept[:, -1, -1] + 1).tolist()]
    assert edges == pytest.approx([x0 * width, y0 * height, x1 * width, y1 * height], abs=0.5)
