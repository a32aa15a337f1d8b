"""What events change in the metrics: each kind, from a log as it is written, with the values that are shown."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.events.schema import (
    EVERYBODY,
    FTRUN,
    GAP_CAUSES,
    KINDS,
    LIGHTHOUSE,
    LOSS_SIGNS,
    QUORUM_CAUSES,
    REPLICA,
    ROLES,
    VETO_CAUSES,
    VOTE_BOUNDS_S,
    check,
)
from ft_core.launch import agent
from ft_core.launch.exit_status import KINDS as HOW_GROUPS_END
from ft_core.metrics.rules import RULES, SEEN, STOOD_STILL, Known, at_scrape
from ft_core.metrics.table import COUNTER, ENDS, GAUGE, HISTOGRAM, METRICS, NAMES, OTHER, SAMPLED, STATES
from ft_core.metrics.tally import Distribution, Put, Tally

NOT_COUNTED = {
    "waiting", "no_quorum", "peer_paused", "draining",  # sentences; what they cost is in gaps
    "quorum_ended", "no_quorum_yet",  # the next one is counted
    "order", "stopping", "run_ended",
}  # fmt: skip
"""Kinds that change nothing, on purpose."""


class Story:
    """One role's metrics, fed with events as they are written."""

    def __init__(self, role: str) -> None:
        self.role, self.known, self.tally, self.t = role, Known(born=100.0), Tally(role), 100.0

    def __call__(self, kind: str, after_s: float = 0.0, **fields: object) -> None:
        self.t += after_s
        assert check({"t": self.t, "kind": kind, **fields}) == ""
        if kind in SEEN.get(self.role, {}):
            label = SEEN[self.role][kind]
            self.tally.seen(label, str(fields[label]))
        self.tally.apply(RULES[self.role][kind](self.known, self.t, fields))

    def value(self, name: str, *labels: str) -> float:
        value = self.values(name)[labels]
        assert isinstance(value, float | int)
        return value

    def distribution(self, name: str, *labels: str) -> Distribution:
        value = self.values(name)[labels]
        assert isinstance(value, Distribution)
        return value

    def values(self, name: str) -> dict[tuple[str, ...], float | Distribution]:
        return {key: value for family in self.tally.families() if family.name == name
                for key, value in family.values.items()}  # fmt: skip

    def state(self) -> str:
        (state,) = [labels[0] for labels, value in self.values("ft_state").items() if value]
        return state


def counters(**changed: object) -> dict[str, object]:
    usual = {"step": 7, "commits": 7, "vetoes": 0, "broken": 0, "usual_s": 0.1, "trained_s": 0.6, "voted_s": 0.02,
             "votes": [7] + [0] * len(VOTE_BOUNDS_S)}  # fmt: skip
    return {**usual, **changed}


def test_every_kind_of_event_is_counted_or_left_out_on_purpose() -> None:
    for role in ROLES:
        kinds = {name for name, kind in KINDS.items() if kind.role == role}
        assert set(RULES[role]) | (NOT_COUNTED & kinds) == kinds
        assert not set(RULES[role]) & NOT_COUNTED
    assert {name for name, kind in KINDS.items() if kind.role == EVERYBODY} == {"log", "dropped", "closed"}


def test_a_replica_that_starts_trains_loses_a_member_and_heals() -> None:
    tell = Story(REPLICA)
    tell("made", replica_id="a:1", ranks=1, step=0)
    assert tell.state() == "starting"
    tell("prefetch_begun")
    assert tell.state() == "healing"
    tell("prefetch_ended", bytes=500, error="")
    tell("asking", reason="joining", failed=False, step=0)
    assert tell.state() == "waiting"
    tell("entered", quorum_id=1, members=["a:1", "b:1"], step=0, heals=True, cause="first")
    tell("heal_begun", quorum_id=1, step=5, donors=["b:1"])
    tell("formed", quorum_id=1)
    assert tell.state() == "healing"
    tell("heal_ended", ok=True, bytes=3000, seconds_s=0.2, donors=["x"], step=5, reason="")
    assert tell.state() == "training"
    tell("counters", 2.0, **counters(commits=1, step=6, trained_s=0.0))
    assert tell.value("ft_lost_seconds_total", "start") == pytest.approx(2.0)
    tell("broken", quorum_id=1, reason="lost b:1", step=6, attempt_s=0.05, moves=False)
    assert tell.state() == "waiting"
    tell("entered", quorum_id=2, members=["a:1"], step=6, heals=False, cause="member lost")
    tell("formed", quorum_id=2)
    tell("gap", cause="member lost", detail="lost b:1", seconds_s=0.13, usual_s=0.1, step=7)
    tell("vetoed", reason="ValueError: x", step=7, attempt_s=0.1, attempts=3, cause="error")
    tell("heal_begun", quorum_id=2, step=7, donors=[])
    tell("heal_ended", ok=False, bytes=0, seconds_s=0.0, donors=[], step=7, reason="none could send it")
    tell("counters", 1.0, **counters(broken=1))
    assert tell.value("ft_prefetch_bytes_total") == 500
    assert tell.value("ft_heal_bytes_total") == 3000
    assert (tell.value("ft_heals_total", "ok"), tell.value("ft_heals_total", "failed")) == (1, 1)
    assert tell.distribution("ft_heal_seconds").total == pytest.approx(0.2)
    assert sum(tell.distribution("ft_heal_seconds").counts) == 1
    assert tell.value("ft_quorum_changes_total", "member lost") == 1
    assert tell.value("ft_quorum_changes_total", "member left") == 0, "there from the start, for the first increase"
    assert tell.value("ft_members") == 1
    assert tell.value("ft_quorum_breaks_total") == 1
    assert tell.value("ft_vetoes_total", "error") == 3
    gap = tell.distribution("ft_gap_seconds", "member lost")
    assert gap.total == pytest.approx(0.03)
    assert gap.counts.index(1) == 2, "0.03 lies between 0.025 and 0.05"
    assert tell.value("ft_lost_seconds_total", "member lost") == pytest.approx(0.03)
    assert tell.value("ft_commits_total") == 7
    assert tell.value("ft_step") == 7
    assert tell.value("ft_last_commit_timestamp_seconds") == tell.t
    assert tell.distribution("ft_vote_seconds").counts[0] == 7
    assert tell.value("ft_trained_seconds_total") == 0.6
    tell.tally.apply(at_scrape(tell.known, tell.t + 1.0))
    assert tell.value("ft_goodput_ratio") == pytest.approx(0.3), "0.6 s of the two since the first commit"
    tell("left", reason="done", finished=True, step=7)
    assert tell.state() == "ended"


