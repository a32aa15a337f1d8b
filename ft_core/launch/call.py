"""A worker that is a function instead of a script: `python -m ft_core.launch.call FOLDER`, started by `library`.

FOLDER holds what to call. Left there for the agent: `result-RANK` or `error-RANK`, written whole or not at all. It is
the agent's own temporary directory, which only its user can write to, so what lies there may be unpickled.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import sys
from typing import Any

CALL = "call"


def put(folder: str, name: str, value: object) -> None:
    """Write a value under a name. Raises what pickle does if it cannot be written."""
    data = pickle.dumps(value)
    path = os.path.join(folder, name)
    with open(f"{path}.{os.getpid()}", "wb") as file:
        file.write(data)
    os.replace(file.name, path)


def get(folder: str, name: str) -> Any:
    """What was put there; None if nothing was."""
    try:
        with open(os.path.join(folder, name), "rb") as file:
            return pickle.load(file)
    except FileNotFoundError:
        return None


def main(folder: str) -> None:
    """Call it, as rank RANK of this group. Raises what it raises, which is left in the folder as well."""
    surroundings, what = get(folder, CALL)
    multiprocessing.spawn.prepare(surroundings)  # sys.path, and the caller's script for functions that are in it
    function, args = pickle.loads(what)
    rank = os.environ["RANK"]
    try:
        put(folder, f"result-{rank}", (function(*args),))
    except Exception as error:
        try:
            put(folder, f"error-{rank}", error)
        except Exception as unsendable:  # noqa: BLE001 - told in its place
            put(folder, f"error-{rank}", RuntimeError(f"{type(error).__name__}: {error} (not sent: {unsendable})"))
        raise


if __name__ == "__main__":
    main(sys.argv[1])
