"""torch.compile without graph breaks or recompilation; without Inductor, which takes minutes."""

import pytest
import timm
import torch

from tests.models.conftest import make_images
from tlt.models import fast_ops
from tlt.models.fast_ops import linear
from tlt.models.wrap import with_dense_head
from volo.kernels import outlook_attention

SMALLER = {
    "volo_test": {"img_size": 64, "layers": (1, 1, 0, 0)},
    "lvvit_test": {"img_size": 64, "depth": 1},
    "test_resnet": {},
}
BOXES = [(1, 1, 3, 3), (0, 0, 2, 4), (0, 0, 0, 0)]
ONEDNN = {"tlt.onednn_linear.default"} if torch.backends.mkldnn.is_available() else set()
EXPECTED = {"volo_test": {"volo.outlook_windows.default", *ONEDNN}, "lvvit_test": ONEDNN, "test_resnet": set()}


@pytest.fixture(autouse=True)
def linear_layers_by_onednn(monkeypatch):
    monkeypatch.setattr(fast_ops, "MKL_IS_SLOW", bool(ONEDNN))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def own(module):
    """Which operators of this project a graph has, and those within it (recomputed activations)."""
    graphs = [part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
    names = {str(node.target) for graph in graphs for node in graph.nodes if node.op.startswith("call")}
    assert names
    return {name for name in names if "onednn" in name or "outlook" in name}


@pytest.mark.parametrize(("name", "as_tensor"), [("volo_test", False), ("lvvit_test", True), ("test_resnet", True)])
def test_training_compiles_once_for_all_boxes(name, as_tensor):
    torch.manual_seed(0)
    model = with_dense_head(timm.create_model(name, num_classes=5, **SMALLER[name]), (64, 64))
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
    assert own(counter.graphs[0]) == EXPECTED[name]


class Products(torch.nn.Module):
    """What own operators compute, and nothing else."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)

    def forward(self, v, logits):
        return linear(self.layer, outlook_attention(v, logits))


def test_exported_model_has_no_operator_of_ours():
    inputs, operators = [make_images(3, size, size, c).movedim(1, -1) for size, c in ((4, 32), (2, 162))], []
    compiled = torch.compile(Products(), backend=lambda module, _: operators.append(own(module)) or module.forward)
    for strict in (False, True):
        compiled(*(x[strict:] for x in inputs))  # another number of images is compiled anew
        assert own(torch.export.export(Products(), tuple(inputs), strict=strict).graph_module) == set()
    assert operators == [EXPECTED["volo_test"]] * 2


def test_transformations_that_are_compiled_equal_plain_ones():
    v, logits = (make_images(2, size, size, c).movedim(1, -1) for size, c in ((4, 32), (2, 162)))

    def attend(v):
        return outlook_attention(v, logits)

    for transformed in (
        lambda v: torch.func.jvp(attend, (v,), (v + 1,))[1],  # of an operator of ours this is 0
        torch.func.grad(lambda v: attend(v).square().sum()),
    ):
        torch.testing.assert_close(torch.compile(transformed, backend="eager")(v), transformed(v))
