"""Reading /sys and /proc: made-up trees, and this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.machines import DGX_H100, build, device, write
from tests.commands.conftest import ROOT
from tests.conftest import LIMIT
from volo.cluster.topology import Gpu, read_machine, visible_gpus


def test_visible_devices_as_cuda_reads_them() -> None:
    # As CUDA's programming guide says it: what comes after a GPU that doesn't exist is invisible, too. A part of a UUID
    # names the only one that begins so; a part of a GPU (MIG) is none.
    gpus = [Gpu(str(i), (), None, uuid) for i, uuid in enumerate(("GPU-89-a1", "GPU-89-b2", "GPU-a1-c3"))]
    cases = {"2,0": "20", " 1, 2": "12", "0,9,1": "0", "0,-1,1": "0", "": "", "GPU-89-b,GPU-a1": "12", "GPU-89": ""}
    for chosen, expected in {**cases, "MIG-1f2e": ""}.items():
        visible, why = visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": chosen})
        assert "".join(gpu.name for gpu in visible) == expected, chosen
        assert why == ("" if expected else f"CUDA_VISIBLE_DEVICES={chosen} names no whole GPU that /sys shows")
    assert visible_gpus(gpus, {}) == (gpus, "") and visible_gpus([], {})[1] == "no NVIDIA GPU in /sys"


def test_gpus_of_a_container_and_of_a_slurm_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, DGX_H100)
    device(tmp_path, "0", "00/00:01/30", "0x1a03", "0x030000")  # a display of the board
    device(tmp_path, "0", "00/00:02/31", "0x10de", "0x068000")  # an NVSwitch

    def shown() -> str:
        machine = read_machine(tmp_path)
        assert len(machine.gpus) == 8
        return " ".join(gpu.name[5:7] for gpu in visible_gpus(machine.gpus, {})[0])

    assert shown() == "1b 43 52 61 9d c3 d1 df"
    access = os.access  # as the job's cgroup answers: its GPUs are the last four
    denied = tuple(f"nvidia{minor}" for minor in range(4))
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith(denied) and access(path, mode))
    assert shown() == "9d c3 d1 df"
    (tmp_path / "proc/driver/nvidia/gpus/0000:c3:00.0/information").unlink()
    assert shown() == "9d d1 df"


def test_ports_that_are_down_or_cannot_be_opened_are_left_out(tmp_path: Path) -> None:
    build(tmp_path, DGX_H100)
    write(tmp_path, "sys/class/infiniband/mlx5_3/ports/1/state", "2: INIT")
    for i in range(12):
        write(tmp_path, f"sys/class/infiniband_verbs/uverbs{i}/ibdev", f"mlx5_{i}")
        if i != 5:
            write(tmp_path, f"dev/infiniband/uverbs{i}", "")
    machine = read_machine(tmp_path)
    assert [port.name for port in machine.ports] == [f"mlx5_{i}:1" for i in (0, 1, 2, 4, 6, 7, 8, 9, 10, 11)]
    assert {(port.rate, port.layer) for port in machine.ports} == {(400.0, "InfiniBand")}
    assert machine.idle_ports == ("mlx5_3:1 is INIT", "mlx5_5:1 is not passed into this container")


def test_this_machine_is_read_as_python_sees_it() -> None:
    machine = read_machine()
    assert machine.allowed == os.sched_getaffinity(0)
    assert machine.allowed <= {cpu for cores in machine.cores.values() for core in cores for cpu in core}
    assert machine.parent_allowed == os.sched_getaffinity(os.getppid())


def test_the_interface_is_found_by_the_route_to_an_address() -> None:
    if not shutil.which("unshare"):
        pytest.skip("needs unshare: apt-get install util-linux")
    card = "ip link add eth8 type veth peer name eth9 && ip link set eth8 up && ip link set eth9 up"
    addresses = "ip addr add 10.9.0.1/24 dev eth8 && ip addr add fd00:9::1/64 dev eth8 nodad"
    asked = ("10.9.0.7", "10.9.0.1", "fd00:9::7", "10.9.2.7", "127.0.1.1", "::1", "localhost", "no.such.host.invalid")
    code = f"from volo.cluster.topology import interface_to; print(*map(interface_to, {asked}))"
    script = f'{card} && {addresses} && echo made && exec {sys.executable} -c "{code}"'
    namespace = ["unshare", "--map-root-user", "--net", "sh", "-c", script]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(namespace, env=env, capture_output=True, text=True, timeout=LIMIT)
    if not done.stdout.startswith("made"):
        pytest.skip(f"no network namespace can be made: {done.stderr}")
    assert done.stdout.split()[1:] == ["eth8"] * 3 + ["None"] * 5, done.stderr
