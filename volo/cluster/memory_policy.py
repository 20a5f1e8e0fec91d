"""From which NUMA nodes the kernel takes the memory of this thread, and of all that it starts (`man set_mempolicy`).

numactl does the same with `--membind` and `--preferred`; it isn't everywhere, and these are two system calls.
"""

from __future__ import annotations

import ctypes
import os

from volo.cluster.topology import listed

# Numbers of the system calls (set, get); they differ between architectures.
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
_MODES = ("default", "preferred", "bind", "interleave", "local", "preferred-many", "weighted-interleave")
_BITS = 1024  # the most nodes a kernel is built for; fewer than it is built for are refused
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
_FLAGS = 0xE000  # may be set in the mode that is read back


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
        OSError: As `set_policy`.
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
