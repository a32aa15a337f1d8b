"""Tokens, what they allow, and which listeners may stand open."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from ft_core.access import (
    Tokens,
    admin_token,
    asks_nothing,
    check_listener,
    check_token,
    equal,
    insecure,
    job_token,
    own_admin_token,
)
from ft_core.certificates import Tls
from ft_core.control.lighthouse.lease_client import LeaseSettings
from ft_core.errors import ConfigError
from ft_core.launch.options import parse
from ft_core.manager import Manager
from ft_core.runtime.config import Arguments, resolve
from ft_core.settings import Environment, LighthouseSettings

MUTUAL, ONE_SIDED = Tls("c", "k", "ca"), Tls("c", "k")


@pytest.mark.parametrize(
    ("tokens", "given", "admits", "orders"),
    [
        (Tokens(), None, True, False),
        (Tokens(), "anything", True, False),
        (Tokens("job"), None, False, False),
        (Tokens("job"), "jo", False, False),
        (Tokens("job"), b"job", True, True),
        (Tokens("job"), "job", True, True),
        (Tokens("job", "chief"), "job", True, False),
        (Tokens("job", "chief"), "chief", True, True),
        (Tokens("job", "chief"), "", False, False),
        (Tokens("job", "chief"), None, False, False),
        (Tokens("", "chief"), None, True, False),
        (Tokens("", "chief"), "", True, False),
        (Tokens("", "chief"), "chief", True, True),
        (Tokens("job"), "j\u00f6b", False, False),
        (Tokens("job"), b"\xff", False, False),
    ],
)
def test_what_a_token_allows(tokens: Tokens, given: str | bytes | None, admits: bool, orders: bool) -> None:
    assert tokens.admits(given) is admits
    assert tokens.orders(given) is orders


def test_tokens_are_never_shown() -> None:
    assert "secret" not in repr(Tokens("secret-job", "secret-admin"))
    assert equal("a", "a")
    assert not equal("a", "b")


def test_no_settings_show_a_token() -> None:
    env = {"FT_TOKEN": "secret-job", "FT_LIGHTHOUSE": "127.0.0.1:1", "FT_ADMIN_TOKEN": "secret-admin"}
    manager = signature(Manager).parameters
    given: dict[str, Any] = {f.name: manager[f.name].default if f.name in manager else None for f in fields(Arguments)}
    arguments = Arguments(**(given | {"token": "secret-job", "room_id": "default"}))
    config = resolve(arguments, env)
    assert config.token == "secret-job"
    lease = LeaseSettings("127.0.0.1:1", "a:1", config.budget, token="secret-job")
    spec = parse([__file__], {name: text for name, text in env.items() if name != "FT_LIGHTHOUSE"})
    assert (spec.token, spec.admin_token) == ("secret-job", "secret-admin")
    server = LighthouseSettings(token="secret-job", admin_token="secret-admin")
    for it in (arguments, config, lease, spec, server, Environment.read(env)):
        assert "secret" not in repr(it)


def test_an_admin_token_that_everybody_has_is_none() -> None:
    with pytest.raises(ConfigError, match=r"FT_ADMIN_TOKEN is equal to FT_TOKEN: .*another value, or unset it"):
        Tokens("one", "one").check()
    assert Tokens("one", "other").check() == Tokens("one", "other")
    assert Tokens().check() == Tokens()


def test_the_admin_token_is_the_jobs_where_there_is_none(tmp_path: Path) -> None:
    file = tmp_path / "admin"
    file.write_text("chief\n")
    assert admin_token({}) == own_admin_token({}) == job_token({}) == ""
    assert admin_token({"FT_TOKEN": "job"}) == "job"
    assert own_admin_token({"FT_TOKEN": "job"}) == ""
    assert admin_token({"FT_TOKEN": "job", "FT_ADMIN_TOKEN": "chief"}) == "chief"
    assert admin_token({"FT_TOKEN": "job", "FT_ADMIN_TOKEN": ""}) == "job"
    assert admin_token({"FT_TOKEN": "job"}, str(file)) == "chief"
    assert admin_token({"FT_ADMIN_TOKEN": "chief"}, str(file)) == "chief"
    with pytest.raises(ConfigError, match="are both set, and differ"):
        admin_token({"FT_ADMIN_TOKEN": "other"}, str(file))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file"),
        (b" \n", "is empty: write the token"),
        (b"\xff\xfe", "printable ASCII"),
        (b"a" * 9999, "at most 4096"),
    ],
)
def test_a_file_without_a_token(content: bytes | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "admin"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--admin-token-file {file}.*{says}"):
        admin_token({}, str(file))


@pytest.mark.parametrize("token", ["t\u00f6ken", "a\nb", " a", "a ", "a" * 5000])
def test_what_cannot_travel_in_a_header(token: str) -> None:
    with pytest.raises(ConfigError, match=r"FT_ADMIN_TOKEN (must|has)") as caught:
        check_token(token, "FT_ADMIN_TOKEN")
    assert token.strip() == "a" or token not in str(caught.value)
    assert check_token("a-b_c.D!") == "a-b_c.D!"


@pytest.mark.parametrize(
    ("host", "token", "tls", "trusts_all", "refused"),
    [
        ("127.0.0.1", "", None, False, False),
        ("localhost", "", ONE_SIDED, False, False),
        ("::1", "", None, False, False),
        ("0.0.0.0", "", None, False, True),
        ("", "", None, False, True),
        ("10.0.0.7", "", ONE_SIDED, False, True),
        ("10.0.0.7", "", MUTUAL, False, False),
        ("10.0.0.7", "job", None, False, False),
        ("trainer0", "", None, True, False),
    ],
)
def test_who_may_listen(host: str, token: str, tls: Tls | None, trusts_all: bool, refused: bool) -> None:
    if not refused:
        check_listener("it", host, token, tls, "anything goes", trusts_all)
        return
    with pytest.raises(ConfigError, match=r"it without FT_TOKEN: anything goes\. Set FT_TOKEN .*FT_INSECURE=1"):
        check_listener("it", host, token, tls, "anything goes", trusts_all)


def test_the_environments_insecure() -> None:
    assert [insecure({"FT_INSECURE": text}) for text in ("1", "true", "0", "")] == [True, True, False, False]
    assert not insecure({})
    with pytest.raises(ConfigError, match="FT_INSECURE='yes' must be 1"):
        insecure({"FT_INSECURE": "yes"})
    assert asks_nothing("", None, False)
    assert not asks_nothing("", MUTUAL, False)
    assert not asks_nothing("", None, True)
