"""How often leases are renewed."""

from __future__ import annotations

import itertools

import pytest

from ft_core.protocol.lighthouse.pace import ACKNOWLEDGED, ALONE, AS_USUAL, LONGEST, is_acknowledged, renewal_s, rest_s
from ft_core.protocol.lighthouse.replica_table import CLOSED_BEFORE
from ft_core.rpc.channel import server_options
from ft_core.settings import MAX_REPLICAS, LighthouseSettings


def test_up_to_a_number_of_leases_nothing_is_asked_for() -> None:
    assert {renewal_s(leases, 1.0) for leases in range(AS_USUAL + 1)} == {0.0}


def test_more_leases_are_not_more_renewals_until_each_renews_as_seldom_as_it_may() -> None:
    assert renewal_s(1000, 1.0) == LONGEST
    for liveness_s in (0.2, 1.0, 30.0):
        times = [renewal_s(leases, liveness_s) for leases in range(AS_USUAL + 1, 4 * MAX_REPLICAS)]
        assert all(a <= b for a, b in itertools.pairwise(times))
        assert min(times) > liveness_s / 4
        assert max(times) == liveness_s * LONGEST
        rates = [leases / renewal_s(leases, liveness_s) for leases in range(AS_USUAL + 1, int(4 * LONGEST * AS_USUAL))]
        assert max(rates) <= 4.01 * AS_USUAL / liveness_s


def test_a_connection_that_closes_between_two_renewals_is_not_taken_for_a_freeze() -> None:
    """Also if the next one was a good deal late."""
    assert 1.25 * renewal_s(MAX_REPLICAS, 1.0) < CLOSED_BEFORE


@pytest.mark.parametrize("liveness_s", [0.2, 1.0, 30.0])
def test_no_connection_is_pinged_between_two_renewals(liveness_s: float) -> None:
    """Also if the next one is a little late; and who is silent is given up as late as without many leases."""
    options = dict(server_options(liveness_s))
    assert 1.1 * 1000 * renewal_s(MAX_REPLICAS, liveness_s) < options["grpc.keepalive_time_ms"]
    assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] == pytest.approx(
        1100 * liveness_s, 0.01
    )


def test_at_least_one_renewal_per_liveness_timeout_is_acknowledged_and_the_first_of_a_stream_is() -> None:
    for leases in (1, AS_USUAL, 2 * AS_USUAL - 1):
        assert all(is_acknowledged(leases, number) for number in range(5))
    for leases in (2 * AS_USUAL, MAX_REPLICAS, 4 * MAX_REPLICAS):
        assert [is_acknowledged(leases, number) for number in range(5)] == [True, False, True, False, True]
        assert ACKNOWLEDGED * renewal_s(leases, 1.0) <= 1.0


def test_a_small_room_never_rests_and_a_full_one_no_longer_than_a_closed_connection_has_to_come_back() -> None:
    assert {rest_s(replicas) for replicas in range(ALONE + 1)} == {0.0}
    assert 0.0 < rest_s(ALONE + 1) < rest_s(MAX_REPLICAS) < LighthouseSettings().grace_s / 4
