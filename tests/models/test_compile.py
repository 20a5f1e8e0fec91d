"""torch.compile without graph breaks or recompilation, and torch.export; without Inductor, which takes minutes."""

from __future__ import annotations

import pytest
import timm
import torch
from torch._dynamo.testing import CompileCounterWithBackend

BOXES = [(1, 1, 3, 3), (0, 0, 2, 4), (2, 1, 4, 4), (0, 0, 0, 0), (0, 1, 1, 2)]


@pytest.fixture(params=[("volo_test", {"layers": (1, 1, 0, 0)}), ("lvvit_test", {"depth": 1})], ids=["volo", "lvvit"])
def model(request):
    torch.compiler.reset()
    torch.manual_seed(0)
    name, smaller = request.param
    yield timm.create_model(name, img_size=64, num_classes=5, **smaller)
    torch.compiler.reset()


@pytest.mark.parametrize("as_tensor", [True, False])
def test_training_compiles_once_for_all_boxes(model, as_tensor, make_images):
    counter = CompileCounterWithBackend("aot_eager" if as_tensor else "eager")
    model.train().set_grad_checkpointing(not as_tensor)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    x = make_images(4, 64)
    for box in BOXES:
        got = compiled(x, dense=True, mix_box=torch.tensor(box) if as_tensor else box)
        expected = model(x, dense=True, mix_box=box)
        torch.testing.assert_close(got, expected)
        sum(out.sum() for out in got).backward()
    assert counter.frame_count == 1


def test_export_with_any_batch(model, make_images):
    model.eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(model, (make_images(2, 64),), dynamic_shapes={"x": {0: batch}}).module()
    for count in (1, 3):
        torch.testing.assert_close(exported(make_images(count, 64)), model(make_images(count, 64)))
