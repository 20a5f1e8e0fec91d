"""The images and labels of the alignment tests, written once."""

from __future__ import annotations

import pytest

from tests.data.alignment.oracle import SIZES, Scene


@pytest.fixture(scope="package")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Three images of each of SIZES."""
    return Scene.write(tmp_path_factory.mktemp("alignment"), SIZES, 3)
