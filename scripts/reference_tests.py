"""The reference implementation's own tests, run with our names in place of its own; called by check-reference-tests.

How it works: the test files come out of the wheel in the package index into a folder of their own, with `torchft` in
their imports replaced by `ft_core` (`SWAPS`). What cannot mean anything here is listed in
`reference_tests_skipped.txt`: a pattern of test names and a reason on each line. `LOOSENED` is for tests that are run
although one line of them asks for the reference's own words. Everything else has to pass as it is. A line of either
list that fits nothing is an error, so both stay true. Each file, and each test in `ALONE`, has a pytest of its own.
"""

from __future__ import annotations

import collections
import fnmatch
import itertools
import os
import pathlib
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[1]
VERSION = "0.2.0"
CACHE = ROOT / ".cache" / "reference-tests"
SKIPPED = pathlib.Path(__file__).with_name("reference_tests_skipped.txt")
LIMIT_S = 600.0
SWAPS = (
    (r"\btorchft\._torchft\b", "ft_core.coordination"),
    (r"\bfrom torchft\.work import _DummyWork\b", "from ft_core.process_group import DoneWork as _DummyWork"),
    (r"^(from torchft\.futures import \()\n    _TIMEOUT_MANAGER,", r"_TIMEOUT_MANAGER = Mock()\n\1"),
    (r"^from torchft\.manager import _ManagedWork, Manager$", "from ft_core.manager import Manager"),
    (
        r"^from torchft\.process_group import \(\n    _ErrorSwallowingWork,",
        "from ft_core.process_group.wrappers.error_swallowing import _SwallowingWork as _ErrorSwallowingWork\n"
        "from ft_core.process_group import (",
    ),
    (r"\bfrom torchft\b", "from ft_core"),
    (r"\bimport torchft\b", "import ft_core"),
    (r"""(?<=["'])torchft\.""", "ft_core."),
)  # fmt: skip
"""What is replaced, in this order: imports, and the names of modules in mocks."""
ALONE = "process_group_test.py::*resiliency*"
"""They use the groups of the test before, which have been shut down; here a group that was shut down stays so."""


@dataclass(frozen=True)
class Skip:
    """Tests that are not run, and why."""

    pattern: str
    reason: str

    def fits(self, name: str) -> bool:
        """Is this test ("file.py::Class::test") one of them?"""
        return fnmatch.fnmatchcase(name, self.pattern)


@dataclass(frozen=True)
class Loosened:
    """A piece of a test's text that is replaced before it is run, and why."""

    file: str
    old: str
    new: str
    reason: str


LOOSENED = (
    Loosened(
        "manager_integ_test.py", '"status: Cancelled, message.*Timeout expired"', '"within"',
        "the words of the reference's gRPC library; that it is a TimeoutError, within a second, is checked",
    ),
    Loosened(
        "process_group_test.py", '"(timeout after 10ms|Socket Timeout)"', '"(no store answers|did not form in time)"',
        "the words of torch's store client",
    ),
    Loosened(
        "process_group_test.py", '(RuntimeError, "aborted")', '(RuntimeError, "failed")',
        "errored() is the error itself here, not that the group was aborted for it",
    ),
    Loosened(
        "process_group_test.py", "        cls.pg_pool: List[ProcessGroup] = []\n",
        '        cls.pg_pool = []\n        cls.together = __import__("threading").Barrier(cls.WORLD_SIZE)\n',
        "for the next",
    ),
    Loosened(
        "process_group_test.py", "            # Simulate a failure\n", "            self.together.wait()\n",
        "a rank that ends fails at once what the others are still in: first all have to be through with the one before",
    ),
    Loosened(
        "process_group_test.py", "self.assertEqual(pg.group_name, str(dist.get_pg_count() - 1))", "",
        "torch's numbers for groups; here a group is registered by the name that is given",
    ),
    Loosened(
        "process_group_test.py", '"ProcessGroupWrapper(pg=ProcessGroupDummy())"', "repr(wrapper)", "the text of a repr",
    ),
    Loosened(
        "process_group_test.py", '(TimeoutError, "timed out after 0.01 seconds")',
        '(RuntimeError, "no store answers|did not form")',
        "the words of a group in a child process that does not form",
    ),
    Loosened(
        "process_group_test.py", '(OSError, "handle is closed")', '(RuntimeError, "shut down")',
        "the words of the reference's pipe to a child process; that a collective is refused after shutdown is checked",
    ),
    Loosened(
        "process_group_test.py", "skip=(\n", 'skip=["reduce_scatter", "reduce_scatter_tensor_coalesced"] + (\n',
        "the reference has no reduce_scatter over Gloo; here there is one, of which Gloo has no future",
    ),
)  # fmt: skip


