"""Whether a failure is everybody's: an error that hits every group ends the job, and is not tried again and again.

How it works. `CommonCause.failed` is told of each death of a group and answers with the sentence that ends the job, or
with '': the group's own restart policy decides. Rules, in the order in which they are tried:

1. all state is lost (`StateLostError`): whoever starts again is told the same;
2. before the first commit of the job, an error hits every group: the same one (traceback, or exit code where there is
   none; from whatever line, if it is what the system says about the same file: what only the leader writes fails on one
   group after the other), or whichever if nobody has got as far as the lighthouse. A group whose processes have
   outlived the error by far has got over it, and does not count. A single group is tried once more, unless the error
   cannot go away (a setting that cannot work, a module that is not there, a command line that the script refuses);
3. once the job has committed, every group dies of the same traceback twice in a row.

Deaths by a signal, errors about the lighthouse or peers, and deaths while the lighthouse does not answer, are nobody's
mistake and end no job. `patience_s` says how long a group that failed waits before it starts again, so that the others,
which started with it, can fail in the same way first. Of a part of a job (whole_job=False) one ftrun sees only its
groups: rule 3, and the second try of rule 2, are for whole jobs, or at least two groups.

Pure: `now` and ages are arguments, in seconds. Not thread-safe: used on the main thread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_core.launch.output.tracebacks import fingerprint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ft_core.launch.lighthouse_watch import Facts
    from ft_core.launch.worker_run import Failure

HOPELESS_CODES = (2, 126, 127)
"""A command line that the script refuses, a program that cannot be run: not worth a second try."""
HOPELESS_ERRORS = re.compile(r"^(ImportError|ModuleNotFoundError|SyntaxError|NameError)\b")
MISTAKES = re.compile(r"^[\w.]*\b(ConfigError|MisconfigurationException)\b")
"""Errors that say that the settings cannot work, also where they come after the lighthouse was reached."""
LOST = re.compile(r"^[\w.]*\bStateLostError: (?P<sentence>.*)")
OTHERS = re.compile(r"^[\w.]*\b(LighthouseError|QuorumTimeoutError|RefusedError|PeerError|CollectiveError|HealError)\b")
"""Errors about the lighthouse and other replicas."""
FILES = re.compile(r"^[\w.]*Error: \[Errno \d+\] [^:]+: ['\"]")
"""What Python says if the system refuses something about a file that it names."""
LOOK_S = 0.5
LOOK_MAX_S = 10.0
"""A group that failed before the first commit waits at most so long before it starts again."""
FILES_LOOK_S = 15.0
"""After an error about a file before the first commit: whoever writes it next has waited for this group (`join_s`, 10 s
at most) and then for nobody."""
OUTLIVED = 2.0
"""A group that lives so many times longer than a run that failed (and LOOK_S more) has got over the error. Who failed
before the first commit waits so long to see it: others that fail like it may be slower."""


@dataclass(frozen=True)
class Death:
    """How a run of a group ended by itself."""

    name: str
    code: int
    """Exit code; negative: the signal."""
    error: str = ""
    """The last exception line, or ''."""
    trace: str = ""
    """What identifies the traceback (`tracebacks.fingerprint`); '' if there is none."""
    lived_s: float = 0.0
    known: bool = False
    """It had reached the lighthouse, or the lighthouse does not answer."""
    reachable: bool = True
    """The lighthouse answers."""

    @staticmethod
    def of(failure: Failure, facts: Facts) -> Death:
        """A failure, and what the lighthouse knows of the run."""
        return Death(
            failure.name, failure.code, failure.error, fingerprint(failure.tail), failure.lived_s,
            known=facts.known or not facts.reachable, reachable=facts.reachable,
        )  # fmt: skip

    @property
    def key(self) -> str:
        """Equal for deaths of the same error; '' if it is nobody's mistake."""
        if self.code < 0 or not self.reachable or OTHERS.search(self.error):
            return ""
        return self.trace or self.error or f"exit code {self.code}"

    @property
    def file(self) -> str:
        """The error, if it is about a file, and somebody's mistake; or ''."""
        return self.error if self.key and FILES.search(self.error) else ""

    @property
    def hopeless(self) -> bool:
        """It will not go away by trying again."""
        error = HOPELESS_ERRORS.search(self.error) or MISTAKES.search(self.error)
        return self.code in HOPELESS_CODES or error is not None

    def __str__(self) -> str:
        return self.error or f"exit code {self.code}"


