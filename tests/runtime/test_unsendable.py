"""State that cannot be sent: an error before training, and later the receivers' business, never a donor's end."""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.errors import EncodingError, StateRefusedError
from tests.runtime.harness import Action, Cluster, Replica, both
from tests.runtime.interleavings import launched, once_held, until_broken

if TYPE_CHECKING:
    from collections.abc import Callable

Note = namedtuple("Note", "step text")


class Opaque:
    """Nothing that can be sent."""


def explode() -> Any:
    raise OSError("the state could not be read")


def with_extra(extra: Callable[[int], Any]) -> Action:
    """A script that keeps something of its own in the state; it depends on the step."""

    def setup(replica: Replica) -> None:
        manager = replica.manager
        manager.register_state_dict_fn("extra", lambda _: None, lambda: {"log": extra(manager.current_step())})
        replica.wrap()

    return setup


def turns(after: int, into: Callable[[], Any]) -> Action:
    return with_extra(lambda step: into() if step >= after else [])


def comes_and_goes(cluster: Cluster, newcomer: Replica, *donors: Replica) -> None:
    """Start `newcomer` at step 5; every donor waits until it is asked for its state, and then until it was answered."""
    lighthouse = cluster.lighthouse

    def over() -> bool:
        return not newcomer.thread.is_alive()

    def asked(donor: Replica) -> None:
        lighthouse.wait_for(lambda: donor.manager._runtime.shell.transfer.snapshot_wanted or over())

    donors[0].actions[5, "boundary"] = lambda _: cluster.start(newcomer)
    for donor in donors:
        donor.actions[6, "boundary"] = asked
        donor.actions[7, "boundary"] = lambda _: lighthouse.wait_for(over)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]


def test_it_is_an_error_before_training_that_names_the_key_path(cluster: Cluster) -> None:
    bad = Replica(0, setup=turns(0, Opaque))
    cluster.run(bad)
    assert isinstance(bad.error, EncodingError)
    assert "state['user']['extra']['log']: type tests.runtime.test_unsendable.Opaque" in str(bad.error)
    assert bad.commits == []
    assert cluster.lighthouse.asks == 0


@pytest.mark.parametrize(("into", "words"), [(Opaque, "Opaque"), (explode, "could not be read")])
def test_donors_of_what_cannot_be_sent_train_on(
    cluster: Cluster, into: Callable[[], Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    again = Replica(2, name="r2", seed=77, steps=10, setup=turns(0, list))
    donors = [
        Replica(0, steps=10, setup=turns(3, into)),
        Replica(1, steps=10, setup=turns(3, into)),
    ]
    comes_and_goes(cluster, again, *donors)
    cluster.run(*donors)
    cluster.check(steps=10, survivors=2, errors=True)
    assert [d.error for d in donors] == [None, None]
    assert [d.vetoes for d in donors] == [[], []]
    assert isinstance(again.error, StateRefusedError)
    for donor in donors:
        assert donor.manager.replica_id in str(again.error)
    assert words in str(again.error)
    told = [text for text in errors(caplog) if "trains on" in text]
    assert len(told) == len({text.split(":")[0] for text in told}) == 2


def test_the_other_donor_is_used(cluster: Cluster) -> None:
    again = Replica(2, name="r2", seed=77, steps=10, setup=turns(0, list))
    donors = [
        Replica(0, steps=10, at={(5, "boundary"): cluster.joins(again)}, setup=turns(3, Opaque)),
        Replica(1, steps=10, setup=turns(0, list)),
    ]
    cluster.run(*donors)
    cluster.check(steps=10, survivors=3)
    assert again.commits


def test_a_class_that_the_newcomer_does_not_know_is_named(cluster: Cluster) -> None:
    again = Replica(2, name="r2", seed=77, steps=10, setup=turns(99, list))
    donors = [
        Replica(0, steps=10, at={(5, "boundary"): cluster.joins(again)}, setup=turns(3, lambda: [Note(1, "a")])),
        Replica(1, steps=10, setup=turns(3, lambda: [Note(1, "a")])),
    ]
    cluster.run(*donors)
    cluster.check(steps=10, survivors=2, errors=True)
    assert isinstance(again.error, StateRefusedError)
    assert "test_unsendable:Note (state['user']['extra']['log'][0])" in str(again.error)
    assert "register_state_type" in str(again.error)


def test_what_the_newcomer_has_itself_travels(cluster: Cluster) -> None:
    again = Replica(2, name="r2", seed=77, steps=10, setup=with_extra(lambda step: {Note(step, "a")}))
    cluster.run(
        Replica(
            0, steps=10, at={(5, "boundary"): cluster.joins(again)}, setup=with_extra(lambda step: {Note(step, "")})
        ),
        Replica(1, steps=10, setup=with_extra(lambda step: {Note(step, "")})),
    )
    cluster.check(steps=10, survivors=3)


def test_a_member_that_fell_behind_ends_alone(cluster: Cluster) -> None:
    """It asks once; asking again and again would cost the others a quorum per step."""

    def behind(replica: Replica) -> None:
        replica.manager.report_error(RuntimeError("injected"))

    def receives_once_launched(replica: Replica) -> None:
        transfer = replica.manager._runtime.shell.transfer
        receive = transfer.receive

        def receive_late(*arguments: Any) -> Any:
            cluster.lighthouse.wait_for(lambda: all(launched(other, 5) for other in others))
            return receive(*arguments)

        transfer.receive = receive_late  # type: ignore[assignment]

    others = [Replica(i, steps=10, at={(5, "boundary"): until_broken}, setup=turns(3, Opaque)) for i in (0, 1)]
    falls = {(4, "backward"): both(once_held(others, 5), behind, receives_once_launched)}
    late = Replica(2, steps=10, at=falls, setup=turns(3, Opaque))
    cluster.run(*others, late)
    assert isinstance(late.error, StateRefusedError)
    assert [r.error for r in others] == [None, None]
    assert [r.commits[-1].step for r in others] == [10, 10]
    assert [r.vetoes for r in cluster.replicas] == [[5], [5], [4]]
    assert cluster.lighthouse.asks == 3 + 3 + 2, "all at first, all when it fell behind, the others when it had ended"
