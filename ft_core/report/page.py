"""The report as one HTML page that needs nothing else: timeline, seconds, gaps, failures.

How it works. The timeline is an SVG whose coordinates are thousandths of the job's time, stretched to the width of its
frame; a slider widens the frame, which then scrolls. Details are the title of each shape, shown by the browser. What
comes out of event files is escaped everywhere.

Invariants: no request leaves the page; it is readable without JavaScript (the slider is all that needs it), in dark
mode and on a narrow screen.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ft_core.report.cells import STATES, cells, members_over_time, ticks
from ft_core.report.story import State, name_of
from ft_core.report.text import FAILURES, GAPS, clock, duration, failure_row, gap_rows, summary

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ft_core.report.account import Account
    from ft_core.report.story import Story

UNITS = 10_000.0
"""Width of the timeline in its own coordinates."""
ROW, GAP, MEMBERS, AXIS = 22, 4, 54, 22
"""Heights in CSS pixels: of a row and the space between two, of the panel of members, of the axis."""
LEAST = 4.0
"""Least width of a cell, in coordinates: at 1,000 pixels 0.4 of one, which a browser still shows as a shade."""
MARKS_MAX = 4000
"""Deaths, heals and drains, and quorums, that are drawn; of more, the last."""
ROWS_MAX = 1000
"""Failures in the table."""
SHAPES = {"death": ("\N{MULTIPLICATION SIGN}", "death"), "heal": ("\N{BLACK UP-POINTING TRIANGLE}", "healed"),
          "drain": ("\N{BLACK DOWN-POINTING TRIANGLE}", "drained")}  # fmt: skip

STYLE = """
:root { color-scheme: light dark; --ink: #1c2326; --soft: #5f6b70; --line: #d5dadd; --back: #fff; --row: #f4f6f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaec; --soft: #9aa5ab; --line: #3a4347; --back: #14191b; --row: #1d2427; } }
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 0 auto; padding: 20px;
  max-width: 1500px; }
h1 { font-size: 21px; margin: 0 0 6px; overflow-wrap: anywhere; } h2 { font-size: 16px; margin: 28px 0 8px; }
p { margin: 2px 0; } .soft { color: var(--soft); }
.chart { display: flex; border: 1px solid var(--line); border-radius: 6px; margin-top: 10px; }
.names { flex: none; max-width: 32vw; overflow: hidden; padding: 0 8px; text-align: right; white-space: nowrap;
  border-right: 1px solid var(--line); font-size: 12.5px; }
