"""The processes of a run: this process's rank and device, how all of them meet, and the collectives of the programs.

NCCL connects GPUs, gloo connects CPUs. Ranks exchange JSON, so that nothing from another process is unpickled.
"""

from __future__ import annotations

import gc
import ipaddress
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from tlt.errors import UserError
from tlt.io.files import os_errors_as
from tlt.io.jobs import cpu_share
from volo.cluster.launch import Launch, launch_of
from volo.cluster.topology import interface_to, listed, own_address
from volo.cluster.watchdog import Watchdog

T = TypeVar("T")
_POLL_S = 0.1
_ANSWER = timedelta(seconds=60)  # timeout of requests to torch's key-value store
_BACKLOG = 4096  # connections that may wait: all ranks of a large run connect at once
_MESH_S = 60.0  # time limit for connecting the ranks with each other after they have met
JOIN_S = 480.0  # time limit for all ranks to come; together with _MESH_S less than the watchdog's START_S
_GONE_S = 5.0  # time limit for reaching a store that was there before
_DEVICES = "cpu, cuda, cuda:N, mps and xpu, as far as the machine has them"
LEFT = "left"  # key that a node sets if it ends before the ranks have met
_GONE = re.compile(r"Connection (closed|reset) by|Broken pipe|Socket closed|Connection refused", re.IGNORECASE)


class RankLost(UserError):
    """Another rank or node has ended or did not come, so that this one can't go on."""

    exit_code = 5


_own_group = False  # whether `init_world` made the process group


@dataclass(frozen=True)
class World:
    """The place of this process among all processes of the run."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    tensor_parallel: int = 1  # neighbouring ranks that see the same images and draw the same random numbers

    @property
    def is_primary(self) -> bool:
        """Whether this is rank 0, the one process of the run that prints and writes."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Rank of this process's group among the groups that see different images."""
        return self.rank // self.tensor_parallel

    @property
    def data_size(self) -> int:
        """Number of groups of processes that see different images."""
        return self.size // self.tensor_parallel


def restarts() -> int:
    """Return how many times the launcher has restarted these processes."""
    return sum(int(os.environ.get(name) or 0) for name in ("LAUNCH_RESTARTS", "TORCHELASTIC_RESTART_COUNT"))