def test_pauses_may_be_nested() -> None:
    tell = Story(REPLICA)
    tell("formed", quorum_id=1)
    for _ in range(2):
        tell("pause_begun", reason="validation", max_s=60.0)
    tell("pause_ended", reason="validation", seconds_s=3.0)
    assert tell.state() == "paused"
    tell("pause_ended", reason="validation", seconds_s=4.0)
    assert tell.state() == "training"
    assert tell.value("ft_pause_seconds_total") == pytest.approx(7.0)


def test_no_commit_no_time_of_one_and_no_goodput() -> None:
    tell = Story(REPLICA)
    tell("counters", 0.0, **counters(commits=0, trained_s=0.0))
    assert tell.values("ft_last_commit_timestamp_seconds") == {}
    assert list(at_scrape(tell.known, 1e9)) == []
    tell("counters", 0.0, **counters(commits=1, trained_s=0.0))
    assert list(at_scrape(tell.known, tell.t + 0.5)) == [], "not 0, only because nothing has been measured yet"
    tell("counters", 1.0, **counters(commits=2))
    assert tell.known.first_commit_at
    at = tell.t
    tell("counters", 1.0, **counters(commits=2, vetoes=9))
    assert tell.value("ft_last_commit_timestamp_seconds") == at, "vetoes are no commits"


def test_a_lighthouse() -> None:
    tell = Story(LIGHTHOUSE)
    tell("lighthouse_started", 5.0, address="x", min_replicas=1)
    tell("lease_opened", room="job", replica_id="a:1")
    assert tell.value("ft_lighthouse_members_lost_total", "job", "silence") == 0
    for cause in QUORUM_CAUSES:
        tell("quorum_formed", room="job", quorum_id=1, members=[], step=0, joined=[], without=[], cause=cause)
        assert tell.value("ft_lighthouse_quorum_changes_total", "job", cause) == 1
    for sign in LOSS_SIGNS:
        tell("member_lost", room="job", quorum_id=1, replica_id="a:1", how="x", sign=sign)
        assert tell.value("ft_lighthouse_members_lost_total", "job", sign) == 1
    tell("lease_ended", room="job", replica_id="a:1", silence_s=0.1)
    tell("goodbye", room="job", replica_id="a:1", reason="", finished=False)
    tell("refused", room="other", replica_id="a:1", reason="")
    tell("stood_still", seconds_s=2.5)
    assert tell.value("ft_lighthouse_takeovers_total") == 0
    pair: dict[str, Any] = {"other": "b:1", "contact": False, "complete": True}
    tell("pair", role="standby", before="starting", took_over=False, **pair)
    tell("pair", role="active", before="standby", took_over=True, **pair)
    assert tell.value("ft_lighthouse_takeovers_total") == 1
    for name in ("leases_opened", "leases_ended", "goodbyes"):
        assert tell.value(f"ft_lighthouse_{name}_total", "job") == 1
    assert tell.value("ft_lighthouse_refusals_total", "other") == 1
    assert tell.value("ft_lighthouse_stall_seconds_total") == 2.5
    assert tell.value("ft_lighthouse_start_timestamp_seconds") == 105.0


def failed(at_s: float, code: int, excuse: str = "") -> dict[str, object]:
    return {"group": "r-1", "rank": 0, "pid": 9, "code": code, "error": "", "lived_s": 1.0, "sentence": "x",
            "excuse": excuse, "at_s": at_s}  # fmt: skip


