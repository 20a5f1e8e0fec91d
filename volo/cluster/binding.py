"""Bind each rank to the CPUs, the memory and the network card nearest its GPU, before torch is imported.

    python -m volo.cluster.binding                 the table of this machine; nothing is bound
    python -m volo.cluster.binding --root DIR      of another one, whose /sys and /proc were saved in DIR

`--bind` of train.py, validate.py and generate_label.py decides (docs/binding.md):

    auto      CPUs of the GPU's NUMA node, divided among the ranks that share it, and its memory as long as there is
              some. Nothing where there is no GPU or a single NUMA node.
    cpu       the CPUs alone; without GPUs the machine's CPUs are divided among the ranks
    cpu+mem   the CPUs, and no memory but the node's
    none      nothing at all

All but `none` also name the network cards and, if several machines take part, the interface that leads to rank 0. What
the user, the launcher or NCCL's configuration has set stays. What can't be done is left out, with the reason in a line.

torchrun's `--numa-binding` binds CPUs as well, but neither memory nor cards; it needs a GPU and the numactl program,
and ends the run where the cgroup has no CPU of a node. Where it is used its CPUs are kept, and the rest is added.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tlt.errors import UserError
from tlt.io.text import table
from volo.cluster.placement import BindingPlan, Share, make_plan, variables
from volo.cluster.ranks import BOUND_GPU, local_size_from_environment, ranks_from_environment
from volo.cluster.topology import listed, numbers, read_machine, visible_gpus
from volo.config.flag_table import POSITIVE, FlagParser, Group, flag
from volo.config.flags_train import BIND

_COLUMNS = ("rank", "GPU", "PCI address", "NUMA node", "CPUs", "memory", "card", "distance")


def bind_process(args: Namespace) -> list[str]:
    """Bind this process as `--bind` says; return the lines that rank 0 logs.

    On other machines the first rank prints them to stderr. Never raises: the lines say what can't be bound.
    """
    if args.bind == "none":
        return []
    rank, local_rank, _ = ranks_from_environment(os.environ, getattr(args, "local_rank", 0))
    ranks = local_size_from_environment(os.environ)
    if ranks is None:
        lines = ["binding: nothing is bound: the launcher doesn't set LOCAL_WORLD_SIZE, the ranks of this machine"]
        return lines if rank == 0 else []
    try:
        plan = make_plan(read_machine(), args.bind, args.device, max(ranks, local_rank + 1), os.environ)
    except (OSError, ValueError, LookupError) as error:  # this kernel's files have an unknown format
        return [f"binding: nothing is bound: {type(error).__name__}: {error}"] if rank == 0 else []
    share = plan.shares[local_rank]
    if share.gpu is not None:
        os.environ[BOUND_GPU] = share.gpu.address
    added, left_out = variables(plan, local_rank, os.environ)
    added |= threads(share, os.environ)
    os.environ.update(added)
    failures = apply(share)
    if local_rank:
        for failure in failures:
            print(f"[rank {rank}] warning: {failure}", file=sys.stderr, flush=True)
        return []
    lines = describe(plan, f"{socket.gethostname()} (--bind {args.bind})", rank, added, [*left_out, *failures])
    if rank == 0:
        return lines
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    return []


def apply(share: Share) -> list[str]:
    """Set this process's CPUs and memory policy, which all threads and processes that it starts inherit.

    Returns what the kernel refused, or how its state differs from the share afterwards.
    """
    failures = []
    if share.cpus:
        try:
            for thread in os.listdir("/proc/self/task"):
                with suppress(ProcessLookupError):  # it has just ended
                    os.sched_setaffinity(int(thread), share.cpus)
        except OSError as error:
            failures.append(f"CPUs {listed(share.cpus)}: {error.strerror}")
    if share.memory != "off":
        assert share.node is not None
        try:
            set_policy(share.memory, share.node)
        except OSError as error:
            hint = "; in docker it takes --cap-add SYS_NICE" if isinstance(error, PermissionError) else ""
            failures.append(f"memory policy {share.memory} {share.node}: {error}{hint}")
    try:
        return failures or differences(share)
    except OSError as error:
        return [f"what was bound can't be checked: {error}"]


def differences(share: Share) -> list[str]:
    """Return how the kernel's state of this process differs from a share."""
    found = []
    if share.cpus and (cpus := allowed_cpus()) != share.cpus:
        found.append(f"CPUs {listed(share.cpus)} were asked for, /proc/self/status says {listed(cpus)}")
    if share.memory != "off" and (policy := get_policy()) != f"{share.memory} {share.node}":
        found.append(f"memory policy {share.memory} {share.node} was asked for, get_mempolicy says {policy}")
    return found


