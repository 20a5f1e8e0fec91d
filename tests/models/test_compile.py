"""torch.compile without graph breaks or recompilation; without Inductor, which takes minutes."""

from __future__ import annotations

import pytest
import timm
import torch

SMALLER = {"volo_test": {"layers": (1, 1, 0, 0)}, "lvvit_test": {"depth": 1}}
BOXES = [(1, 1, 3, 3), (0, 0, 2, 4), (0, 0, 0, 0)]


@pytest.mark.parametrize(("name", "as_tensor"), [("volo_test", True), ("lvvit_test", True), ("volo_test", False)])
def test_training_compiles_once_for_all_boxes(name, as_tensor, make_images):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=64, num_classes=5, **SMALLER[name])
    from torch._dynamo.testing import CompileCounterWithBackend  # takes a second

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
    torch.compiler.reset()
