"""Real scans of digits to train on."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from shutil import copyfile

import pytest

from tests.commands.conftest import ROOT
from tests.commands.conftest import call as call  # a fixture
from tests.commands.conftest import nothing_left_running as nothing_left_running  # a fixture


@pytest.fixture(scope="session")
def all_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's digits as the demo writes them."""
    spec = importlib.util.spec_from_file_location("digits_demo", ROOT / "demo" / "digits.py")
    assert spec is not None and spec.loader is not None
    demo = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclass looks itself up
    spec.loader.exec_module(demo)
    demo.ROOT = tmp_path_factory.mktemp("demo")
    demo.write_digits(demo.ROOT / "digits")
    return demo.ROOT / "digits"


@pytest.fixture
def digits(all_digits: Path, tmp_path: Path) -> Path:
    """Four scans of each digit to train on, two to validate on."""
    for split, count in (("train", 4), ("validation", 2)):
        for folder in sorted((all_digits / split).iterdir()):
            (tmp_path / "data" / split / folder.name).mkdir(parents=True)
            for file in sorted(folder.iterdir())[:count]:
                copyfile(file, tmp_path / "data" / split / folder.name / file.name)
    return tmp_path / "data"
