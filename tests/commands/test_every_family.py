"""Every program with every kind of timm's models: of each class and pooling in each of timm's modules the model with
the fewest weights, on the smallest square images that it takes. Each ends well, or is refused in one line as the table
in docs/any_timm_model.md says; a row of the table that is not true fails too.

    make test-timm                                   left out of `make test`: about an hour on two cores
    make test-timm TEST_ARGS="-k 'cait or levit'"    some modules
"""

import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from tests.commands.conftest import QUICK, ROOT, Call, Ended, Make

SIZES = (64, 84, 96, 112, 128, 160, 168, 192, 224, 256, 384)  # pixels; and the model's own
MANY = 140e6  # weights, above which a model is made of two blocks if it can be
NO_ATTENTION = "has none of the attention layers of VOLO and LV-ViT"


def refused_by_the_page() -> dict[str, set[str]]:
    """Program -> modules, or module.Class, of timm with which the page says that it is refused."""
    table = (ROOT / "docs" / "any_timm_model.md").read_text().partition("| refused |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .+ \|$", table, re.MULTILINE)
    said: dict[str, set[str]] = {}
    for programs, kinds in rows:
        for program in programs.split(", "):
            said.setdefault(program.strip("`"), set()).update(re.findall(r"`(\S+?)`", kinds))
    return said


def smallest_of_each_kind(module: str) -> dict[tuple[str, str], tuple[str, float]]:
    """(Class, pooling) -> name and number of weights of the model of this module that has the fewest."""
    result: dict[tuple[str, str], tuple[str, float]] = {}
    for name in timm.list_models(module=module):
        with torch.device("meta"):
            model = timm.create_model(name)
        weights, pool = sum(p.numel() for p in model.parameters()), getattr(model, "global_pool", "")
        kind = type(model).__name__, pool if isinstance(pool, str) else ""
        if kind not in result or weights < result[kind][1]:
            result[kind] = name, weights
    return result


class Programs:
    """Runs programs, and notes the line of each that is refused, and how others fail."""

    def __init__(self, call: Call) -> None:
        self._call, self.refused, self.failed = call, dict[str, str](), dict[str, str]()

    def run(self, what: str, program: str, flags: str, *more: Path | str) -> bool:
        """Whether it ends well. `what` is its name in the table."""
        try:
            ended = self._call(program, flags, *more)
        except Exception as error:  # which a user would see as a traceback
            ended = Ended(1, "", f"{type(error).__name__}: {error}")
        if ended.code:
            (self.refused if ended.refused("") else self.failed)[what] = ended.err.strip()
        return not ended.code


@pytest.fixture
def data(make_dataset: Make) -> Path:
    """Four images of four classes: one update."""
    return make_dataset(train=4, validation=4)


@pytest.fixture
def masks(data: Path) -> Path:
    """The images of `data` with masks: the left half of each is of class 0, the right one of class 1."""
    root = data.parent / "masks"
    for path in data.rglob("*.jpg"):
        image, split = Image.open(path), path.relative_to(data).parts[0]
        for kind in ("images", "masks"):
            (root / split / kind).mkdir(parents=True, exist_ok=True)
        image.save(root / split / "images" / path.name)
        halves = np.indices(image.size[::-1])[1] >= image.width // 2
        Image.fromarray(halves.astype(np.uint8)).save(root / split / "masks" / f"{path.stem}.png")
    return root


def try_all(programs: Programs, name: str, weights: float, data: Path, labels: Path, masks: Path, out: Path) -> None:
    train = QUICK.replace("--model volo_test --img-size 32", f"--model {name}")
    train = f"{data} {train} -b 4 --epochs 1 --opt sgd --output {out}"
    if weights > MANY:
        with suppress(Exception), torch.device("meta"):
            timm.create_model(name, depth=2)
            train += " --model-kwargs depth=2"
    with torch.device("meta"):
        if any(isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) for layer in timm.create_model(name).modules()):
            train += " --bn-momentum 0.9"  # else the logits after one update may be beyond half precision
    for size in sorted({*SIZES, timm.get_pretrained_cfg(name).input_size[1]}):
        programs.refused.pop("train", None)
        if programs.run("train", "train", f"{train} --img-size {size} --amp --dry-run") or programs.failed:
            break
    train += f" --img-size {size}"
    runs = [out / "plain"] if programs.run("train", "train", f"{train} --experiment plain") else []
    dense = "train", f"{train} --experiment dense --token-label --token-label-data {labels}"
    if runs and (programs.run("MixToken", *dense) or programs.run("dense head", *dense, "--no-mix-token")):
        runs.append(out / "dense")
    if "dense head" in programs.refused:
        programs.refused.pop("MixToken")
    for run in runs:
        programs.run("validate", "validate", f"{data} --checkpoint {run} -j 0")
    image = next((data / "validation").rglob("*.jpg"))
    for flags in [f"--checkpoint {run}" for run in runs[-1:]]:
        programs.run("predict", "predict", f"{flags} -j 0", image)
        programs.run("--embeddings", "predict", f"{flags} -j 0 --embeddings {out}/features.npz", image)
        programs.run("label", "label", f"{data} {out}/made {flags} -j 0")
        programs.run("attention", "attention", f"{image} {flags} -o {out}/attention.png")
        programs.run("--knn", "validate", f"{data} {flags} -j 0 --knn {data}")
        programs.run("--probe seg", "validate", f"{masks} {flags} -j 0 --probe seg --epochs 1")
        programs.run("export", "export", f"{flags} -o {out}/model.pt2")
        programs.run("ONNX", "export", f"{flags} -o {out}/model.onnx")


@pytest.mark.timm
@pytest.mark.parametrize("module", sorted(timm.list_modules()))
def test_programs_do_as_the_page_says(call, data, labels, masks, tmp_path, module):
    said, wrong = refused_by_the_page(), []
    for kind, (name, weights) in smallest_of_each_kind(module).items():
        programs, names = Programs(call), {module, f"{module}.{kind[0]}"}
        try_all(programs, name, weights, data, labels, masks, tmp_path / name)
        if NO_ATTENTION in programs.refused.get("attention", "") and module != "volo":
            del programs.refused["attention"]
        wrong += [f"{name}: {what} fails: {line}" for what, line in programs.failed.items()]
        expected = {what for what, kinds in said.items() if names & kinds}
        wrong += [f"{name}: {what} is refused: {programs.refused[what]}" for what in {*programs.refused} - expected]
        wrong += [f"{name}: {what} is not refused" for what in expected - {*programs.refused}]
    assert not wrong, "\n".join(wrong)
