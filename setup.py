"""All metadata is in pyproject.toml; this file adds what lies beside the packages: recipes and batch scripts."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithFiles(build_py):
    """Copy `configs` and `slurm` into the installed package, where `volo.config.recipes` finds them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in ("configs", "slurm"):
                shutil.copytree(name, Path(self.build_lib, "volo", "files", name), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithFiles})