def launch_id() -> str | None:
    """Return the launcher's run id, or None without a launcher; torchrun's is "none" unless the user sets it."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    return run_id if run_id != "none" else None


def choose_device(requested: str | None, local_rank: int) -> torch.device:
    """Resolve `--device`: None or "auto" is this rank's GPU, or the CPU if there is no GPU.

    Every program calls this, so that all of them compute float32 on a GPU in the same way. Raise UserError if the
    machine doesn't have that GPU, the device type is not supported, or the machine has GPUs that torch can't use and
    the user did not ask for the CPU.
    """
    name = requested or "auto"
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") is None:
            why = "is built without CUDA" if torch.version.cuda is None else "can't use them (see nvidia-smi)"
            raise UserError(
                f"this machine has NVIDIA GPUs, and torch {torch.__version__} {why}: mend that, or --device cpu"
            )
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device {name}: there are {_DEVICES}") from error
    if device.type not in ("cpu", "cuda"):
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if device.type not in ("mps", "xpu") or accelerator is None or accelerator.type != device.type:
            raise UserError(f"--device {name}: there are {_DEVICES}")
        if launch_of(os.environ).size > 1:
            raise UserError(f"--device {name}: several processes need cuda or cpu")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        number = 0 if count == 1 else local_rank  # a launcher may show each rank only its own GPU
        device = torch.device("cuda", number if device.index is None else device.index)
        if device.index is None or device.index >= count:
            numbers = f"this machine has {count}, cuda:0 to cuda:{count - 1}" if count else "torch finds none here"
            raise UserError(f"--device {name}: there is no GPU cuda:{device.index}, {numbers}; --device cpu needs none")
        torch.cuda.set_device(device)
        # As in timm's programs, float32 products use TF32, and cuDNN chooses its algorithms by timing them.
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    return device


def init_world(
    device: str | None = None, local_rank: int = 0, timeout_s: float = 600.0, join_s: float | None = None
) -> World:
    """Join the other processes, if there are any: those that the launcher started, or those of a process group that
    exists already (Ray Train, a notebook). Such a group is left as it is, and needs gloo. Collectives time out after
    `timeout_s` seconds; the other ranks must come within `join_s`, by default as many (ranks of `volo launch` within 60
    s).

    Raise UserError if the launcher's variables contradict each other, MASTER_ADDR is not set on several nodes, two
    ranks would share a GPU, or `local_rank` was given without a launcher; RankLost if ranks did not come in time, or
    can't reach each other.
    """
    launch = launch_of(os.environ, local_rank)
    group_exists = dist.is_initialized()
    if group_exists:
        launch = replace(launch, rank=dist.get_rank(), size=dist.get_world_size())
    elif local_rank and launch.size == 1:
        raise UserError(
            f"--local-rank {local_rank} has no effect without a launcher that sets RANK and WORLD_SIZE, as torchrun "
            f"does: leave it out (--device cuda:{local_rank} takes that GPU)"
        )
    elif not 0 <= launch.rank < launch.size:
        raise UserError(f"of WORLD_SIZE={launch.size} processes RANK must number each from 0 on, as torchrun does")
    world = World(launch.rank, launch.local_rank, launch.size, choose_device(device, launch.local_rank))
    # Otherwise NCCL's ranks wait for each other within the capture of a CUDA graph, where one of them may have failed.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if launch.size > 1 and not group_exists:
        own_gpu = device in (None, "auto", "cuda") and world.device.type == "cuda"
        with lost_rank_explained():
            launch = _join(world, launch, own_gpu, timeout_s, timeout_s if join_s is None else join_s)
    limit_threads(world.device, launch)
    return world


def _join(world: World, launch: Launch, own_gpu: bool, timeout_s: float, join_s: float) -> Launch:
    """Meet and connect all ranks; return `launch` completed by what the meeting has shown. This thread never waits
    inside torch, where signals are not handled. `own_gpu` says that no other rank may use this rank's GPU."""
    global _own_group
    if launch.address is None and not launch.one_machine:
        raise UserError(
            "MASTER_ADDR is not set: export the first node's address before srun or mpirun, or start with torchrun"
        )
    address = launch.address or "127.0.0.1"
    # `volo launch` starts the ranks of all nodes together.
    until = time.monotonic() + (_MESH_S if "LAUNCH_PID" in os.environ else join_s)
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # the agent made its store before this process
    if world.rank == 0 and not by_agent:
        store: dist.Store = serve(address, launch.port, other_machines=not launch.one_machine)
    else:
        store = connect(address, launch.port, min(until, time.monotonic() + _GONE_S) if by_agent else until, "rank")
    store = start_of(store, launch_id() or "", restarts())
    gpu = str(getattr(torch.cuda.get_device_properties(world.device), "uuid", "")) if own_gpu else ""
    store.set(f"place/{world.rank}", json.dumps([own_address(address), gpu]))
    meet(store, "rank", world.rank, world.size, until)
    places, gpus = zip(*map(json.loads, store.multi_get([f"place/{rank}" for rank in range(world.size)])), strict=True)
    if shared := [rank for rank, gpu_id in enumerate(gpus) if gpu_id and gpus.count(gpu_id) > 1]:
        raise UserError(f"ranks {listed(shared)} would share a GPU: start as many processes as there are GPUs")
    _own_group = True
    # The first machine's own name often is a loopback address there. By default gloo uses the host name's interface.
    if interface := "lo" if launch.one_machine else interface_to(address) or interface_to(places[-1] or address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if launch.one_machine:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    connecting = ThreadPoolExecutor(1).submit(_connect_all, store, world, timeout_s)
    until = time.monotonic() + _MESH_S
    while not connecting.done() and time.monotonic() < until:
        time.sleep(_POLL_S)  # result(_MESH_S) would not handle a signal that another thread receives
    try:
        connecting.result(0)
    except (RuntimeError, TimeoutError) as error:
        why = str(error).partition("\n")[0] or f"not within {_MESH_S:g} s"
        message = f"the ranks have met, but can't connect: one has ended, or a firewall is between them ({why})"
        raise RankLost(message) from error
    return replace(launch, local_size=launch.local_size or places.count(places[world.rank]))


def _connect_all(store: dist.Store, world: World, timeout_s: float) -> None:
    # What the ranks agree on, for example whether to stop, goes over gloo, from CPU to CPU: it waits for no GPU.
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    limit = timedelta(seconds=_MESH_S)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=limit)
    wait_for_hosts()
    # Older torch has only the private function.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=timeout_s))


def start_of(store: dist.Store, name: str, restart: int) -> dist.PrefixStore:
    """Return the part of a store for one start of the processes; torchrun and earlier starts use the same store."""
    return dist.PrefixStore(f"{name}/{restart}", store)


def serve(address: str, port: int, other_machines: bool = False) -> dist.TCPStore:
    """Return torch's key-value store, in which ranks meet. It listens only at this address, while torch's own listens
    at all addresses; port 0 takes a free port. If `other_machines` must reach it, and the address is loopback, as
    Debian resolves a machine's own name, the store listens at all addresses. Raise UserError if the port is in use, or
    this machine doesn't have the address."""
    remedy = "give the IP address of the first node as MASTER_ADDR; where the port is in use, another MASTER_PORT"
    with os_errors_as(lambda e: f"can't listen at {address}, port {port} ({e.strerror}): {remedy}"):
        host = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
        if other_machines and ipaddress.ip_address(host).is_loopback:
            host = "::" if ":" in host else "0.0.0.0"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, None, True, _ANSWER, wait_for_workers=False, master_listen_fd=listener.detach())


