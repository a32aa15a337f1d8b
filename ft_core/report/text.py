"""The account as text, for a terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ft_core.report.story import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ft_core.report.account import Account
    from ft_core.report.failures import Failure

ROWS_MAX = 50
"""Failures, and lines of any other table, that are printed."""
CAUSE_MAX = 110
"""Characters of a cause on a terminal; the HTML page has all of it."""


def render(account: Account, problems: Iterable[str]) -> str:
    """The whole report."""
    parts = [_head(account), _seconds(account), _waiting(account), _gaps(account), _failures(account)]
    told = [f"note: {problem}" for problem in problems]
    return "\n\n".join(part for part in [*parts, "\n".join(told)] if part) + "\n"


def escaped(text: str) -> str:
    """A text with its control characters written out: to a terminal they are orders, and names come from anywhere."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def fitting(text: str, encoding: str | None) -> str:
    """A text without characters that a stream of this encoding cannot carry."""
    code = encoding or "utf-8"
    return text.encode(code, "backslashreplace").decode(code)


def duration(seconds: float | None) -> str:
    """A duration as people write it."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} days"


def clock(seconds: float, span: float) -> str:
    """An instant on an axis of so many seconds."""
    if span < 120:
        return f"{seconds:g} s"
    if span < 7200:
        return f"{int(seconds) // 60}:{int(seconds) % 60:02} min"
    if span < 172800:
        return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02} h"
    return f"{seconds / 86400:g} d"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: str) -> str:
    """Columns; `right` has an "r" for each that is aligned right. Long tables are cut, which is said."""
    shown = [head, *rows[:ROWS_MAX]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(head))]
    lines = [
        "  " + "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in shown
    ]  # fmt: skip
    more = [f"  ... and {len(rows) - ROWS_MAX} more"] if len(rows) > ROWS_MAX else []
    return "\n".join([*lines, *more])


def summary(account: Account) -> list[str]:
    """What one wants to know first, in sentences."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(account.begin))
    lines = [f"{len(account.stories)} replica groups, {duration(account.end - account.begin)} from {when}"]
    if account.first_commit is not None:
        lines.append(
            f"{account.steps} steps committed; usually {duration(account.usual_s)} per step; "
            f"{len(account.quorums)} quorums; {account.heals} heals, {account.healed_bytes / 1e6:.1f} MB"
        )
    if account.share is not None:
        moving = "" if account.moving is None else f"steps were made in {account.moving:.1%} of the time, and "
        lines.append(
            f"goodput since the first commit: {moving}{account.share:.1%} of the replica-seconds went into them"
        )
    return lines


def _head(account: Account) -> str:
    first, *rest = summary(account)
    return "\n".join([f"{account.title}: {first}", *rest])


def _seconds(account: Account) -> str:
    rows = [
        (state.value, f"{account.seconds[state]:.1f}", f"{account.seconds[state] / max(account.total_s, 1e-9):.1%}")
        for state in State
        if account.seconds[state] > 0
    ]
    rows.append(("together", f"{account.total_s:.1f}", ""))
    return "where every second went (seconds of all groups together)\n" + table(("", "seconds", "share"), rows, "lrr")


def _waiting(account: Account) -> str:
    rows = [(what, f"{seconds:.1f}") for what, seconds in account.waiting if seconds >= 0.05]
    return "waited for\n" + table(("", "seconds"), rows, "lr") if rows else ""


def gap_rows(account: Account) -> list[tuple[str, ...]]:
    """Gaps by cause, as cells."""
    return [
        (gap.cause, str(gap.count), duration(gap.p50_s), duration(gap.p90_s), duration(gap.max_s))
        for gap in account.gaps
    ]


GAPS = ("cause", "gaps", "p50", "p90", "max")


def _gaps(account: Account) -> str:
    if not account.gaps:
        return ""
    return "gaps between commits, beyond a usual step\n" + table(GAPS, gap_rows(account), "lrrrr")


FAILURES = ("at", "who", "what", "noticed", "others' gap", "back after", "first cause")


def failure_row(failure: Failure, begin: float) -> tuple[str, ...]:
    """One failure, as cells."""
    return (
        duration(failure.t - begin), failure.who, failure.what, duration(failure.noticed_s), duration(failure.gap_s),
        duration(failure.back_s), failure.cause,
    )  # fmt: skip


def _failures(account: Account) -> str:
    if not account.failures:
        return "no failures"
    rows = []
    for failure in account.failures:
        *cells, cause = failure_row(failure, account.begin)
        rows.append((*cells, cause if len(cause) <= CAUSE_MAX else cause[: CAUSE_MAX - 3] + "..."))
    return "failures\n" + table(FAILURES, rows, "rllrrrl")
