"""Warm standby: what can be preloaded, and real processes that must be indistinguishable from python's own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.launch.standby import worker
from ft_core.launch.standby.imports import ALWAYS, Preload, plan

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# ------------------------------------------------------------------------------------------------------------ preload


def planned(folder: Path, source: str) -> tuple[str, ...]:
    script = folder / "train.py"
    script.write_text(source)
    found = plan(str(script), False, False)
    assert found.reason == ""
    return found.imports


def test_top_level_imports_in_order_after_torch_each_once(tmp_path: Path) -> None:
    source = """
from __future__ import annotations
import os, a.b as x
from a.b import c
from . import sibling
import torch
with open("f") as f:
    import inside_with
try:
    import fast
    from d.e import *
except ImportError:
    import slow
else:
    import ok
import __main__
"""
    assert planned(tmp_path, source) == (*ALWAYS, "os", "a.b", "inside_with", "fast", "d.e", "ok")


def test_what_is_taken_out_of_a_module_is_named_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from pkg import part, lazy as x\nfrom other import *\nfrom json import loads")
    found = plan(str(script), False, False)
    assert found.imports == (*ALWAYS, "pkg", "other", "json")
    assert found.names == ("pkg:part", "pkg:lazy", "json:loads")


def test_what_may_not_happen_is_left_out(tmp_path: Path) -> None:
    source = """
if TYPE_CHECKING:
    import a
if sys.argv:
    import b
def f():
    import c
class C:
    import d
for x in y:
    import e
if __name__ == "__main__":
    import g
