"""Chaos: what --chaos accepts, and a schedule that is the same everywhere."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_core.errors import ConfigError, UsageError
from ft_core.launch.chaos_schedule import HOLD_MAX_S, HOLD_MIN_S, Act, ChaosSettings, schedule, victim


def first(count: int, settings: ChaosSettings, warmup_s: float = 0.0) -> list[Act]:
    return list(itertools.islice(schedule(settings, warmup_s=warmup_s), count))


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("kill=30s,stop=60s,drain=5m,seed=7", ChaosSettings(30.0, 60.0, 300.0, 7)),
        ("kill=5", ChaosSettings(kill_s=5.0)),
        (" stop = 1.5h , seed = -3 ", ChaosSettings(stop_s=5400.0, seed=-3)),
        ("drain=.5s", ChaosSettings(drain_s=0.5)),
        ("kill=250ms", ChaosSettings(kill_s=0.25)),
    ],
)
def test_what_is_accepted(text: str, settings: ChaosSettings) -> None:
    assert ChaosSettings.parse(text) == settings


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"--chaos '': an empty part; write for example --chaos \"kill=30s"),
        ("kill=3s,,stop=1s", "an empty part"),
        ("kil=30s", r"unknown kind 'kil'; did you mean kill\? \(known: kill, stop, drain, seed\)"),
        ("fire=30s", r"unknown kind 'fire'; \(known: kill"),
        ("KILL=30s", "unknown kind 'KILL'"),
        ("kill", "'kill' has no value; write for example kill=30s"),
        ("kill=1s,seed", "'seed' has no value; write for example seed=7"),
        ("kill=", "kill='' is no duration"),
        ("kill=3d", "kill='3d' is no duration; write a number with ms, s, m or h"),
        ("kill=1e3s", "is no duration"),
        ("kill=0s", "kill=0s must be more than 0; leave kill out"),
        ("kill=-3s", "kill=-3s must be more than 0"),
        ("kill=1s,kill=2s", "kill is given twice"),
        ("kill=1s,seed=1,seed=1", "seed is given twice"),
        ("kill=1s,seed=x", "seed='x' is no integer"),
        ("seed=7", "nothing to do; name at least one of kill, stop, drain"),
    ],
)
def test_what_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ChaosSettings.parse(text)


def test_the_schedule_of_a_seed_never_changes() -> None:
    """The numbers themselves: a user's seed must mean the same tomorrow and on another machine."""
    acts = first(5, ChaosSettings.parse("kill=30s,stop=60s,drain=5m,seed=7"))
    assert [(act.kind, round(act.at_s, 3), round(act.pick, 3), round(act.hold_s, 3)) for act in acts] == [
        ("kill", 18.534, 0.456, 0.0),
        ("stop", 32.783, 0.659, 13.808),
        ("kill", 51.895, 0.925, 0.0),
        ("kill", 81.434, 0.603, 0.0),
        ("stop", 82.138, 0.058, 5.202),
    ]


def test_the_schedule_is_the_same_in_another_process() -> None:
    code = (
        "import itertools; from ft_core.launch.chaos_schedule import *;"
        "print(list(itertools.islice(schedule(ChaosSettings.parse('kill=3s,stop=5s,seed=1')), 50)))"
    )
    here = repr(first(50, ChaosSettings.parse("kill=3s,stop=5s,seed=1")))
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-c", code]
        there = subprocess.run(
            command, env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True, timeout=30
        )
        assert there.stdout.strip() == here


periods = st.sampled_from([0.0, 0.1, 1.0, 7.3, 30.0, 300.0])
some = st.builds(ChaosSettings, periods, periods, periods, st.integers(-5, 5)).filter(lambda s: bool(s.periods()))


@given(some)
def test_exactly_one_act_of_a_kind_per_period_in_time_order(settings: ChaosSettings) -> None:
    acts = first(300, settings)
    assert [act.at_s for act in acts] == sorted(act.at_s for act in acts)
    for kind, period_s in settings.periods().items():
        times = [act.at_s for act in acts if act.kind == kind]
        assert all(k * period_s <= at < (k + 1) * period_s for k, at in enumerate(times))
    for act in acts:
        assert 0 <= act.pick < 1
        if act.kind == "stop":
            assert min(HOLD_MIN_S, settings.stop_s / 4) <= act.hold_s <= min(HOLD_MAX_S, settings.stop_s / 2)
        else:
            assert act.hold_s == 0


@given(some, st.floats(0, 100))
def test_a_warm_up_leaves_out_the_early_acts_and_moves_none(settings: ChaosSettings, warmup_s: float) -> None:
    later = first(20, settings, warmup_s)
    until = later[-1].at_s
    everything = itertools.takewhile(lambda act: act.at_s <= until, schedule(settings))
    assert later == [act for act in everything if act.at_s >= warmup_s]


def test_another_kind_does_not_move_the_acts_of_the_first() -> None:
    alone = first(20, ChaosSettings(kill_s=10.0, seed=3))
    mixed = [act for act in first(200, ChaosSettings(10.0, 20.0, 30.0, 3)) if act.kind == "kill"]
    assert mixed[:20] == alone


def test_seeds_differ() -> None:
    assert len({first(1, ChaosSettings(kill_s=10.0, seed=seed))[0].at_s for seed in range(20)}) == 20


def test_victims_are_spread_and_do_not_depend_on_the_order_of_names() -> None:
    names = [f"replica-{number}" for number in range(4)]
    hit = Counter(victim(act, names) for act in first(400, ChaosSettings(kill_s=1.0)))
    assert set(hit) == set(names)
    assert min(hit.values()) > 60
    for act in first(50, ChaosSettings(kill_s=1.0)):
        assert victim(act, names) == victim(act, names[::-1])
    assert victim(Act(0.0, "kill", 1 - 2**-53, 0.0), names) == "replica-3"


def test_no_victim_among_nobody() -> None:
    with pytest.raises(UsageError, match="no living group to kill"):
        victim(Act(0.0, "kill", 0.5, 0.0), [])
