"""Which requests the dashboard answers: the key, the cookie, the name in the request, and where it comes from."""

from __future__ import annotations

import pytest

from holdfast.observe.dashboard.access import WRONG_HOST, WRONG_ORIGIN, Access
from tests.promises import proves

OWN = Access.for_names(["Node1", "node1.example"])


def test_keys_are_long_and_of_one_start() -> None:
    keys = {Access.for_names([]).key for _ in range(100)}
    assert len(keys) == 100
    assert min(map(len, keys)) >= 32


def test_the_key() -> None:
    assert OWN.opens(OWN.key)
    for wrong in ("", "x", OWN.key[:-1], OWN.key + "x", "\ud800", "ä" * 32):
        assert not OWN.opens(wrong)


@proves("dashboard.key-answer-line-403")
def test_the_cookie_is_the_key_and_nothing_else_is() -> None:
    text = OWN.set_cookie()
    assert text.endswith("; Path=/; HttpOnly; SameSite=Strict")
    sent = text.partition(";")[0]
    for others in ("other=1", 'set={"by": [another, program]}', '"', "a{b=1", "ä=ö"):
        assert OWN.knows({"cookie": f"{others}; {sent}; more=2"}), others
    other = Access.for_names([])
    assert other.cookie != OWN.cookie, "a browser sends cookies to all ports of a host"
    for wrong in ("", f"{OWN.cookie}=", f"{OWN.cookie}=x", other.set_cookie().partition(";")[0], "=;=;", "\x00", "a b"):
        assert not OWN.knows({"cookie": wrong})
    assert not OWN.knows({})


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "127.0.0.1", "localhost:1", "LOCALHOST", "[::1]:8000", "10.1.2.3:80", "node1:8000",
     "NODE1.example:8000"],
)  # fmt: skip
def test_names_of_this_server(host: str) -> None:
    assert OWN.objection("GET", {"host": host}) == ""


@proves("dashboard.pages-sites-requests-names")
@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "node1.evil", "[::1",
     "node1@evil.example", "evil.example#localhost", "0x7f.1", "[localhost]:80", "\x00"],
)  # fmt: skip
def test_names_of_others(host: str) -> None:
    assert OWN.objection("GET", {"host": host}) == WRONG_HOST


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "",
        "http://localhost:9000",
        "http://127.0.0.1:8000",
        "https://localhost:8000.evil",
        "http://[",
    ],
)
def test_pages_of_others(method: str, origin: str) -> None:
    assert OWN.objection(method, {"host": "localhost:8000", "origin": origin}) == WRONG_ORIGIN


def test_our_own_page() -> None:
    headers = {"host": "localhost:8000", "origin": "http://localhost:8000"}
    assert OWN.objection("POST", headers) == OWN.objection("GET", headers) == ""
    assert OWN.objection("POST", {"host": "localhost:8000"}) == WRONG_ORIGIN, "browsers say where a POST comes from"
