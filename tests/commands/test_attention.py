"""`volo attention` as a user runs it: pages of the right maps, and one line for a mistake."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from tests.commands.conftest import QUICK, ROOT, Ended
from volo.commands.attention import draw_attention
from volo.commands.attention_maps import choose_layers, forward_with_inputs, self_attention, view

Call = Callable[..., Ended]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "straße.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)).save(path)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[str], Path]:
    def save(name: str) -> Path:
        torch.manual_seed(0)
        path = tmp_path / f"{name}.pth"
        torch.save({"state_dict": timm.create_model(name, num_classes=6).state_dict()}, path)
        return path

    return save


@pytest.mark.parametrize("name", ["volo_test", "lvvit_test"])
def test_a_page_per_image(
    name: str, call: Call, image: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    flags = f"--model {name} --num-classes 6 --checkpoint {checkpoint(name)} --heads --query 1 0 --device cpu"
    ended = call("attention", flags, image, image, "-o", tmp_path / "page.png")
    assert ended.code == 0, ended.err
    for number in (1, 2):
        with Image.open(tmp_path / f"page-{number}.png") as page:
            assert min(page.size) > 400
    before = image.read_bytes()
    ended = call("attention", flags, image, "-o", image)
    assert ended.code == 2 and f"-o {image} exists already: remove it, or choose another name" in ended.err
    assert image.read_bytes() == before


def test_a_checkpoint_of_ours_says_everything(
    call: Call, make_dataset: Callable[..., Path], image: Path, tmp_path: Path
) -> None:
    trained = call("train", f"{make_dataset()} {QUICK} --epochs 1 --output {tmp_path} --experiment run")
    assert trained.code == 0, trained.err
    ended = call("attention", f"--checkpoint {tmp_path}/run/last.pth.tar -o {tmp_path}/page.svg", image)
    assert ended.code == 0, ended.err
    assert "wrote" in ended.out and (tmp_path / "page.svg").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("{image} -o p.png --layers network.9", "--layers network.9: the blocks with attention are network.0.0"),
        ("{image} -o p.png --query 2 0", "2 is out of range: 0 to 1"),
        ("{image} -o p.txt", "end the name in .png"),
        ("{image}", "-o FILE is missing"),
        ("nothing.jpg -o p.png", "image nothing.jpg: No such file"),
    ],
)
def test_mistakes_are_one_line(
    flags: str, told: str, call: Call, image: Path, checkpoint: Callable[[str], Path]
) -> None:
    model = f"--model volo_test --num-classes 6 --checkpoint {checkpoint('volo_test')} --device cpu"
    ended = call("attention", f"{flags.format(image=image)} {model}")
    assert ended.code == 2 and told in ended.err and ended.err.count("\n") == 1


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nsys.argv = [__file__ := 'volo', 'attention', '--help']\nfrom volo.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('HEAVY', sorted({'torch', 'timm', 'numpy', 'matplotlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout and "--query" in done.stdout


def test_a_model_without_attention_is_refused(call: Call, image: Path, checkpoint: Callable[[str], Path]) -> None:
    flags = f"-o p.png --model test_resnet --num-classes 6 --checkpoint {checkpoint('test_resnet')} --device cpu"
    ended = call("attention", flags, image)
    assert ended.code == 2 and "has none of the attention layers of VOLO and LV-ViT" in ended.err


def test_maps_are_of_the_query_and_lie_where_its_cell_is() -> None:
    torch.manual_seed(0)
    model = timm.create_model("volo_test", img_size=(64, 96), num_classes=6).eval()
    query = (0.8, 0.3)  # outlooker cell (2, 9), token (1, 4)
    image, layers = torch.randn(1, 3, 64, 96), choose_layers(model, ["all"])
    seen = view(model, image, layers, query, per_head=True)
    (_, outlook), (_, tokens), (_, classes) = seen.sections
    looked, windows = outlook
    assert looked.values.shape == (8, 12) and looked.cell == 8
    assert windows.values.shape == (2, 8, 12) and windows.query == (2, 8)
    assert windows.values.sum(axis=(1, 2)) == pytest.approx(9, rel=1e-5)
    assert not windows.values[:, :1].any() and not windows.values[:, 4:].any() and windows.values[:, 1:4, 7:10].all()
    assert len(tokens) == 3 * (1 + 4) and len(classes) == 2 * (1 + 4)
    for heat in tokens:
        assert heat.query == (1, 4) and heat.cell == 16
        assert heat.values.mean() == pytest.approx(1, rel=1e-5)
    assert tokens[0].values == pytest.approx(np.mean([heat.values for heat in tokens[1:5]], axis=0))
    _, (x,) = forward_with_inputs(model, image, [layers["network.2.0"]])
    expected = self_attention(model.network[2][0].attn, x)[0, :, 1 * 6 + 4].mean(0).view(4, 6) * 24
    assert tokens[0].values == pytest.approx(expected.numpy(), rel=1e-5)
    figure = draw_attention(np.zeros((64, 96, 3), np.uint8), seen, query, [], "title")
    (axes,) = [axes for axes in figure.axes if axes.get_gid() == tokens[0].title]
    (marked,) = axes.patches
    assert (*marked.get_xy(), marked.get_width()) == (64, 16, 16)
    (drawn,) = [each for each in axes.images if each.get_label() == "map"]
    assert drawn.get_extent() == [0, 96, 64, 0]


def test_what_the_heads_say_is_what_the_model_says() -> None:
    torch.manual_seed(0)
    model = timm.create_model("lvvit_test", num_classes=6).eval()
    image = torch.randn(1, 3, 64, 64)
    seen = view(model, image, choose_layers(model, []), (0.5, 0.5))
    with torch.no_grad():
        expected = model(image)[0].softmax(-1).sort(descending=True)
        tokens = model(image, dense=True)[1][0].softmax(-1).max(-1)
    assert [class_id for class_id, _ in seen.top] == expected.indices[:5].tolist()
    assert [probability for _, probability in seen.top] == pytest.approx(expected.values[:5].tolist(), rel=1e-5)
    assert seen.tokens is not None
    assert seen.tokens.ids.ravel().tolist() == tokens.indices.tolist()
    assert seen.tokens.probability.ravel() == pytest.approx(tokens.values.numpy(), rel=1e-5)