"""
    assert planned(tmp_path, source) == ALWAYS


def test_warnings_of_the_parser_are_left_to_the_worker(tmp_path: Path) -> None:
    assert planned(tmp_path, "x = '\\d'\nx is 1\n") == ALWAYS


def test_a_module_is_found_without_being_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inner = tmp_path / "pkg" / "inner"
    inner.mkdir(parents=True)
    for name in ("pkg/__init__.py", "pkg/inner/__init__.py"):
        (tmp_path / name).write_text("raise SystemExit('executed')")
    (inner / "run.py").write_text("from ..deep import x\nfrom . import y\nimport json")
    (inner / "__main__.py").write_text("import re")
    (tmp_path / "flat.py").write_text("import csv")
    (tmp_path / "space").mkdir()
    (tmp_path / "space" / "run.py").write_text("import bz2")
    assert plan("pkg.inner.run", True, False) == Preload(
        (*ALWAYS, "pkg", "pkg.inner", "pkg.deep", "json"), ("pkg.deep:x", "pkg.inner:y")
    )
    assert plan("pkg.inner", True, False) == Preload((*ALWAYS, "pkg", "pkg.inner", "re"))
    assert plan("flat", True, False) == Preload((*ALWAYS, "csv"))
    assert plan("space.run", True, False) == Preload((*ALWAYS, "space", "bz2"))
    assert plan("json.tool", True, False).imports[:3] == (*ALWAYS, "json")
    assert plan("timeit", True, False).imports[:3] == (*ALWAYS, "gc")


def test_what_cannot_be_preloaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("x = 1\ndef (")
    (tmp_path / "nul.py").write_bytes(b"x = 1\0")
    (tmp_path / "run.sh").write_text("true")
    assert plan("./train", False, True).reason == "--no-python: ./train is not run by Python"
    assert plan("run.sh", False, False).reason == "run.sh is not a .py file"
    assert plan("none.py", False, False).reason == "none.py cannot be read: No such file or directory"
    assert plan("bad.py", False, False).reason == "bad.py line 2: invalid syntax"
    assert plan("nul.py", False, False).reason.startswith("nul.py ")
    assert plan("no.such", True, False).reason == "-m no.such: there is no such module in a .py file"
    assert plan("sys", True, False).reason == "-m sys: there is no such module in a .py file"


# ------------------------------------------------------------------------------------------------------ the processes


@dataclass
class Ended:
    status: int
    out: str
    err: str


class Standby:
    """One process of worker.py, and ftrun's side of its socket."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        address = str(folder / "s")
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(address)
            door.listen(1)
            door.settimeout(30)
            self.process = subprocess.Popen(
                [sys.executable, "-u", worker.__file__],
                env={**environment, "FTRUN_STANDBY": address},
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self.socket, _ = door.accept()
        self.socket.settimeout(30)
        self.lines = self.socket.makefile("r")

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def load(self, script: str, *imports: str, module: bool = False) -> dict[str, Any]:
        self.send({"script": script, "module": module, "imports": imports})
        report: dict[str, Any] = json.loads(self.lines.readline())
        return report

    def run(self, *argv: str, env: dict[str, str]) -> None:
        self.send({"env": env, "argv": argv, "cwd": str(self.folder)})
        assert self.lines.readline() == "", "the worker closes the socket"

    def end(self) -> Ended:
        out, err = self.process.communicate(timeout=30)
        return Ended(self.process.returncode, out, err)

    def close(self) -> None:
        self.lines.close()
        self.socket.close()
        self.process.kill()
        self.process.communicate()


BASE = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_"))}


@pytest.fixture
def standby(tmp_path: Path) -> Iterator[Standby]:
    process = Standby(tmp_path, BASE)
    yield process
    process.close()


def warmly(standby: Standby, *argv: str, module: bool = False) -> Ended:
    report = standby.load(argv[0], module=module)
    assert report["failed"] == {}
    standby.run(*argv, env=BASE)
    return standby.end()


def coldly(folder: Path, *argv: str, module: bool = False) -> Ended:
    command = [sys.executable, "-u", *(["-m"] if module else []), *argv]
    ran = subprocess.run(command, env=BASE, cwd=folder, capture_output=True, text=True, timeout=30, check=False)
    return Ended(ran.returncode, ran.stdout, ran.stderr)


SHOW = """
import __main__, pickle, sys
class Thing: pass
names = ("__name__", "__doc__", "__package__", "__file__", "__cached__")
print({name: globals()[name] for name in names}, type(__loader__), __spec__ and __spec__.name, sorted(globals()))
print(sys.argv, sys.orig_argv, sys.path, type(__builtins__), __annotations__, sys.modules["__main__"].Thing is Thing)
print(pickle.loads(pickle.dumps(Thing())).__class__ is Thing, __main__.__dict__ is globals())
"""
SCRIPTS = {
    "what it sees of itself": SHOW,
    "nothing": "",
    "status": "raise SystemExit(7)",
    "message": "import sys; sys.exit('over')",
    "none": "import sys; sys.exit()",
    "error": "def f(x):\n    1 / x\nf(0)",
    "chained": "try:\n    {}[1]\nexcept KeyError as e:\n    raise ValueError('x') from e",
    "syntax": "def (:",
    "encoding": "# -*- coding: latin-1 -*-\nprint('\\xe9')",
    "failing import": "import no_such_module",
    "inner syntax error": "import broken",
    "own hook": "import sys\nsys.excepthook = lambda k, e, tb: print('hook', e, tb.tb_lineno, tb.tb_next)\n1 / 0",
    "bad hook": "import sys\nsys.excepthook = 3\n1 / 0",
    "interrupt": "raise KeyboardInterrupt",
    "killed": "import os\nos.kill(os.getpid(), 9)",
    "at exit": "import atexit, threading\natexit.register(print, 'atexit', __name__)\n"
    "threading.Thread(target=lambda: print('thread', __import__('__main__').__file__)).start()\n1 / 0",
    "faulthandler": "import faulthandler\nprint(faulthandler.is_enabled())",
    "dataclass": "from __future__ import annotations\nimport dataclasses, typing\n@dataclasses.dataclass\n"
    "class A:\n    x: typing.ClassVar[int] = 1\n    y: int = 2\nprint(A(3), typing.get_type_hints(A))",
}


@pytest.mark.process
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_python_runs_it(standby: Standby, name: str) -> None:
    folder = standby.folder
    (folder / "sub").mkdir()
    (folder / "sub" / "train.py").write_text(SCRIPTS[name])
    (folder / "sub" / "broken.py").write_text("def (:")
    argv = ("sub/train.py", "--lr", "0.1")
    cold = coldly(folder, *argv)
    result = warmly(standby, *argv)
    if name == "bad hook":  # python's own complaint about the hook has a frame of ours in it
        assert (result.status, result.out) == (cold.status, cold.out)
        assert "TypeError: 'int' object is not callable" in result.err
        return
    assert result == cold
    assert "standby/worker.py" not in result.err


@pytest.mark.process
@pytest.mark.parametrize("name", ["what it sees of itself", "status", "error"])
@pytest.mark.parametrize("module", ["pkg.run", "pkg"])
def test_a_module_runs_as_python_runs_it(standby: Standby, name: str, module: str) -> None:
    folder = standby.folder
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("")
    for file in ("run.py", "__main__.py"):
        (folder / "pkg" / file).write_text(SCRIPTS[name])
    cold = coldly(folder, module, "--lr", module=True)
    cold.err = "".join(line for line in cold.err.splitlines(True) if not line.startswith('  File "<frozen runpy>"'))
    assert warmly(standby, module, "--lr", module=True) == cold


@pytest.mark.process
def test_what_is_not_there_ends_as_with_python(standby: Standby) -> None:
    cold = coldly(standby.folder, "no/such.py")
    assert warmly(standby, "no/such.py") == cold
    assert cold.status == 2


@pytest.mark.process
@pytest.mark.parametrize("module", ["no_such", "no_such.module", "json.no_such"])
def test_a_module_that_is_not_there_ends_as_with_python(standby: Standby, module: str) -> None:
    result = warmly(standby, module, module=True)
    assert (result.status, result.err) == (1, f"{sys.executable}: No module named {module}\n")


@pytest.mark.process
@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("module", [False, True])
def test_children_find_the_script(standby: Standby, method: str, module: bool) -> None:
    (standby.folder / "train.py").write_text(
        "import multiprocessing, sys\n"
        "class Thing:\n    pass\n"
        "def child(queue):\n    queue.put((__name__, sys.argv[1:], Thing()))\n"
        "if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context({method!r})\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=child, args=(queue,))\n"
        "    process.start()\n"
        "    name, argv, thing = queue.get(timeout=20)\n"
        "    process.join()\n"
        "    print(name, argv, type(thing) is Thing, process.exitcode)\n"
    )
    result = warmly(standby, "train" if module else "train.py", "a", module=module)
    name = "__mp_main__" if method == "spawn" else "__main__"
    # A spawned child sends its __mp_main__.Thing, which is the same class seen from there.
    assert (result.out, result.err, result.status) == (f"{name} ['a'] True 0\n", "", 0)


@pytest.mark.process
def test_modules_are_imported_once_and_in_advance(standby: Standby) -> None:
    (standby.folder / "model.py").write_text("print('imported')")
    (standby.folder / "train.py").write_text("print('run')\nimport model")
    report = standby.load("train.py", "model")
    assert report.keys() == {"ready", "pid", "failed", "seconds"}
    assert (report["ready"], report["pid"], report["failed"]) == (True, standby.process.pid, {})
    standby.run("train.py", env=BASE)
    assert standby.end() == Ended(0, "imported\nrun\n", "")


@pytest.mark.process
def test_parts_that_a_package_loads_when_asked_are_loaded(standby: Standby) -> None:
    package = standby.folder / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text(
        "def __getattr__(name):\n    if name != 'lazy': raise AttributeError(name)\n    print('lazy'); return 1"
    )
    (package / "part.py").write_text("print('part')")
    (standby.folder / "train.py").write_text("print('run')\nfrom pkg import part, lazy")
    assert standby.load("train.py", "pkg", "pkg:part", "pkg:lazy", "pkg:nothing")["failed"] == {
        "pkg": "ModuleNotFoundError: No module named 'pkg.nothing'"
    }
    standby.run("train.py", env=BASE)
    assert standby.end().out.splitlines()[:3] == ["part", "lazy", "run"]


@pytest.mark.process
def test_imports_that_fail_are_told_and_left_to_the_script(standby: Standby) -> None:
    (standby.folder / "needy.py").write_text("import os\nrank = int(os.environ['RANK'])")
    (standby.folder / "leaves.py").write_text("raise SystemExit(3)")
    (standby.folder / "train.py").write_text("import needy, json\nprint(needy.rank)")
    report = standby.load("train.py", "needy", "leaves", "no_such", "json")
    assert report["failed"] == {
        "needy": "KeyError: 'RANK'",
        "leaves": "SystemExit: 3",
        "no_such": "ModuleNotFoundError: No module named 'no_such'",
    }
    standby.run("train.py", env={**BASE, "RANK": "5"})
    assert standby.end() == Ended(0, "5\n", "")


@pytest.mark.process
def test_the_environment_is_replaced_but_for_what_imports_set(tmp_path: Path) -> None:
    process = Standby(tmp_path, {**BASE, "OLD": "1", "CHANGED": "1", "GONE": "1"})
    try:
        (tmp_path / "lib.py").write_text(
            "import os\nos.environ.setdefault('A', 'lib')\nos.environ.setdefault('B', 'lib')\n"
            "os.environ['CHANGED'] = 'lib'\ndel os.environ['GONE']"
        )
        (tmp_path / "train.py").write_text(
            "import os, subprocess\nprint(sorted(os.environ.items()))\nprint(subprocess.getoutput('echo $B $OLD'))"
        )
        process.load("train.py", "lib")
        process.run("train.py", env={"B": "ftrun", "CHANGED": "1", "GONE": "1"})
        ended = process.end()
    finally:
        process.close()
    assert ended == Ended(0, "[('A', 'lib'), ('B', 'ftrun'), ('CHANGED', 'lib')]\nftrun\n", "")


@pytest.mark.process
def test_faulthandler_as_the_worker_asks(standby: Standby) -> None:
    (standby.folder / "train.py").write_text(SCRIPTS["faulthandler"])
    standby.load("train.py")
    standby.run("train.py", env={**BASE, "PYTHONFAULTHANDLER": "1"})
    assert standby.end() == Ended(0, "True\n", "")


@pytest.mark.process
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_standby_that_nobody_needs_ends_quietly(standby: Standby, when: str) -> None:
    if when == "after":
        standby.load("train.py", "json")
    standby.lines.close()
    standby.socket.close()
    assert standby.end() == Ended(0, "", "")


@pytest.mark.process
def test_a_standby_whose_ftrun_is_gone_ends_quietly(tmp_path: Path) -> None:
    command = [sys.executable, "-u", worker.__file__]
    env = {**BASE, "FTRUN_STANDBY": str(tmp_path / "none")}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.process
def test_ctrl_c_ends_the_worker_but_not_the_standby(standby: Standby) -> None:
    (standby.folder / "train.py").write_text("import signal\nprint('runs')\nsignal.pause()")
    standby.load("train.py")
    standby.process.send_signal(signal.SIGINT)
    standby.run("train.py", env=BASE)
    assert standby.process.stdout is not None
    assert standby.process.stdout.readline() == "runs\n"
    standby.process.send_signal(signal.SIGINT)
    ended = standby.end()
    assert ended.status == -signal.SIGINT
    assert ended.err.splitlines()[0] == "Traceback (most recent call last):"
    assert ended.err.splitlines()[-1] == "KeyboardInterrupt"
    assert "standby/worker.py" not in ended.err


@pytest.mark.process
def test_an_import_that_takes_the_gpu_makes_the_standby_useless(standby: Standby) -> None:
    (standby.folder / "torch").mkdir()
    (standby.folder / "torch" / "__init__.py").write_text("import torch.cuda")
    (standby.folder / "torch" / "cuda.py").write_text("def is_initialized(): return True")
    standby.send({"script": "train.py", "module": False, "imports": ["torch"]})
    assert standby.lines.readline() == ""
    ended = standby.end()
    assert ended.status == 1
    assert ended.err == ("ftrun standby: an import initialises CUDA before its GPU is known; run without --standby\n")