.frame { flex: 1; overflow-x: auto; } svg { display: block; }
.marks { position: relative; } .mark { position: absolute; transform: translate(-50%, -50%); cursor: default;
  font: bold 15px/1 system-ui, sans-serif; color: #10181b; text-shadow: 0 0 2px #fff, 0 0 2px #fff, 0 0 3px #fff; }
.heal { color: #0b3d91; font-size: 11px; } .drain { color: #6a2c8f; font-size: 12px; }
.tick { position: absolute; font-size: 11px; color: var(--soft); transform: translateX(-50%); white-space: nowrap; }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 8px 0; font-size: 13px; align-items: center; }
.key i { display: inline-block; width: 13px; height: 13px; border-radius: 2px; margin-right: 5px;
  vertical-align: -2px; }
.key .mark { position: static; transform: none; margin-right: 4px; text-shadow: none; color: inherit; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13.5px; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { white-space: nowrap; } td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
th { font-weight: 600; white-space: nowrap; }
td.cause, td.what { white-space: normal; min-width: 200px; overflow-wrap: anywhere; }
#inner { min-width: 640px; }
"""
SCRIPT = """
const zoom = document.getElementById('zoom'), inner = document.getElementById('inner');
zoom.addEventListener('input', () => {
  const frame = inner.parentElement, middle = (frame.scrollLeft + frame.clientWidth / 2) / inner.clientWidth;
  inner.style.width = zoom.value * 100 + '%';
  frame.scrollLeft = middle * inner.clientWidth - frame.clientWidth / 2;
});
"""


def render(account: Account, problems: Iterable[str]) -> str:
    """The page."""
    told = "".join(f"<p class=soft>Note: {escape(problem)}</p>" for problem in problems)
    head = "".join(f"<p>{escape(line)}.</p>" for line in summary(account))
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport "
        f"content='width=device-width, initial-scale=1'><title>{escape(account.title)}</title><style>{STYLE}</style>"
        f"</head><body><h1>{escape(account.title)}</h1>{head}{told}{_timeline(account)}"
        f"{_seconds(account)}{_waiting(account)}{_gaps(account)}{_failures(account)}<script>{SCRIPT}</script></body></html>"
    )


# ---------------------------------------------------------------- timeline


def _timeline(account: Account) -> str:
    count = len(account.stories)
    rows_high = count * (ROW + GAP)
    high = MEMBERS + rows_high
    shapes = [_members(account)]
    used = set()
    for row, story in enumerate(account.stories):
        shapes.append(_cells(account, story, MEMBERS + row * (ROW + GAP)))
        used |= {segment.state for segment in story.segments}
    for quorum in account.quorums[-MARKS_MAX:]:
        x = _x(account, quorum["t"])
        names = ", ".join(name_of(member) for member in quorum["members"][:64])
        shapes.append(
            f"<line x1={x:.1f} x2={x:.1f} y1={MEMBERS} y2={high} stroke=#455a64 stroke-opacity=.45 stroke-width=1 "
            f"vector-effect=non-scaling-stroke><title>a quorum of {len(quorum['members'])} at step {quorum['step']}, "
            f"after {duration(quorum['t'] - account.begin)}: {escape(names)}</title></line>"
        )
    names_ = "".join(
        f"<div style='height:{ROW + GAP}px;line-height:{ROW}px'>{escape(story.name)}</div>" for story in account.stories
    )
    key = "".join(f"<span><i style='background:{c}'></i>{n}</span>" for s, (c, n) in STATES.items() if s in used)
    key += "".join(f"<span><b class='mark {kind}'>{sign}</b>{name}</span>" for kind, (sign, name) in SHAPES.items())
    return (
        f"<h2>Timeline</h2><div class=key>{key}<span>| a quorum forms</span>"
        "<label>zoom <input id=zoom type=range min=1 max=40 step=.5 value=1></label></div>"
        f"<div class=chart><div class=names><div style='height:{MEMBERS}px' class=soft>members</div>{names_}</div>"
        f"<div class=frame tabindex=0 role=img aria-label='What each replica group did over time'><div id=inner "
        f"class=marks style='width:100%;height:{high + AXIS}px'>"
        f"<svg width=100% height={high} viewBox='0 0 {UNITS:.0f} {high}' preserveAspectRatio=none>"
        f"{''.join(shapes)}</svg>{_marks(account)}{_axis(account, high)}</div></div></div>"
    )


def _x(account: Account, t: float) -> float:
    return (t - account.begin) / max(1e-9, account.end - account.begin) * UNITS


def _members(account: Account) -> str:
    steps = members_over_time(account)
    most = max((n for _, n in steps), default=1) or 1
    low, high = MEMBERS - 6, 14
    path: list[str] = []
    y = float(low)
    for t, n in steps:
        x = _x(account, account.begin + t)
        path.append(f"{x:.1f},{y:.1f}")
        y = low - (low - high) * n / most
        path.append(f"{x:.1f},{y:.1f}")
    return (
        f"<polyline points='{' '.join(path)}' fill=none stroke=#607d8b stroke-width=1.6 "
        f"vector-effect=non-scaling-stroke><title>members of the quorum, at most {most}</title></polyline>"
    )


def _cells(account: Account, story: Story, y: int) -> str:
    found = cells(account, story)
    out = [f"<rect x=0 y={y} width={UNITS:.0f} height={ROW} fill=var(--row) />"]
    for state, (colour, name) in STATES.items():  # what must not be covered comes last
        for cell in found:
            if cell.state is state:
                x = _x(account, cell.begin)
                wide = max(LEAST, _x(account, cell.end) - x)
                who = f" ({escape(cell.whom)})" if cell.whom else ""
                out.append(
                    f"<rect x={x:.1f} y={y} width={wide:.1f} height={ROW} fill={colour}><title>{escape(story.name)}: "
                    f"{name}{who} for {duration(cell.seconds)}, after {duration(cell.begin - account.begin)}"
                    "</title></rect>"
                )
    return "".join(out)


def _marks(account: Account) -> str:
    marks = [
        (mark, MEMBERS + row * (ROW + GAP) + ROW / 2)
        for row, story in enumerate(account.stories) for mark in story.marks
    ]  # fmt: skip
    return "".join(
        f"<b class='mark {mark.kind}' style='left:{_x(account, mark.t) / UNITS:.3%};top:{y:.0f}px' title='"
        f"{escape(mark.text, quote=True)}, after {duration(mark.t - account.begin)}'>{SHAPES[mark.kind][0]}</b>"
        for mark, y in marks[-MARKS_MAX:]
    )


def _axis(account: Account, y: int) -> str:
    span = max(1e-9, account.end - account.begin)
    return "".join(
        f"<span class=tick style='left:{tick / span:.3%};top:{y + 3}px'>{clock(tick, span)}</span>"
        for tick in ticks(span) if 0 < tick < span * 0.97
    )  # fmt: skip


# ---------------------------------------------------------------- tables


KINDS = {"n": " class=n", "s": " class=what", "w": " class=cause", "t": ""}
"""Of a column: numbers, phrases and sentences (which may be broken into lines), words."""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kinds: str) -> str:
    """`kinds` has a letter of KINDS for each column."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = ""
    for row in rows:
        cells_ = (f"<td{KINDS[kind]}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        body += f"<tr>{''.join(cells_)}</tr>"
    return f"<div class=scroll><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


def _seconds(account: Account) -> str:
    total = max(1e-9, account.total_s)
    used = [state for state in State if account.seconds[state] > 0]
    rows = [(s.value, f"{account.seconds[s]:.1f}", f"{account.seconds[s] / total:.1%}") for s in used]
    of_each = [
        (story.name, *(f"{story.seconds(state):.1f}" for state in used), story.ended) for story in account.stories
    ]
    each = _table(("group", *(s.value for s in used), "ended"), of_each, "t" + "n" * len(used) + "t")
    return (
        "<h2>Where every second went</h2><p class=soft>Seconds of all groups together, then of each.</p>"
        + _table(("", "seconds", "share"), [*rows, ("together", f"{account.total_s:.1f}", "")], "tnn")
        + f"<details><summary>each group</summary>{each}</details>"
    )


def _waiting(account: Account) -> str:
    rows = [(what, f"{seconds:.1f}") for what, seconds in account.waiting if seconds >= 0.05]
    return "<h2>Waited for</h2>" + _table(("", "seconds"), rows, "sn") if rows else ""


def _gaps(account: Account) -> str:
    if not account.gaps:
        return ""
    note = "<p class=soft>Between two commits of a group, beyond a usual step, by what disturbed it first.</p>"
    return "<h2>Gaps between commits</h2>" + note + _table(GAPS, gap_rows(account), "tnnnn")


def _failures(account: Account) -> str:
    rows = [failure_row(failure, account.begin) for failure in account.failures[:ROWS_MAX]]
    more = len(account.failures) - len(rows)
    note = f"<p class=soft>and {more} more</p>" if more > 0 else ""
    return "<h2>Failures</h2>" + (_table(FAILURES, rows, "nttnnnw") + note if rows else "<p>None.</p>")
