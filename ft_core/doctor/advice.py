"""What to do about a failure, out of the words in which it was told. Pure.

How it works. `RULES` is a table of patterns: the first that is found in the cause gives the advice. Errors of this
project say themselves what to do, and signals and the commonest errors of others have an entry each.
"""

from __future__ import annotations

import re

OWN_ERRORS = r"(?:Config|Usage|Encoding|Refused|StateLost|StateRefused|ThisMachine|Heal|NotAvailable)Error"
RULES: tuple[tuple[str, str], ...] = (
    (r"--chaos", "nothing: that was --chaos, which you asked for"),
    (r"OutOfMemoryError|CUDA out of memory",
     "the GPU's memory was full: a smaller batch, activation checkpointing, or fewer groups per GPU (--gpus)"),
    (r"DataLoader worker .*(?:bus error|shm)|insufficient shared memory|SIGBUS",
     "shared memory was full: make /dev/shm bigger (docker --shm-size; in Kubernetes an emptyDir with medium Memory), "
     "or fewer DataLoader workers"),
    (r"MemoryError|Cannot allocate memory|DefaultCPUAllocator",
     "the host's memory was full: fewer DataLoader workers or a smaller batch, or ask for more memory"),
    (r"No space left on device|\[Errno 28\]|\[Errno 122\]|Disk quota",
     "a disk is full: make room where checkpoints, logs and events go, and start the job again; it loads its newest "
     "checkpoint if the script does"),
    (r"Too many open files|\[Errno 24\]", "raise the limit of open files (ulimit -n 65536) where the job is started"),
    (r"Permission denied|Read-only file system|\[Errno 13\]|\[Errno 30\]",
     "make the path that the error names writable on every host; `ft-doctor --storage PATH` tries it"),
    (r"ModuleNotFoundError|ImportError",
     "install the same packages on every host; `ft-doctor --meet` compares them"),
    (r"FileNotFoundError|\[Errno 2\]",
     "the path that the error names is not on that host: put it there, or on storage that all share "
     "(`ft-doctor --storage PATH` tries that)"),
    (r"Address already in use|\[Errno 98\]", "another process has that port: end it, or name another port"),
    (r"no lighthouse answered|cannot be reached|Connection refused|lighthouse .*unreachable",
     "see that the lighthouse runs and that its port is open to this host: `ft-doctor` on that host tries it"),
    (r"FT_TOKEN|token", "set FT_TOKEN to the same value on all hosts and for the lighthouse"),
    (r"\bFT_TLS_|certificate|\bTLS\b", "set FT_TLS_CERT, FT_TLS_KEY and FT_TLS_CA on all hosts; ft-doctor checks them"),
    (OWN_ERRORS, "do what the error says: it names the setting and its value"),
    (r"NCCL|Xid|CUDA error|cuda runtime",
     "look at the GPUs of that host (nvidia-smi -q, dmesg | grep -i xid) and take it out if one is damaged"),
    (r"stood still, lighthouse",
     "give the lighthouse a machine, or cores, that nothing else takes; training goes on while it is away"),
    (r"taken over, lighthouse",
     "see in the log of the one that served why it ended, or what cut it off, and start it again with --peer: until it "
     "stands by, nobody takes over from the other one"),
    (r"started again, lighthouse", "nothing, if that was meant; else see in its log why the lighthouse ended"),
    (r"stands still|stalled|hung", "see the stacks in ftrun's output for where its training thread stood; what takes "
     "long belongs into manager.pause, or needs a longer --timeout"),
    (r"SIGKILL", "if nobody killed it, the kernel did for want of memory (dmesg | grep -i 'killed process'), or the "
     "scheduler for a limit of the job: see what the job may use, and use less or ask for more"),
    (r"SIGTERM|SIGHUP|SIGINT", "see who ended it: a scheduler's time limit or pre-emption sends SIGTERM, a closed "
     "terminal SIGHUP"),
    (r"SIG(?:SEGV|ABRT|ILL|FPE)", "native code crashed: the stacks are in the worker's output (PYTHONFAULTHANDLER); if "
     "it is always the same host, test its memory and GPUs"),
    (r"silent|frozen|cut off", "see what that host did then: suspended, out of memory, its disk or network stuck. If "
     "it was merely busy, raise FT_LIVENESS_S and --timeout"),
    (r"\b(?:nan|inf)\b|not finite|overflow", "the loss or a gradient was not finite: lower the learning rate, or clip"),
    (r"differ", "do what the sentence says: all groups need the same model, data and settings"),
    (r"[Cc]onnection|closed|reset|timed? ?out|unreachable",
     "see the network between the hosts that are named; `ft-doctor --meet` tries it in all directions"),
    (r"exited with code", "it is the script's error: its traceback is in the worker's output (--log-dir keeps it)"),
)  # fmt: skip
OTHERWISE = "see that group's output around that time; ft-report shows what happened before"


def advice(told: str) -> str:
    """What to do about a failure that is told like this."""
    return next((todo for pattern, todo in RULES if re.search(pattern, told)), OTHERWISE)
