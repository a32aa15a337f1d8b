"""Replicas that train on elastic data, in one process, by a seed: real samplers and pipelines, everything else is dice.

A `Group` has one `Rank` per reader: an `ElasticSampler` and a `Pipeline` over a DataLoader that prefetches as torch's
does. `World.round` is one attempt at a step: it decides who is in the quorum and who heals, lets all members fetch, and
decides the outcome:

    commit, veto        everybody alike
    death               a member dies in the step, and nobody commits
    split               some commit, the others miss the verdict and heal; one of them all dies (two generals)
    missing             a participant's heal failed (R11): it gives zeros, the others commit without its samples
    late                a member that fell behind gives zeros, receives the state meanwhile and follows the verdict

The ledger of a commit is the union of what the contributors really fetched, not of what somebody planned.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ft_core.data.prefetch import Pipeline
from ft_core.data.sampler import ElasticSampler
from tests.data.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.utils.data import DataLoader


CALM_AFTER = 300
"""Rounds after which nothing goes wrong any more, so that training ends: it may lose its last holder of the state."""


@dataclass(frozen=True)
class Config:
    length: int
    epochs: int
    batching: dict[str, int | bool]
    ranks: int
    groups: int
    workers: int
    trouble: float
    shuffle: bool

    @staticmethod
    def draw(rng: random.Random) -> Config:
        batching: dict[str, int | bool] = {"batch_size": rng.randint(1, 4)}
        kind = rng.randrange(4)
        if kind == 1:
            batching["accumulation_steps"] = rng.randint(1, 3)
        elif kind >= 2:
            batching["global_batch_size"] = rng.randint(1, 12)
            batching["fixed_micro_batches"] = kind == 3
        return Config(
            length=rng.randint(1, 40),
            epochs=rng.randint(1, 3),
            batching=batching,
            ranks=2 if rng.random() < 0.25 else 1,
            groups=rng.randint(1, 4),
            workers=rng.choice((0, 0, 1, 2)),
            trouble=rng.choice((0.0, 0.2, 0.5, 0.8)),
            shuffle=rng.random() < 0.8,
        )


class Prefetching:
    """What Pipeline uses of a torch DataLoader: answers in order, requests ahead."""

    def __init__(self, workers: int, batches: Iterable[list[int]]) -> None:
        self.num_workers = workers
        self.prefetch_factor = 2 if workers else None
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        source = iter(self._batches)
        ahead = self.num_workers * (self.prefetch_factor or 0)
        waiting = deque(next(source) for _ in range(ahead))
        while True:
            waiting.append(next(source))
            yield waiting.popleft()


@dataclass
class Attempt:
    """What the quorum says."""

    participants: list[Group]
    heals_first: list[Group]


class Host:
    """The Manager, as one rank sees it."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.weights: list[int] = []
        self.load: Callable[[Any], None]
        self.save: Callable[[], Any]

    @property
    def hooks(self) -> Any:
        return self

    def attach_data(self, listener: object) -> None:
        assert isinstance(listener, ElasticSampler)

    def register_state_dict_fn(self, key: str, load_state_dict: Callable[[Any], None], state_dict: Any) -> None:
        self.load, self.save = load_state_dict, state_dict

    def start_quorum(self) -> None:
        self.weights = []
        group = self.rank.group
        if group in group.world.attempt.heals_first:
            group.heal_rank(self.rank)

    def num_participants(self) -> int:
        return len(self.rank.group.world.attempt.participants)

    def participating_rank(self) -> int | None:
        participants = self.rank.group.world.attempt.participants
        return participants.index(self.rank.group) if self.rank.group in participants else None

    def weigh(self, weight: int) -> None:
        self.weights.append(weight)


class Rank:
    """One reader: its training loop is a generator that stops where the vote is."""

    def __init__(self, group: Group, number: int) -> None:
        config = group.world.config
        self.group = group
        self.host = Host(self)
        self.sampler = ElasticSampler(
            config.length, shuffle=config.shuffle, seed=7, manager=self.host, group_rank=number,
            num_replicas=config.ranks, **cast("Any", config.batching),
        )  # fmt: skip
        self.pipeline = Pipeline(
            lambda batches: cast("DataLoader[Any]", Prefetching(config.workers, batches)), self.sampler.indices
        )
        self.taken: list[int] = []
        """Samples of the open attempt that are in this rank's gradient."""
        self.loop = self.train()

    def train(self) -> Iterator[None]:
        for _ in self.sampler.epochs(self.group.world.config.epochs):
            for step in self.sampler.steps():
                self.taken = []
                for number, micro_batch in enumerate(step.micro_batches):
                    batch = self.pipeline.get(micro_batch, partial(self.sampler.forecast, step, number))
                    self.sampler.hand_out(micro_batch)
                    assert len(batch) == micro_batch.size <= self.sampler.batching.batch_size
                    if micro_batch.weight:
                        self.taken += batch
                assert self.sampler.last_micro_batch
                assert sum(self.host.weights) == len(self.taken)
                yield


