"""The garbage collection that would stop all replicas, made where it stops none.

A full collection of a process that has imported torch and Lightning looks at a million objects: 200 ms, in which the
process does nothing else (measured: it fell into the first steps of every replica that came back, and all others waited
for it). Python makes the first one when a quarter as many objects have survived as there were; after one here that is
long after the set-up. So it is made while the process is no member yet.
"""

from __future__ import annotations

import gc

_made = False


def collect_once() -> None:
    """Collect, once per process, before it joins a quorum; nothing if the script has switched the collector off."""
    global _made
    if not _made and gc.isenabled():
        _made = True
        gc.collect()
