"""Why a job failed, out of its events: the first cause in one sentence, what shows it, what to do. Pure.

How it works. First how the job ended: ftrun says so, else its groups do. Where it ended badly, the first cause is the
earliest failure of those after which a group never trained again: what it came back from was survived, and is not why
the job ended. Where it ended well the failures were survived, and are counted. A job without
a failure and without a step waited for something, which the lighthouse has told.

Invariant: the sentence comes from `ft_core.report`, so ft-report and ft-doctor never tell different causes.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from ft_core.doctor.advice import advice
from ft_core.doctor.findings import Finding, Level, note, ok, warning
from ft_core.events.schema import FTRUN, LIGHTHOUSE, REPLICA
from ft_core.report.failures import BACK, TAKEN_OVER, TOGETHER_S
from ft_core.report.story import State, name_of, plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ft_core.report.account import Account
    from ft_core.report.failures import Failure
    from ft_core.report.reader import Found, Log
    from ft_core.report.story import Story

Event = dict[str, Any]
EVIDENCE_MAX = 5
"""Event lines that are shown."""
SURVIVED_MAX = 10
"""Survived failures that are told one by one."""
BAD, WELL = ("quarantined", "failed", "stopped"), ("finished", "drained", "missed")
"""How a group ends for good, in ftrun's words: badly, and as it should."""
SHOWN = frozenset(
    {
        "failed",
        "member_lost",
        "refused",
        "broken",
        "vetoed",
        "heal_ended",
        "stood_still",
        "pair",
        "ended",
        "lease_ended",
        "lighthouse_started",
        "stopping",
        "run_ended",
    }
)
"""Kinds of events that show a failure."""
CHECK = "first cause"


def explain(found: Found, account: Account) -> list[Finding]:
    """What is to be said of a job. `found.logs` is not empty."""
    outcome = _outcome(found, account)
    findings = [outcome]
    chain = [] if outcome.level is Level.OK else last_chain(account, failed=outcome.level is Level.PROBLEM)
    cause = None if outcome.level is Level.OK else _cause(found, account, chain)
    if cause is not None:
        findings.append(cause)
    findings += _survived(account, chain)
    findings += [note("events", "-", problem, "what is missing may hide a cause") for problem in found.problems]
    return findings


def _outcome(found: Found, account: Account) -> Finding:
    """How the job ended."""
    ftrun = [event for log in found.of(FTRUN) for event in log.events]
    ends = [event for event in ftrun if event["kind"] == "run_ended"]
    bad = sorted(s.name for s in account.stories if s.ended in BAD)
    if any(event["status"] != 0 for event in ends):
        groups = f": {', '.join(bad)} did not end well" if bad else ""
        return _failed(f"ftrun ended with status {max(e['status'] for e in ends)}{groups}")
    if ends and len(ends) == len(found.of(FTRUN)):
        survived = f"; {len(account.failures)} failures were survived" if account.failures else ""
        return ok("the job", "-", f"it ended well, {account.steps} steps were committed{survived}")
    left = {log.source for log in found.of(REPLICA) if any(e["kind"] == "left" and e["finished"] for e in log.events)}
    names = {log.source for log in found.of(REPLICA)}
    if names and left == names and not found.of(FTRUN):
        return ok("the job", "-", f"all {len(names)} groups have finished, {account.steps} steps were committed")
    cut = [log for log in found.of(FTRUN) if log.events[-1]["kind"] not in ("run_ended", "closed")]
    if cut:
        return warning(
            "the job",
            ", ".join(sorted({log.host for log in cut})),
            "ftrun has not written how the job ended: it still runs, or was ended by SIGKILL with its machine",
            "if it does not run any more, ask the machine and the scheduler (dmesg, sacct, kubectl describe)",
        )
    missing = ", ".join(sorted(names - left)) or "nobody"
    return warning(
        "the job",
        missing,
        "these groups have not written that they finished",
        "if they do not run any more, what follows says why",
    )


def _failed(text: str) -> Finding:
    return Finding(Level.PROBLEM, "the job", "-", text, "what follows says why")


# ------------------------------------------------------------------------------------------------------ the cause


def _cause(found: Found, account: Account, chain: Sequence[Failure]) -> Finding | None:
    """The first cause of a bad end; None: there is none to be found."""
    ordered = _ordered(found, account, chain)
    if ordered is not None:
        return ordered
    if chain:
        first = chain[0]
        return Finding(
            Level.PROBLEM,
            CHECK,
            first.who,
            _sentence(first, account),
            _todo(first),
            evidence(found, first.t, first.who),
        )
    if account.steps == 0:
        return _never_began(found)
    return None


def _ordered(found: Found, account: Account, chain: Sequence[Failure]) -> Finding | None:
    """The finding if somebody ended the job, and no failure did."""
    logs = [(event, log) for log in found.of(FTRUN) for event in log.events]
    for event, log in logs:
        if event["kind"] == "stopping" and not any(failure.t <= event["t"] for failure in chain):
            return Finding(
                Level.PROBLEM,
                CHECK,
                log.source,
                f"the job was stopped {event['t'] - account.begin:.1f} s after the start of the log: {event['reason']}",
                advice(event["reason"]),
                (line(event, log),),
            )
    ends = [(event, log) for event, log in logs if event["kind"] == "run_ended" and event["status"] != 0]
    if not ends or any(event["kind"] in ("ended", "stopping") for event, _ in logs):
        return None
    event, log = ends[0]
    trained = [_trained_until(story) >= event["t"] - TOGETHER_S for story in account.stories]
    if (
        account.steps == 0
        or not all(trained)
        or any(failure.what in ("failed", "killed") and failure.back_s is None for failure in chain)
    ):
        return None
    return Finding(
        Level.PROBLEM,
        CHECK,
        log.source,
        f"ftrun was ended at once {event['t'] - account.begin:.1f} s after the start "
        "of the log, while its groups trained: by a second Ctrl-C or SIGTERM, or by an error of its own",
        "see who ended it (a scheduler, a test, somebody at a terminal), and ftrun's last lines",
        evidence(found, event["t"], log.source) or (line(event, log),),
    )