def test_ftrun_counts_what_a_group_costs() -> None:
    tell = Story(FTRUN)
    tell("run_started", run_id="x", script="s", groups=["r-0", "r-1"], total=2, ranks=1, lighthouse="l", chaos="")
    tell("started", group="r-1", pids=[1], warm=False, restarts=0)
    assert (tell.value("ft_ftrun_groups"), tell.value("ft_ftrun_restarts_total", "r-1")) == (2, 0)
    cases = ((-9, "", "signal"), (1, "", "error"), (-6, f"{STOOD_STILL}: waits", "stall"), (-9, "chaos", "chaos"))
    for code, excuse, cause in cases:
        tell("failed", 10.0, **failed(tell.t + 10.0, code, excuse))
        tell("started", 1.5, group="r-1", pids=[2], warm=True, restarts=1)
        assert tell.value("ft_ftrun_failures_total", "r-1", cause) == 1
    assert tell.value("ft_ftrun_restarts_total", "r-1") == 4
    assert tell.value("ft_ftrun_down_seconds_total", "r-1") == pytest.approx(6.0)
    assert tell.value("ft_ftrun_starts_total", "r-1", "cold") == 1
    assert tell.value("ft_ftrun_starts_total", "r-1", "warm") == 4
    tell("failed", 1.0, **failed(tell.t, 1))
    tell("ended", group="r-1", how="quarantined")
    tell("resized", before=2, groups=5)
    tell("started", 100.0, group="r-1", pids=[3], warm=False, restarts=0)
    assert tell.value("ft_ftrun_restarts_total", "r-1") == 4, "it had ended for good, and was started anew by a resize"
    assert tell.value("ft_ftrun_ended_total", "quarantined") == 1
    assert tell.value("ft_ftrun_groups") == 5


def test_reasons_are_those_of_who_gives_them() -> None:
    assert ENDS == HOW_GROUPS_END
    assert f'f"{STOOD_STILL}: ' in inspect.getsource(agent)
    for name in ("ft_vetoes_total", "ft_gap_seconds", "ft_quorum_changes_total"):
        assert METRICS[name].labels
    assert METRICS["ft_vetoes_total"].labels["cause"] == VETO_CAUSES
    assert set(GAP_CAUSES) < set(METRICS["ft_lost_seconds_total"].labels["cause"])


def test_what_is_sampled_is_set_by_no_event() -> None:
    for role, names in SAMPLED.items():
        assert all(METRICS[name].role == role and METRICS[name].kind == GAUGE for name in names)


def test_values_that_are_not_known_are_counted_as_others() -> None:
    tell = Story(REPLICA)
    tell("gap", cause="solar flare", detail="", seconds_s=2.0, usual_s=1.0, step=1)
    assert tell.value("ft_lost_seconds_total", OTHER) == 1.0


LABELS = st.one_of(st.sampled_from([*STATES, *GAP_CAUSES, "x", ""]), st.text(max_size=5))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_event_makes_a_series_that_the_table_does_not_have(data: st.DataObject) -> None:
    """Events with any values at all: labels stay enumerated or names, and counters never go back but for totals."""
    role = data.draw(st.sampled_from(ROLES))
    tally, known = Tally(role), Known(0.0)
    values = {str: LABELS, int: st.integers(-9, 99), float: st.floats(0, 1e6), bool: st.booleans(),
              list: st.just([0] * (len(VOTE_BOUNDS_S) + 1))}  # fmt: skip
    for t in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(sorted(RULES[role])))
        fields = {name: data.draw(values[wanted]) for name, wanted in KINDS[kind].fields.items()}
        tally.apply(RULES[role][kind](known, float(t), fields))
    for name, metric, series in tally.families():
        assert metric is METRICS[name]
        for labels, value in series.items():
            assert len(labels) == len(metric.labels)
            for allowed, label in zip(metric.labels.values(), labels, strict=True):
                assert allowed == NAMES or label in (*allowed, OTHER)
            assert isinstance(value, Distribution) == (metric.kind == HISTOGRAM)
    assert {metric.kind for metric in METRICS.values()} == {COUNTER, GAUGE, HISTOGRAM}


def test_names_beyond_the_limit_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from ft_core.metrics import tally as module

    monkeypatch.setattr(module, "SERIES_MAX", 20)
    tell = Story(LIGHTHOUSE)
    for number in range(50):
        tell("goodbye", room=f"room {number}", replica_id="a", reason="", finished=False)
        tell("lease_opened", room=f"room {number}", replica_id="a")
    rooms = tell.values("ft_lighthouse_goodbyes_total")
    assert len(rooms) == 21
    assert rooms[OTHER,] == 30
    assert sum(value for value in rooms.values() if isinstance(value, float)) == 50


def test_gauges_that_are_looked_up_are_forgotten_when_they_are_gone() -> None:
    tally = Tally(LIGHTHOUSE)
    name = "ft_lighthouse_lease_age_seconds"
    tally.replace([name], [Put(name, 1.0, ("job", "a")), Put(name, 2.0, ("job", "b"))])
    tally.replace([name], [Put(name, 3.0, ("job", "b"))])
    (family,) = [family for family in tally.families() if family.name == name]
    assert family.values == {("job", "b"): 3.0}
