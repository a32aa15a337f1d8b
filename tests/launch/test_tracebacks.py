"""Tracebacks in output: real ones of this interpreter, written-down ones of others, and arbitrary text."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import traceback
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_core.launch.output.tracebacks import (
    MAX_CHARS,
    MAX_LINES,
    MAX_REMEMBERED,
    MAX_STRAY,
    WINDOW_S,
    Block,
    Blocks,
    Line,
    Out,
    Repeats,
    last_error,
)

if TYPE_CHECKING:
    from pathlib import Path

SIMPLE = [
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "    import foo",
    "ModuleNotFoundError: No module named 'foo'",
]
DIRECT = [
    *SIMPLE,
    "",
    "The above exception was the direct cause of the following exception:",
    "",
    "Traceback (most recent call last):",
    '  File "train.py", line 5, in <module>',
    "    raise RuntimeError('x') from error",
    "RuntimeError: x",
]
MARKED = [
    "Traceback (most recent call last):",
    '  File "a.py", line 1, in <module>',
    "    f(1) + g(2,",
    "           ~^^^",
    "      3)",
    "      ^^",
    "  [Previous line repeated 996 more times]",
    "    + value",
    "    | 0x10",
    "lib.mod.f.<locals>.OddError",
]
COMPILER = ['  File "/x/train.py", line 2', "    def (", "        ^", "SyntaxError: invalid syntax"]
GROUP = [
    "  + Exception Group Traceback (most recent call last):",
    '  |   File "g.py", line 1, in <module>',
    "  |     raise ExceptionGroup('eg', [ValueError(1), ExceptionGroup('in', [TypeError(2)])])",
    "  | ExceptionGroup: eg (2 sub-exceptions)",
    "  +-+---------------- 1 ----------------",
    "    | Traceback (most recent call last):",
    '    |   File "g.py", line 9, in f',
    "    | ValueError: 1",
    "    +---------------- 2 ----------------",
    "    | Exception Group Traceback (most recent call last):",
    '    |   File "g.py", line 9, in f',
    "    | ExceptionGroup: in (1 sub-exception)",
    "    +-+---------------- 1 ----------------",
    "      | TypeError: 2",
    "      +------------------------------------",
]
DATALOADER = [
    *SIMPLE[:3],
    "RuntimeError: Caught ValueError in DataLoader worker process 0.",
    "Original Traceback (most recent call last):",
    '  File "w.py", line 1, in loop',
    "    data[3]",
    "ValueError: bad sample",
]
MESSAGE = [*SIMPLE[:3], "RuntimeError: size mismatch:", "\tweight: (2, 3)", "    bias: (3,)"]
KNOWN = {
    "simple": (SIMPLE, "ModuleNotFoundError: No module named 'foo'"),
    "direct cause": (DIRECT, "RuntimeError: x"),
    "markers and repeated frames": (MARKED, "lib.mod.f.<locals>.OddError"),
    "compiler": (COMPILER, "SyntaxError: invalid syntax"),
    "group": (GROUP, "ExceptionGroup: eg (2 sub-exceptions)"),
    "group chained to another": ([*SIMPLE, "", DIRECT[5], "", *GROUP], "ExceptionGroup: eg (2 sub-exceptions)"),
    "another chained to a group": ([*GROUP, "", DIRECT[5], "", *SIMPLE], "ModuleNotFoundError: No module named 'foo'"),
    "DataLoader": (DATALOADER, "ValueError: bad sample"),
    "message of several lines": (MESSAGE, "RuntimeError: size mismatch:"),
    "interrupt": ([*SIMPLE[:3], "KeyboardInterrupt"], "KeyboardInterrupt"),
}


def feed(lines: list[str]) -> list[Out]:
    blocks = Blocks()
    return [out for line in lines for out in blocks.feed(line)] + blocks.flush()


def told(lines: list[str]) -> list[str]:
    """What comes out, in short: a line as itself, a block as #lines."""
    return [out.text if isinstance(out, Line) else f"#{len(out.lines)}" for out in feed(lines)]


@pytest.mark.parametrize(("lines", "error"), KNOWN.values(), ids=KNOWN)
def test_a_traceback_comes_out_whole(lines: list[str], error: str) -> None:
    assert feed(["before", *lines, "after", "  more"]) == [
        Line("before"),
        Block(tuple(lines)),
        Line("after"),
        Line("  more"),
    ]
    assert feed(lines) == [Block(tuple(lines))]
    assert last_error(lines) == error
    assert last_error(["noise: 1", *lines, "", "cleaning up"]) == error