def patience_s(death: Death, job_committed: bool, groups: int) -> float:
    """How long one of so many groups that died like this waits at least, before it starts again."""
    if job_committed or not death.key:
        return 0.0
    if death.file and groups > 1:
        return FILES_LOOK_S
    return min(LOOK_MAX_S, (OUTLIVED - 1) * death.lived_s + LOOK_S)


class CommonCause:
    """What the groups of one ftrun died of.

    Args:
        script: for sentences.
        whole_job: all groups of the job are here.
    """

    def __init__(self, script: str, *, whole_job: bool) -> None:
        self._script, self._whole_job = script, whole_job
        self._at_start: dict[str, Death] = {}
        """The last death of each group before the job's first commit."""
        self._keys: dict[str, tuple[str, str]] = {}
        """The keys of each group's last two deaths, the newest first."""
        self._began = False
        """Somebody got as far as the lighthouse, and not by a mistake; or was killed."""

    def __repr__(self) -> str:
        return f"CommonCause({len(self._keys)} groups have failed{', began' if self._began else ''})"

    def began(self) -> None:
        """A group has reached the lighthouse."""
        self._began = True

    def failed(self, death: Death, ages: Mapping[str, float], *, job_committed: bool) -> str:
        """A group has died. Returns why the job ends, or ''.

        Args:
            death: how.
            ages: of each group that has not ended for good, this one too, how long its processes have been running.
            job_committed: the job has committed a step.
        """
        before = self._keys.get(death.name, ("", ""))[0]
        self._keys[death.name] = death.key, before
        if found := LOST.search(death.error):
            return found["sentence"]
        if job_committed:
            self._at_start.clear()
            return self._again(death, ages)
        if (death.known and not MISTAKES.search(death.error)) or death.code < 0:
            self._began = True
        self._at_start[death.name] = death
        return self._start(death, ages, before)

    def _start(self, death: Death, ages: Mapping[str, float], before: str) -> str:
        """Rule 2, failing at the start: the sentence, or ''."""
        if len(ages) < 2:
            twice = self._whole_job and bool(death.key) and death.key == before
            return self._sentence("fails at its start", death, 1) if death.hopeless or twice else ""
        for name, age_s in ages.items():
            other = self._at_start.get(name)
            if other is None or (name != death.name and age_s > OUTLIVED * other.lived_s + LOOK_S):
                return ""
        deaths = [self._at_start[name] for name in ages]
        same = bool(death.key) and all(other.key == death.key for other in deaths)
        same = same or (bool(death.file) and all(other.file == death.file for other in deaths))
        same = same or all(other.hopeless for other in deaths)
        if not same and (self._began or any(other.code < 0 for other in deaths)):
            return ""
        return self._sentence("fails at its start", death, len(ages))

    def _again(self, death: Death, ages: Mapping[str, float]) -> str:
        """Rule 3, failing with the same error again and again: the sentence, or ''."""
        if not death.trace or not death.key or not (self._whole_job or len(ages) > 1):
            return ""
        if any(self._keys.get(name) != (death.key, death.key) for name in ages):
            return ""
        return self._sentence("fails with the same error again and again", death, len(ages))

    def _sentence(self, what: str, death: Death, groups: int) -> str:
        everywhere = f" in all {groups} groups" if groups > 1 else ""
        return f"{self._script} {what}{everywhere} ({death})"