def skips() -> list[Skip]:
    """Read the list."""
    lines = [line.strip() for line in SKIPPED.read_text().splitlines()]
    pairs = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    wrong = [pair[0] for pair in pairs if len(pair) != 2]
    if wrong:
        raise SystemExit(f"{SKIPPED.name}: {wrong[0]} has no reason")
    return [Skip(pattern, reason) for pattern, reason in pairs]


def pip(*arguments: str) -> None:
    """Run pip, or say what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"the package index did not give what is needed:\n{done.stderr}")


def wheel() -> pathlib.Path:
    """The wheel, from the index if it is not here. Its tests are the same for every interpreter."""
    if not list(CACHE.glob(f"torchft-{VERSION}-*.whl")):
        place = ["--python-version", "3.11", "--platform", "manylinux2014_x86_64", "--dest", str(CACHE)]
        pip("download", "--quiet", "--no-deps", "--only-binary", ":all:", *place, f"torchft=={VERSION}")
    return next(CACHE.glob(f"torchft-{VERSION}-*.whl"))


def needed() -> pathlib.Path:
    """A folder with the one package that the tests import and this project does not have."""
    folder = CACHE / "site"
    if not (folder / "parameterized").exists():
        pip("install", "--quiet", "--no-deps", "--target", str(folder), "parameterized")
    return folder


def rewritten(name: str, text: str) -> str:
    """A test file with our names."""
    for old, new in SWAPS:
        text = re.sub(old, new, text, flags=re.MULTILINE)
    for loosened in LOOSENED:
        if loosened.file == name:
            if loosened.old not in text:
                raise SystemExit(f"LOOSENED: {name} of torchft {VERSION} has no {loosened.old!r}")
            text = text.replace(loosened.old, loosened.new)
    return text


def unpacked(folder: pathlib.Path) -> list[str]:
    """Put the test files into `folder`; return their names there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    names = []
    with zipfile.ZipFile(wheel()) as archive:
        for member in archive.namelist():
            if member.endswith("_test.py"):
                name = member.removeprefix("torchft/")
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(rewritten(name, archive.read(member).decode()))
                names.append(name)
    return sorted(names)


def run(folder: pathlib.Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run pytest there, away from this project's settings."""
    env = {name: text for name, text in os.environ.items() if not name.startswith(("FT_", "TORCHFT_", "PYTEST_"))}
    # The order of a set gives parametrized tests their names.
    # They bind lighthouses to all interfaces, and know no tokens.
    env |= {"FT_INSECURE": "1", "FT_HOSTNAME": "127.0.0.1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    env["PYTHONPATH"] = f"{ROOT}:{folder}:{needed()}"
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={folder}", "-c", "pytest.ini", "--timeout=120"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def collected(folder: pathlib.Path, files: list[str]) -> list[str]:
    """The names of the tests in these files."""
    done = run(folder, ["--collect-only", *files])
    names = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode != 0 or not names:
        raise SystemExit(f"the tests could not be collected:\n{done.stdout}{done.stderr}")
    return names


def left_after(names: list[str], listed: list[Skip], used: collections.Counter[Skip]) -> list[str]:
    """Those that are to be run; the others are counted in `used`."""
    left = []
    for name in names:
        fitting = [skip for skip in listed if skip.fits(name)]
        used.update(fitting)
        if not fitting:
            left.append(name)
    return left


def main(arguments: list[str]) -> int:
    """Run what is not on the list; the arguments go to pytest."""
    folder = CACHE / "tests"
    CACHE.mkdir(parents=True, exist_ok=True)
    listed = skips()
    used: collections.Counter[Skip] = collections.Counter()
    files = left_after(unpacked(folder), listed, used)
    wanted = left_after(collected(folder, files), listed, used)
    unused = [skip.pattern for skip in listed if skip not in used]
    if unused:
        raise SystemExit(f"{SKIPPED.name}: fits no test of torchft {VERSION}: {unused}")
    for skip, count in used.items():
        print(f"not run: {skip.pattern} ({count}): {skip.reason}")
    for loosened in LOOSENED:
        print(f"loosened: {loosened.file}: {loosened.old.strip()}: {loosened.reason}")
    runs = [[name] for name in wanted if fnmatch.fnmatchcase(name, ALONE)]
    others = [name for name in wanted if not fnmatch.fnmatchcase(name, ALONE)]
    runs += [list(names) for _, names in itertools.groupby(others, lambda name: name.partition("::")[0])]
    failed = 0
    for names in runs:
        done = run(folder, [*arguments, *names])
        print(
            f"{names[0] if len(names) == 1 else names[0].partition('::')[0]}: {done.stdout.splitlines()[-1]}",
            flush=True,
        )
        # A word of the ending interpreter is a failure, too.
        if done.returncode != 0 or "Exception ignored" in done.stderr:
            failed += 1
            print(done.stdout[-8000:], done.stderr[-2000:])
    print(f"torchft {VERSION}: {len(wanted)} tests run, {failed} of {len(runs)} runs failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
