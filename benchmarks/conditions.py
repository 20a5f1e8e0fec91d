"""The conditions of a measurement: command, hardware, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    "torch",
    "triton",
    "torchvision",
    "timm",
    "pillow",
    "pillow-simd",
    "simplejpeg",
    "numpy",
    "nvidia-dali-cuda130",
    "nvidia-dali-cuda120",
)


def conditions(command: str) -> dict[str, Any]:
    """Return command line, hardware and versions."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    hardware = {
        "CPU": _cpu_name(),
        "CPUs to run on": cpus,
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    versions = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"command": command, "hardware": hardware, "versions": versions}


def heading(command: str) -> list[str]:
    """Return the conditions as lines of Markdown."""
    found = conditions(command)
    hardware = ", ".join(f"{name} {value}" for name, value in found["hardware"].items())
    return [
        f"`{found['command']}`",
        "",
        f"{hardware}; {', '.join(f'{name} {version}' for name, version in found['versions'].items())}",
        "",
    ]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