@pytest.mark.parametrize(("lines", "error"), KNOWN.values(), ids=KNOWN)
def test_the_rank_that_torch_puts_before_each_line_is_understood(lines: list[str], error: str) -> None:
    ranked = [f"[rank3]: {line}" if line else "" for line in lines]
    assert feed(["x", *ranked, "y"]) == [Line("x"), Block(tuple(ranked)), Line("y")]
    assert last_error(ranked) == error


def test_lines_of_others_within_a_ranked_traceback_pass_at_once() -> None:
    ranked = [f"[rank3]: {line}" for line in SIMPLE]
    blocks = Blocks()
    assert blocks.feed(ranked[0]) == []
    assert blocks.feed("NCCL WARN bad") == [Line("NCCL WARN bad")]
    assert [out for line in ranked[1:] for out in blocks.feed(line)] == []
    assert repr(blocks) == "Blocks(ended, 4 lines held)"
    assert blocks.flush() == [Block(tuple(ranked))]
    assert repr(blocks) == "Blocks(idle, 0 lines held)"


def test_two_tracebacks_in_a_row_are_two_blocks() -> None:
    assert told([*SIMPLE, *SIMPLE]) == ["#4", "#4"]
    assert told([*SIMPLE, "", *SIMPLE]) == ["#4", "", "#4"]


def test_what_only_looks_like_a_chain_is_given_back() -> None:
    assert told([*SIMPLE, "", "hello"]) == ["#4", "", "hello"]
    assert told([*SIMPLE, "", "", "hello"]) == ["#4", "", "", "hello"]
    assert told([*SIMPLE, "", DIRECT[5], "", "hello"]) == ["#4", "", DIRECT[5], "", "hello"]
    assert told([*SIMPLE, ""]) == ["#4", ""]


def test_further_lines_of_a_message_pass_as_text() -> None:
    assert told([*SIMPLE, "Compile with `TORCH_USE_CUDA_DSA`", "x"]) == ["#4", "Compile with `TORCH_USE_CUDA_DSA`", "x"]


def test_line_breaks_are_taken_off() -> None:
    assert feed([line + "\r\n" for line in ["a", *SIMPLE]]) == [Line("a"), Block(tuple(SIMPLE))]


def test_nothing_is_held_for_ever() -> None:
    blocks = Blocks()
    blocks.feed(SIMPLE[0])
    outs = [blocks.feed("  frame") for _ in range(MAX_LINES)]
    assert [len(out) for out in outs] == [0] * (MAX_LINES - 2) + [1, 1]
    assert isinstance(outs[-2][0], Block)
    assert blocks.feed(SIMPLE[0]) == []
    assert len(blocks.feed(" " * MAX_CHARS)) == 1
    assert blocks.feed(SIMPLE[0]) == []
    strays = [blocks.feed("not an exception!") for _ in range(MAX_STRAY + 1)]
    assert [len(out) for out in strays] == [1] * MAX_STRAY + [2]
    assert repr(blocks) == "Blocks(idle, 0 lines held)"


texts = st.lists(
    st.one_of(
        st.sampled_from([*SIMPLE, *DIRECT, *MARKED, *COMPILER, *GROUP, *DATALOADER, "", "[rank0]: ", "[rank0]:"]),
        st.sampled_from(SIMPLE).map(lambda line: f"[rank0]: {line}"),
        st.text(st.characters(blacklist_characters="\r\n"), max_size=20),
    ),
    max_size=60,
)


@given(texts)
def test_every_line_comes_out_once_and_blocks_keep_their_order(lines: list[str]) -> None:
    outs = feed(lines)
    flat = [text for out in outs for text in ([out.text] if isinstance(out, Line) else out.lines)]
    assert sorted(flat) == sorted(lines)
    for out in outs:
        if isinstance(out, Block):
            rest = iter(lines)
            assert all(line in rest for line in out.lines), "not a subsequence of what was fed"
    assert "\n" not in last_error(lines)


SCRIPTS = {
    "import": "import no_such_module",
    "chain": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e",
    "context": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {}['x']",
    "recursion": "def f(): f()\nf()",
    "syntax": "def (:",
    "markers": "def f(x):\n    return (x +\n  [])\nf(f(1))",
    "assertion": "assert 0",
    "local class": "def f():\n    class E(Exception): pass\n    raise E('hello')\nf()",
    "group": "raise ExceptionGroup('eg', [ValueError(1), ExceptionGroup('in', [TypeError(2), KeyError(3)])])",
}


