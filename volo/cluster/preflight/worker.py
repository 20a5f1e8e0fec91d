"""One process of a bandwidth measurement: it reads tasks and writes results as lines of JSON.

`local_node.py` runs it as a file, so that nothing but torch is imported. It ends with its parent.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_LONG_ENOUGH_S = 0.1  # duration of one all-reduce in which its start and end no longer count
_SAMPLED_S = 0.5
_LARGEST = {"cpu": 1 << 24, "cuda": 1 << 28}  # bytes


def all_reduce_bandwidth(device: torch.device) -> float:
    """Return the bus bandwidth of an all-reduce in GB/s per process, bytes / s * 2 (n - 1) / n, as in nccl-tests.

    The quickest all-reduce counts: other work on the machines can only add to the time.
    """
    timed_all_reduce(torch.zeros(256, device=device))  # connects the processes
    length = 1 << 20
    best = spent = timed_all_reduce(torch.zeros(length // 4, device=device))
    while best < _LONG_ENOUGH_S and length < _LARGEST[device.type]:
        length *= 4
        best = spent = timed_all_reduce(torch.zeros(length // 4, device=device))
    values = torch.zeros(length // 4, device=device)
    while spent < _SAMPLED_S:
        seconds = timed_all_reduce(values)
        best, spent = min(best, seconds), spent + seconds
    size = dist.get_world_size()
    return length / best * 2 * (size - 1) / size / 1e9


def timed_all_reduce(values: torch.Tensor) -> float:
    """Return the seconds that an all-reduce took on the slowest process; all processes return the same."""
    device = values.device
    taken = torch.zeros(1, dtype=torch.float64, device=device)
    dist.all_reduce(taken)  # all begin together
    synchronize(device)
    begin = time.perf_counter()
    dist.all_reduce(values)
    synchronize(device)
    taken[0] = time.perf_counter() - begin
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def synchronize(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(task: dict[str, Any], store: dist.Store, device: torch.device) -> dict[str, Any]:
    """Do one measurement with other processes; `task` has prefix, rank, size and seconds."""
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(task["prefix"], store),
            rank=task["rank"],
            world_size=task["size"],
            timeout=timedelta(seconds=task["seconds"]),
        )
        return {"bandwidth": all_reduce_bandwidth(device)}
    except Exception as error:  # whatever it is, it is reported and the next task can follow
        return {"error": str(error).partition("\n")[0] or type(error).__name__}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def read_tasks(tasks: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Read tasks, also while a measurement hangs; end this process when the input ends: so has the parent."""
    for line in sys.stdin:
        tasks.put(json.loads(line))
    os._exit(0)


def main(address: str, port: str, device_type: str, local_rank: str) -> None:
    """Write that this process is ready, then do one task after another."""
    # NCCL writes to the standard output when NCCL_DEBUG is set.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        tasks: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=read_tasks, args=(tasks,), daemon=True).start()
        device = torch.device(device_type, int(local_rank)) if device_type == "cuda" else torch.device("cpu")
        torch.zeros(1, device=device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = dist.TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=15))
        print(json.dumps({"ready": True}), file=answers)
        while True:
            print(json.dumps(measure(tasks.get(), store, device)), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
