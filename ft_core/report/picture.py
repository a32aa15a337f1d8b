"""The timeline of a job as a PNG: one row per group, coloured by state; deaths, heals, drains and quorums are marked.

How it works. matplotlib draws, without a display (extra `[report]`). The rows' height follows their number, so that 64
of them fit on one page; a panel above shows how many members the quorum has. What is drawn of a row is decided by
`cells`, for the HTML page, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.report.cells import STATES, cells, members_over_time, ticks
from ft_core.report.text import clock, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ft_core.report.account import Account

WIDTH_IN = 14.0
DPI = 110
MARKS = {"death": ("x", "#111111", "death"), "heal": ("^", "#1446a0", "healed"), "drain": ("v", "#7a5195", "drained")}
"""matplotlib's marker, colour and name of each kind of mark."""
MISSING = "no PNG: matplotlib is not installed (pip install 'ft-training[report]'); the HTML page needs nothing"


def draw(account: Account, path: str) -> str:
    """Write the picture. Returns why there is none, as a sentence; '': it is there. Raises OSError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return MISSING
    count = max(1, len(account.stories))
    row_in = max(0.16, min(0.5, 8.0 / count))
    height_in = 2.6 + row_in * count
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI)
    FigureCanvasAgg(figure)
    above, below = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [0.7, row_in * count], "hspace": 0.4 / (0.7 + row_in * count)}
    )
    figure.subplots_adjust(left=0.1, right=0.985, top=1 - 0.85 / height_in, bottom=1.0 / height_in)
    figure.text(0.1, 1 - 0.3 / height_in, account.title, fontsize=12, weight="bold", va="center")
    figure.text(0.1, 1 - 0.58 / height_in, " · ".join(summary(account)[:1] + summary(account)[2:]), fontsize=8.5,
                va="center")  # fmt: skip
    _members(above, account)
    _rows(below, account, row_in)
    figure.savefig(path)
    return ""


def _members(axes: Axes, account: Account) -> None:
    steps = members_over_time(account)
    axes.step([t for t, _ in steps], [n for _, n in steps], where="post", color="#37474f", linewidth=1.3)
    axes.fill_between([t for t, _ in steps], [n for _, n in steps], step="post", color="#37474f", alpha=0.12)
    axes.set_ylim(0, max([n for _, n in steps], default=1) * 1.15 + 0.1)
    axes.set_ylabel("members", fontsize=8)
    axes.tick_params(labelsize=7, length=2)
    axes.spines[["top", "right"]].set_visible(False)


def _rows(axes: Axes, account: Account, row_in: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    begin, names = account.begin, [story.name for story in account.stories]
    used = {}
    least = (account.end - begin) / (WIDTH_IN * DPI)  # a pixel: shorter ones would not be seen
    for row, story in enumerate(account.stories):
        for state, (colour, _) in STATES.items():
            bars = [(c.begin - begin, max(c.end - c.begin, least)) for c in cells(account, story) if c.state is state]
            if bars:
                used[state] = colour
                axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, linewidth=0)
    for quorum in account.quorums:
        axes.axvline(quorum["t"] - begin, color="#263238", linewidth=0.5, alpha=0.35, zorder=0.5)
    size = max(3.4, min(6.5, row_in * 20))
    for kind, (marker, colour, _) in MARKS.items():
        points = [(m.t - begin, row) for row, s in enumerate(account.stories) for m in s.marks if m.kind == kind]
        axes.plot([x for x, _ in points], [y for _, y in points], linestyle="", marker=marker, color=colour,
                  markersize=size, markeredgewidth=1.4 if kind == "death" else 0.6, markeredgecolor=(
                      colour if kind == "death" else "white"))  # fmt: skip
    axes.set_yticks(range(len(names)), names, fontsize=max(5.0, min(9.0, row_in * 40)))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, max(account.end - begin, 1e-3))
    span = account.end - begin
    shown = [tick for tick in ticks(span) if tick < span * 0.98]
    axes.set_xticks(shown, [clock(tick, span) for tick in shown])
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    legend: list[Patch | Line2D] = [Patch(color=colour, label=STATES[state][1]) for state, colour in used.items()]
    legend += [Line2D([], [], linestyle="", marker=m, color=c, markersize=6, label=n) for m, c, n in MARKS.values()]
    legend.append(Line2D([], [], color="#263238", linewidth=1, alpha=0.5, label="a quorum forms"))
    axes.legend(handles=legend, loc="upper center", bbox_to_anchor=(0.45, -0.32 / (row_in * len(names))), ncol=12,
                fontsize=7.5, frameon=False, columnspacing=1.2, handletextpad=0.4)  # fmt: skip
