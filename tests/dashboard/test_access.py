"""Who may look, who may order, and what other sites' pages may not do."""

from __future__ import annotations

import pytest

from ft_core.access import Tokens
from ft_core.dashboard.access import OWN_HEADER, Access, Refusal

HERE = {"Host": "localhost:29511"}
OWN = {OWN_HEADER: "1", "Origin": "http://localhost:29511", "Sec-Fetch-Site": "same-origin"}


def status(refusal: Refusal | None) -> int:
    return refusal.status if refusal is not None else 200


def access(host: str, job: str = "", admin: str = "") -> Access:
    return Access(host, Tokens(job, admin))


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("localhost:29511", 200), ("127.0.0.1:29511", 200), ("127.8.0.1", 200), ("[::1]:29511", 200),
        ("localhost", 200), ("evil.example:29511", 403), ("localhost.evil.example", 403),
        ("10.0.0.7:29511", 403), ("", 403),
        ("[::ffff:10.0.0.7]:1", 403), ("127.0.0.1.evil.example:29511", 403),
    ],
)  # fmt: skip
def test_on_loopback_a_foreign_name_is_refused(host: str, answer: int) -> None:
    """A page of another site whose name leads to 127.0.0.1 (DNS rebinding) would read everything."""
    assert status(access("localhost").host_refusal({"Host": host})) == answer


def test_elsewhere_any_name_may_lead_here() -> None:
    assert access("0.0.0.0", "secret", "admin").host_refusal({"Host": "trainer0:29511"}) is None


@pytest.mark.parametrize(
    ("rule", "given", "answer"),
    [
        (access("localhost"), {}, 200),
        (access("localhost", "job"), {}, 200),
        (access("0.0.0.0"), {}, 200),  # --insecure
        (access("0.0.0.0", "job", "admin"), {}, 401),
        (access("0.0.0.0", "job", "admin"), bearer("other"), 401),
        (access("0.0.0.0", "job", "admin"), bearer("job"), 200),
        (access("0.0.0.0", "job", "admin"), bearer("admin"), 200),
        (access("0.0.0.0", "", "admin"), {}, 200),  # --insecure
        (access("0.0.0.0", "job", "admin"), {"Authorization": "job"}, 401),
    ],
)
def test_who_may_look(rule: Access, given: dict[str, str], answer: int) -> None:
    assert status(rule.look_refusal({**HERE, **given})) == answer


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({**OWN, **bearer("admin")}, 200),
        ({OWN_HEADER: "1", **bearer("admin")}, 200),  # a tool, which sends no Origin
        ({**OWN, **bearer("job")}, 401),
        ({**OWN, **bearer("")}, 401),
        ({**OWN, **bearer("\xe4dmin")}, 401),
        (OWN, 401),
        ({**bearer("admin")}, 403),
        ({**OWN, **bearer("admin"), "Origin": "https://evil.example"}, 403),
        ({**OWN, **bearer("admin"), "Origin": "null"}, 403),
        ({**OWN, **bearer("admin"), "Origin": "http://localhost:8888"}, 403),
        ({**OWN, **bearer("admin"), "Sec-Fetch-Site": "cross-site"}, 403),
        ({**OWN, **bearer("admin"), "Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_who_may_order(given: dict[str, str], answer: int) -> None:
    assert status(access("localhost", "job", "admin").order_refusal({**HERE, **given})) == answer


def test_the_jobs_token_orders_where_there_is_no_other() -> None:
    rule = access("localhost", "job")
    assert status(rule.order_refusal({**HERE, **OWN, **bearer("job")})) == 200
    assert status(rule.order_refusal({**HERE, **OWN, **bearer("")})) == 401


def test_where_no_token_is_configured_nobody_may_order() -> None:
    rule = access("localhost")
    refusal = rule.order_refusal({**HERE, **OWN})
    assert refusal is not None
    assert refusal.status == 403
    assert "FT_ADMIN_TOKEN" in refusal.text
    assert rule.orders_off == refusal.text


def test_no_token_is_shown() -> None:
    assert "secret" not in repr(access("localhost", "secret", "secret2"))
