"""The system calls that a sandboxed program is refused, as a filter for the kernel (seccomp, classic BPF)."""

import struct

_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000  # seccomp; the errno is added to the second
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF
_NAMESPACES, _THREAD = 0x7E020000, 0x00010000  # clone flags
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Memory outside RLIMIT_AS, namespaces, mounts, sockets, keys, other processes: nothing a program of a contest needs.
_REFUSED = {
    "x86_64": (
        *(319, 29, 30, 31, 64, 68, 240),  # memfd_create, shm*, semget, msgget, mq_open
        *(272, 308, 165, 166, 155, 161),  # unshare, setns, mount, umount2, pivot_root, chroot
        *(41, 248, 249, 250, 303, 304),  # socket, keys, file handles
        *(101, 310, 311, 312, 256, 279),  # ptrace, process_vm_*, kcmp, migrate_pages, move_pages
        *(141, 142, 144, 203, 314, 251),  # setpriority, sched_set*, ioprio_set
        *(298, 321, 323),  # perf_event_open, bpf, userfaultfd
    ),
    "aarch64": (
        *(279, 194, 195, 196, 190, 186, 180),
        *(97, 268, 40, 39, 41, 51),
        *(198, 217, 218, 219, 264, 265),
        *(117, 270, 271, 272, 238, 239),
        *(140, 118, 119, 122, 274, 30),
        *(241, 280, 282),
    ),
}
# io_uring_setup, the new mount calls, pidfd_getfd, process_madvise, memfd_secret, process_mrelease
_REFUSED_EVERYWHERE = (425, 428, 429, 430, 432, 433, 438, 440, 442, 447, 448)
_PRLIMIT = {"x86_64": 302, "aarch64": 261}  # of itself only
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_ALONE = {"x86_64": (57, 58, 62), "aarch64": (129,)}  # fork, vfork, kill: without a process namespace


def syscall_filter(machine: str, alone: bool) -> bytes:
    """Assemble the filter; empty for a machine whose numbers are not listed. `alone` also refuses new processes."""
    if machine not in _ARCHITECTURES:
        return b""

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    refuse = step(_RETURN, _REFUSE + 1)  # EPERM
    numbers = _REFUSED[machine] + _REFUSED_EVERYWHERE + (_ALONE[machine] if alone else ())
    steps = [
        *(step(_LOAD, 4), step(_EQUAL, _ARCHITECTURES[machine], 1), refuse),  # no other calling convention
        *(step(_LOAD, 0), step(_AT_LEAST, 0x40000000, 0, 1), refuse),
        *(step(_EQUAL, _CLONE3, 0, 1), step(_RETURN, _REFUSE + 38)),  # ENOSYS: libc falls back to clone
    ]
    for number in numbers:
        steps += [step(_EQUAL, number, 0, 1), refuse]
    steps += [step(_EQUAL, _PRLIMIT[machine], 0, 4), step(_LOAD, 16), step(_EQUAL, 0, 1), refuse, step(_LOAD, 0)]
    steps += [step(_EQUAL, _CLONE[machine], 1), step(_RETURN, _ALLOW), step(_LOAD, 16)]
    steps += [step(_ANY_BIT, _THREAD, 1), refuse] if alone else [step(_ANY_BIT, _NAMESPACES, 0, 1), refuse]
    return b"".join([*steps, step(_RETURN, _ALLOW)])