class Group:
    """One replica group: a model that consists of its ledger, and a version."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.version = (0, 0)
        """(committed steps, number of the commit): equal versions mean equal states."""
        self.ledger = Ledger()
        self.donor: dict[str, Any] | None = None
        self.ranks = [Rank(self, number) for number in range(world.config.ranks)]

    def state(self) -> dict[str, Any]:
        """As a donor offers it at a step boundary."""
        return {"version": self.version, "ledger": self.ledger.copy(), "data": self.ranks[0].host.save()}

    def heal_rank(self, rank: Rank) -> None:
        assert self.donor is not None
        rank.host.load(self.donor["data"])
        self.version, self.ledger = self.donor["version"], self.donor["ledger"].copy()

    def heal(self) -> None:
        for rank in self.ranks:
            self.heal_rank(rank)

    def commit(self, version: tuple[int, int], taken: list[int], contributed: set[int] | None) -> None:
        self.ledger.commit(self.ranks[0].sampler.cursor.epoch, taken)
        for rank in self.ranks:
            rank.sampler.committed(contributed)
        self.version = version

    def veto(self) -> None:
        for rank in self.ranks:
            rank.sampler.vetoed()

    def fetch(self) -> bool:
        """Run all ranks to their vote. False: the training loop has ended."""
        going = [next(rank.loop, self) is not self for rank in self.ranks]
        assert len(set(going)) == 1, "the ranks of a group disagree on the end"
        return going[0]

    @property
    def taken(self) -> list[int]:
        return [index for rank in self.ranks for index in rank.taken]


@dataclass
class World:
    seed: int
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.config = Config.draw(self.rng)
        self.attempt = Attempt([], [])
        self.groups = [Group(self) for _ in range(self.config.groups)]
        self.commits = self.rounds = 0
        self.outcomes: dict[str, int] = {}

    def run(self) -> None:
        while self.rounds < 2 * CALM_AFTER:
            if not self.round():
                return
        raise AssertionError(f"seed {self.seed}: no end\n" + "\n".join(self.log[-20:]))

    # ------------------------------------------------------------ one attempt

    def round(self) -> bool:
        """One attempt at a step. False: training is over."""
        rng, config = self.rng, self.config
        self.rounds += 1
        troubled = rng.random() < config.trouble and self.rounds < CALM_AFTER
        if troubled and len(self.groups) < 5 and rng.random() < 0.3:
            self.groups.insert(rng.randrange(len(self.groups) + 1), Group(self))
        newest = max(group.version for group in self.groups)
        holders = [group for group in self.groups if group.version == newest]
        assert len({repr(g.ranks[0].host.save()) for g in holders}) == 1, "equal versions, different positions"
        fresh = newest == (0, 0)
        behind = [g for g in self.groups if g.version != newest or (fresh and g is not holders[0])]
        for group in behind:
            group.donor = rng.choice(holders).state()
        late = [g for g in behind if newest != (0, 0) and rng.random() < 0.4]
        first = [g for g in behind if g not in late]
        self.attempt = Attempt([g for g in self.groups if g not in late], first)
        broken_heals = [g for g in first if g not in holders and troubled and rng.random() < 0.2]
        for group in broken_heals:
            first.remove(group)  # it stays a participant: the plan did not know
        members = list(self.groups)
        rng.shuffle(members)
        going = {id(group): group.fetch() for group in members}
        current = [g for g in self.groups if g not in late and g not in broken_heals]
        ended = [g for g in current if not going[id(g)]]
        if ended:
            assert ended == current, "those at one version disagree on the end"
            self.groups = current
            return False
        self._decide(late, broken_heals, troubled)
        return True

    def _decide(self, late: list[Group], broken_heals: list[Group], troubled: bool) -> None:
        rng = self.rng
        participants = self.attempt.participants
        contributed = {place for place, group in enumerate(participants) if group not in broken_heals}
        taken = [index for place in contributed for index in participants[place].taken]
        whole = None if not broken_heals and rng.random() < 0.5 else contributed
        epoch = next(g for g in participants if g not in broken_heals).ranks[0].sampler.cursor.epoch
        followers = [g for g in self.groups if g not in broken_heals]
        lagging = [g for g in late if rng.random() < 0.3]  # its heal was not ready: it stays behind
        outcome = rng.choice(("commit", "veto", "death", "split")) if troubled else "commit"
        outcome = outcome if taken else "veto"
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.log.append(
            f"{outcome}: epoch {epoch}, {len(participants)} participants, {len(taken)} samples, {len(late)} late"
        )
        version = (max(g.version for g in self.groups)[0] + 1, self.commits + 1)
        if outcome == "commit":
            self._commit(followers, late, lagging, version, taken, whole)
        elif outcome == "veto":
            self._veto(self.groups)
        elif outcome == "death":
            self._veto(self.groups)
            self._kill(rng.choice(self.groups))
        else:  # some see the commit, some do not; afterwards one of them may be dead
            saw = [g for g in followers if g not in late and rng.random() < 0.5]
            missed = [g for g in self.groups if g not in saw]
            self._commit(saw, [], [], version, taken, whole)
            self._veto(missed)
            self._kill(rng.choice(self.groups))
        self._veto([g for g in broken_heals if g in self.groups and outcome == "commit"])

    def _commit(
        self, groups: list[Group], late: list[Group], lagging: list[Group], version: tuple[int, int],
        taken: list[int], contributed: set[int] | None,
    ) -> None:  # fmt: skip
        self.commits += 1
        for group in groups:
            if group in lagging:
                group.veto()
                continue
            if group in late:
                group.heal()
            group.commit(version, taken, contributed)

    def _veto(self, groups: list[Group]) -> None:
        for group in groups:
            group.veto()

    def _kill(self, group: Group) -> None:
        if len(self.groups) > 1:
            self.groups.remove(group)

    def check(self) -> None:
        """Every survivor's model contains every sample of every epoch exactly once."""
        for group in self.groups:
            faults = group.ledger.faults(self.config.epochs, self.config.length)
            assert faults == [], f"seed {self.seed} {self.config}\n" + "\n".join([*faults, *self.log[-30:]])
