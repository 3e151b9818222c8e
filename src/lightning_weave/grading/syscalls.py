"""The system calls that sandboxed programs may not make, as a kernel filter (seccomp, classic BPF)."""

import struct

# seccomp
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000  # plus the errno
# classic BPF
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
# clone flags
_NAMESPACES = 0x7E020000
_THREAD = 0x00010000
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Memory outside RLIMIT_AS, namespaces, mounts, sockets, keys, other processes: contest programs need none of these.
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
    """Assemble the filter; empty for other architectures. `alone` also refuses new processes."""
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