def last_chain(account: Account, *, failed: bool) -> list[Failure]:
    """The failures that ended the job, or ended a group for good, in the order of time.

    Args:
        account: of the job.
        failed: it has failed, so that some failure has to be the cause.
    """
    well = {s.name for s in account.stories if s.ended in WELL or _said_goodbye(s)}
    refusals = [f for f in account.failures if f.what == "refused"]
    chain = [f for f in account.failures if f.who not in well and f.back_s is None and f.what in (*BACK, "refused")]
    if not chain and failed:
        chain = refusals or [f for f in account.failures if f.back_s is None and f.what != TAKEN_OVER][-1:]
    return sorted(chain, key=lambda failure: failure.t)


def _said_goodbye(story: Story) -> bool:
    return bool(story.segments) and story.segments[-1].state is State.ENDING


def _trained_until(story: Story) -> float:
    """When it did its last work that was committed; its begin if it never did."""
    begin = story.segments[0].begin if story.segments else 0.0
    return max((s.end for s in story.segments if s.state is State.TRAINING), default=begin)


def _todo(failure: Failure) -> str:
    return advice(f"{failure.cause} ({failure.what}, {failure.who.removeprefix('the ')})")


def _sentence(failure: Failure, account: Account) -> str:
    after = failure.t - account.begin
    subject = (
        f"{failure.who} {failure.what}" if failure.what in ("failed", "refused") else f"{failure.who}: {failure.what}"
    )
    if failure.what in ("killed", "lost", "frozen"):
        subject = f"{failure.who} was {failure.what}"
    return f"{subject} {after:.1f} s after the start of the log: {failure.cause}"


def _never_began(found: Found) -> Finding:
    """No step, and nobody failed: what everybody waited for."""
    waits = [
        (event, log)
        for log in (*found.of(LIGHTHOUSE), *found.of(REPLICA))
        for event in log.events
        if event["kind"] in ("no_quorum_yet", "waiting", "no_quorum")
    ]
    if waits:
        event, log = max(waits, key=lambda wait: float(wait[0]["t"]))
        return Finding(
            Level.PROBLEM,
            CHECK,
            "-",
            f"no step was made, because no quorum formed: {plain(event['reason'])}",
            "start the groups that are missing; if they run, `ft-doctor` on their hosts says why they are not seen "
            "(the lighthouse's address, FT_TOKEN, FT_NUM_REPLICA_GROUPS, FT_MIN_REPLICAS)",
            (line(event, log),),
        )
    if not found.of(REPLICA):
        return Finding(
            Level.PROBLEM,
            CHECK,
            "-",
            "no replica has written an event: none got as far as making its Manager",
            "see the workers' output for what they did instead; if the replicas run elsewhere, set FT_EVENTS there and "
            "name their folder, too",
            tuple(line(log.events[-1], log) for log in found.logs)[:EVIDENCE_MAX],
        )
    return Finding(
        Level.PROBLEM,
        CHECK,
        "-",
        "no step was made, and nobody wrote why",
        "see the workers' output",
        tuple(line(log.events[-1], log) for log in found.logs)[:EVIDENCE_MAX],
    )


# ------------------------------------------------------------------------------------------------------ the rest


def _survived(account: Account, chain: Sequence[Failure]) -> Iterable[Finding]:
    """Failures that did not end anything: one by one while they are few, else counted."""
    ended = {id(failure) for failure in chain}
    left = [failure for failure in account.failures if id(failure) not in ended]
    for failure in left[:SURVIVED_MAX]:
        cost = "" if failure.gap_s is None else f"; it cost the others {failure.gap_s:.2f} s"
        yield note("survived", failure.who, f"{_sentence(failure, account)}{cost}", _todo(failure))
    if len(left) > SURVIVED_MAX:
        kinds = Counter(failure.what for failure in left[SURVIVED_MAX:])
        told = ", ".join(f"{count} {what}" for what, count in kinds.most_common())
        yield note("survived", "-", f"and {len(left) - SURVIVED_MAX} more: {told}", "ft-report lists them all")


def evidence(found: Found, t: float, who: str) -> tuple[str, ...]:
    """The events that show a failure of `who` at `t`: its own first, then what the others made of it."""
    near = [
        (not _about(event, log, who), float(event["t"]), event, log)
        for log in found.logs
        for event in log.events
        if event["kind"] in SHOWN and abs(min(event["t"], event.get("at_s", event["t"])) - t) <= TOGETHER_S
    ]
    near.sort(key=lambda one: one[:2])
    chosen = sorted(near[:EVIDENCE_MAX], key=lambda one: one[1])
    return tuple(line(event, log) for _, _, event, log in chosen)


def _about(event: Event, log: Log, who: str) -> bool:
    return who in (event.get("group"), name_of(event.get("replica_id", "")), log.source, f"the {log.source}")


def line(event: Event, log: Log) -> str:
    """One event as it stands in the file, and who wrote it."""
    return f"{log.source} (pid {log.pid} on {log.host}): {json.dumps(event, separators=(',', ':'))}"