def connect(address: str, port: int, until: float, what: str) -> dist.TCPStore:
    """Return the store that listens there. Wait for it until `until` (monotonic seconds); `what` is "rank" or "node".
    Raise RankLost if nothing answers in time."""
    while time.monotonic() < until:
        try:
            # torch's client would wait for the server without handling signals, so a plain socket waits.
            socket.create_connection((address, port), timeout=2).close()
            return dist.TCPStore(address, port, None, False, _ANSWER, wait_for_workers=False)
        except (OSError, dist.DistError):
            time.sleep(_POLL_S)
    raise RankLost(
        f"{what} 0 did not answer at {address}:{port} in time: is it started there, with the same MASTER_ADDR and "
        "MASTER_PORT, and does a firewall keep the port shut?"
    )


def meet(store: dist.Store, what: str, number: int, size: int, until: float, name: str = "here") -> None:
    """Register as number `number` of `size`, and wait for the others or LEFT; the store ends with number 0. Raise
    RankLost, which names them, if some have not come by `until`; UserError if another process with another name has
    registered with this number."""
    try:
        if store.compare_set(f"{what}/{number}", "", name).decode() != name:
            raise UserError(f"another machine has joined as {what} {number}, too: each needs its own number")
        store.add(what, 1)
        while (arrived := store.add(what, 0)) < size and time.monotonic() < until and not store.check([LEFT]):
            time.sleep(_POLL_S)
        missing = [other for other in range(size) if arrived < size and not store.check([f"{what}/{other}"])]
    except dist.DistError:
        missing = [0]
    if missing:
        raise RankLost(f"{what} {', '.join(map(str, missing))} did not come in time: see what was printed there")


def limit_threads(device: torch.device, launch: Launch) -> None:
    """Limit torch's threads to this rank's share of the CPUs; on a CPU device leave one CPU for data loading.

    The user's OMP_NUM_THREADS takes precedence. Oversubscribed cores are many times slower. The ranks of a machine
    share the CPUs of their parent process, unless the launcher has given each rank CPUs of its own (srun --cpu-bind,
    mpirun --bind-to).
    """
    if launch.threads_set:
        return
    torch.set_num_threads(cpu_share(launch.local_size or 1, free=int(device.type == "cpu")))


@contextmanager
def lost_rank_explained() -> Iterator[None]:
    """Turn torch's error about a broken connection to another rank, or to the store, into a RankLost."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistNetworkError) or (dist.is_initialized() and _GONE.search(str(error))):
            raise RankLost("another rank has ended: what it said, or the log of its machine, tells why") from error
        raise


def shut_down() -> None:
    """Leave the process group if `init_world` made it; free what refers to a caller's group, but keep the group.

    gloo's threads end with the group. One that is still there when Python ends may free a tensor and abort the process.
    The model of a run holds the group until the garbage collector frees its reference cycles.
    """
    global _own_group
    if dist.is_initialized():
        gc.collect()
    if _own_group:
        dist.destroy_process_group()
    _own_group = False


def in_own_group() -> bool:
    """Return whether this process is in a process group that `init_world` made."""
    return _own_group


def leave_together(watchdog: Watchdog) -> None:
    """Leave the process group once no rank needs it: torchrun ends the other ranks as soon as one has left."""
    wait_for_hosts()  # the watchdog still watches, since rank 0 may be writing
    watchdog.end()
    shut_down()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of `values` over all ranks, the same tensor on every rank."""
    if dist.is_initialized():
        values = values.clone()
        dist.all_reduce(values)
    return values


def max_over_ranks(value: int) -> int:
    """Return the largest `value` of all ranks. The hosts wait for each other, but not for their GPUs."""
    if not dist.is_initialized():
        return value
    largest = torch.tensor(value)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def from_primary(value: T) -> T:
    """Return rank 0's `value` on every rank. The value must survive JSON unchanged."""
    if not dist.is_initialized():
        return value
    return from_all(value if dist.get_rank() == 0 else None)[0]  # type: ignore[return-value]


def from_all(value: T) -> list[T]:
    """Return the values of all ranks on every rank, in the order of ranks. They must survive JSON unchanged."""
    if not dist.is_initialized():
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    padded = torch.full([max_over_ranks(len(text))], ord(" "), dtype=torch.uint8)
    padded[: len(text)] = text
    texts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(texts, padded)
    return [json.loads(bytes(row.numpy())) for row in texts]


def wait_for_hosts() -> None:
    """Wait until every rank has called this, but not for GPUs. Signals are handled, unlike in torch's barrier."""
    if dist.is_initialized():
        work = dist.all_reduce(torch.ones(()), async_op=True)
        while not work.is_completed():
            time.sleep(0.02)
        work.wait()


@contextmanager
def primary_first() -> Iterator[None]:
    """Run the block on rank 0 first, then on the other ranks. A UserError of rank 0 is raised on every rank."""
    primary = not dist.is_initialized() or dist.get_rank() == 0
    failure: str | None = None
    if primary:
        try:
            yield
        except UserError as error:
            failure = str(error)
    failure = from_primary(failure)
    if failure is not None:
        raise UserError(failure)
    if not primary:
        yield