def allowed_cpus() -> tuple[int, ...]:
    """Return the CPUs on which the kernel lets this process run."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((numbers(line.partition(":")[2]) for line in lines if line.startswith("Cpus_allowed_list:")), ())


def threads(share: Share, env: Mapping[str, str]) -> dict[str, str]:
    """Return OMP_NUM_THREADS for a bound rank: at most its CPUs, and on the CPU one less, for data loading.

    The launcher, which knows nothing of NUMA nodes, may have set more.
    """
    cpus, given = len(share.cpus), env.get("OMP_NUM_THREADS", "")
    if cpus and given.isdigit() and int(given) > cpus:
        return {"OMP_NUM_THREADS": str(cpus)}
    if cpus and not given and share.gpu is None:
        return {"OMP_NUM_THREADS": str(max(1, cpus - 1))}
    return {}


def describe(
    plan: BindingPlan, title: str, first_rank: int, added: Mapping[str, str], left_out: Sequence[str]
) -> list[str]:
    """Return the table of a machine, or one line if nothing is bound.

    Args:
        title: Name of the machine.
        first_rank: Rank of the machine's first process in the whole run.
        added: Variables that were added to the environment of this process.
        left_out: Reasons besides those of the plan.
    """
    reasons = "; ".join([*plan.reasons, *left_out])
    shared = [f"{name}={value}" for name, value in added.items() if name != "UCX_NET_DEVICES"]
    env = [f"set on every rank here: {' '.join(shared)}"] if shared else []
    if not any(share.gpu or share.cpus for share in plan.shares):
        return [f"binding: nothing is bound: {reasons}", *env]
    rows = table([_COLUMNS, *(_row(first_rank + i, share) for i, share in enumerate(plan.shares))])
    return [f"binding on {title}:", *rows, *env, *([f"left out: {reasons}"] if reasons else [])]


def _row(rank: int, share: Share) -> tuple[str, ...]:
    gpu, near = share.gpu, share.near
    node = gpu.place.node if gpu else share.node
    return (
        str(rank),
        "-" if share.number is None else str(share.number),
        "-" if gpu is None else gpu.address,
        "-" if node is None else str(node),
        listed(share.cpus) or "as they are",
        share.memory,
        near.port.name if near else "-",
        near.level if near else "-",
    )


# Numbers of the system calls (set, get); they differ between architectures.
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
_MODES = ("default", "preferred", "bind", "interleave", "local", "preferred-many", "weighted-interleave")
_BITS = 1024  # the most nodes that any kernel supports; a kernel refuses fewer than it supports
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
_FLAGS = 0xE000  # bits that may be set in the mode that is read back


def set_policy(mode: str, node: int) -> None:
    """Take memory of `node` first ("preferred"), or of no other ("bind").

    Raises:
        OSError: The kernel has no NUMA, has no such node, or forbids it.
    """
    mask = (ctypes.c_ulong * (_BITS // _WORD))()
    mask[node // _WORD] = 1 << (node % _WORD)
    _call(0, ctypes.c_int(_MODES.index(mode)), mask, ctypes.c_ulong(_BITS))


def get_policy() -> str:
    """Return the policy in words, such as "bind 0" or "default".

    Raises:
        OSError: The kernel has no NUMA, or forbids it.
    """
    mask, mode = (ctypes.c_ulong * (_BITS // _WORD))(), ctypes.c_int()
    _call(1, ctypes.byref(mode), mask, ctypes.c_ulong(_BITS), None, ctypes.c_ulong(0))
    nodes = listed(bit for bit in range(_BITS) if mask[bit // _WORD] >> bit % _WORD & 1)
    number = mode.value & ~_FLAGS
    return f"{_MODES[number] if number < len(_MODES) else number} {nodes}".strip()


def _call(which: int, *arguments: object) -> None:
    machine = os.uname().machine
    if machine not in _CALLS:
        raise OSError(f"memory policies are not known for {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(_CALLS[machine][which]), *arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m volo.cluster.binding`: print the table."""
    group = Group(
        "Binding",
        (
            BIND,
            flag("--root", default="/", metavar="DIR", help="folder that holds the machine's sys and proc"),
            flag("--ranks", default=None, type=POSITIVE, help="processes on the machine (its GPUs)"),
            flag("--device", default=None, metavar="NAME", help="as of train.py"),
        ),
    )
    parser = FlagParser("python -m volo.cluster.binding", "[flags]", "Show how ranks would be bound.", (group,))
    try:
        args = parser.parse_args(argv)
        if not Path(args.root, "sys/devices/system").is_dir():
            raise UserError(f"--root {args.root}: there is no sys/devices/system in it; save the machine's /sys there")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    env = os.environ if args.root == "/" else {}
    machine = read_machine(args.root)
    if args.bind == "none":
        print("binding: nothing is bound: --bind none")
        return 0
    ranks = args.ranks or len(visible_gpus(machine.gpus, env)[0]) or 1
    plan = make_plan(machine, args.bind, args.device, ranks, env)
    added, left_out = variables(plan, 0, env, args.root)
    title = f"{socket.gethostname() if args.root == '/' else args.root} (--bind {args.bind}, not done)"
    print(*describe(plan, title, 0, added, left_out), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