@pytest.mark.process
@pytest.mark.parametrize("name", SCRIPTS)
def test_tracebacks_of_this_interpreter(name: str, tmp_path: Path) -> None:
    if name == "group" and sys.version_info < (3, 11):
        pytest.skip("exception groups came with Python 3.11")
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[name] + "\n")
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=30, check=False)
    lines = ran.stderr.splitlines()
    assert feed(["x", *lines, "y"]) == [Line("x"), Block(tuple(lines)), Line("y")]
    expected = lines[-1] if name != "group" else "ExceptionGroup: eg (2 sub-exceptions)"
    assert last_error(lines) == expected


def block(text: str) -> Block:
    return Block((*SIMPLE[:3], text))


def test_the_same_error_of_another_worker_is_told_in_one_line() -> None:
    repeats = Repeats()
    assert repeats.seen(block("E: <a at 0x7f01> of replica-0:ab12 pid 7"), "replica-0/0", 0.0) is None
    again = repeats.seen(block("E: <a at 0xff> of replica-1:00ff pid 8"), "replica-1/0", 60.0)
    assert again == "the same error as [replica-0/0]: E: <a at 0xff> of replica-1:00ff pid 8"
    assert repr(repeats) == "Repeats(1 errors remembered)"


def test_rank_prefixes_do_not_make_errors_differ() -> None:
    repeats = Repeats()
    for rank in range(3):
        lines = tuple(f"[rank{rank}]: {line}" for line in SIMPLE)
        said = repeats.seen(Block(lines), f"replica-0/{rank}", 0.0)
        assert said == (None if rank == 0 else "the same error as [replica-0/0]: " + SIMPLE[-1])


def test_errors_from_different_places_are_different() -> None:
    repeats = Repeats()
    elsewhere = Block(tuple(line.replace("line 3", "line 4") for line in SIMPLE))
    assert repeats.seen(Block(tuple(SIMPLE)), "a", 0.0) is None
    assert repeats.seen(elsewhere, "b", 0.0) is None


def test_a_worker_that_repeats_itself_and_old_errors() -> None:
    repeats = Repeats()
    assert repeats.seen(block("E: 1"), "a", 0.0) is None
    assert repeats.seen(block("E: 1"), "a", 1.0) == "the same error again: E: 1"
    assert repeats.seen(block("E: 1"), "b", WINDOW_S) is not None
    assert repeats.seen(block("E: 1"), "b", 1.1 + WINDOW_S) is None
    assert repeats.seen(block("E: 1"), "a", 1.2 + WINDOW_S) == "the same error as [b]: E: 1"


def test_memory_of_errors_is_bounded_and_keeps_the_latest() -> None:
    repeats = Repeats()
    for number in range(MAX_REMEMBERED + 1):
        repeats.seen(block(f"E: {number}"), "a", 0.0)
    assert repr(repeats) == f"Repeats({MAX_REMEMBERED} errors remembered)"
    assert repeats.seen(block("E: 1"), "b", 0.0) is not None
    assert repeats.seen(block("E: 0"), "b", 0.0) is None


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], ""),
        (["all well", "Epoch 3: loss 0.1", "UserWarning: x"], ""),
        (["torch.OutOfMemoryError: CUDA out of memory.", "bye"], "torch.OutOfMemoryError: CUDA out of memory."),
        (["Fatal Python error: Aborted", "", "Thread 0x1 (most recent call first):"], "Fatal Python error: Aborted"),
        ([*SIMPLE, "FooError: said later by a logger"], SIMPLE[-1]),
        ([*SIMPLE[:3]], ""),
        ([*SIMPLE, *DIRECT[-4:]], "RuntimeError: x"),
        (["ValueError: x\n"], "ValueError: x"),
    ],
)
def test_last_error(lines: list[str], error: str) -> None:
    assert last_error(lines) == error


def test_a_formatted_exception_of_this_process() -> None:
    text = ""
    try:
        exec(textwrap.dedent("raise OSError(2, 'x', 'y')"))
    except OSError as error:
        text = "".join(traceback.format_exception(error))
    assert re.fullmatch(r"FileNotFoundError: \[Errno 2\] x: 'y'", last_error(text.splitlines()))
