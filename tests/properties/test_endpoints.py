"""Whatever the text, reading an endpoint or settings gives a value or a ValueError."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.rendezvous.endpoints import parse_rendezvous_endpoint, try_parse_port
from holdfast.rendezvous.settings import parse_rendezvous_config
from tests.promises import promise

PORTS = st.integers(0, 65535)
LABELS = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=20)
NAMES = st.lists(LABELS, min_size=1, max_size=5).map(".".join)
V4_ADDRESSES = st.ip_addresses(v=4).map(str)
V6_ADDRESSES = st.ip_addresses(v=6).map(str)
SPACE = st.text(" \t\n", max_size=3)
NEAR_ENDPOINTS = st.text("[]:.%-_ \n\t0159aZé/=,", max_size=20)


def value_or_refusal(parse: Callable[..., Any], *args: Any) -> Any:
    try:
        return parse(*args)
    except ValueError as refusal:
        return refusal


@promise("rendezvous.text-endpoint-error-names: Any text is an endpoint or an error that names it.")
@given(st.none() | st.text() | NEAR_ENDPOINTS, PORTS)
def test_any_text_is_an_endpoint_or_a_value_error(text: str | None, default_port: int) -> None:
    result = value_or_refusal(parse_rendezvous_endpoint, text, default_port)
    if isinstance(result, ValueError):
        assert len(str(result).splitlines()) == 1
        assert repr((text or "").strip()) in str(result)
    else:
        host, port = result
        assert host
        assert not set(host) & set("[] \n/")
        assert 0 <= port < 65536


@given(NAMES | V4_ADDRESSES, PORTS, SPACE)
def test_names_and_v4_addresses_survive(host: str, port: int, space: str) -> None:
    assert parse_rendezvous_endpoint(f"{space}{host}:{port}{space}", 1) == (host, port)
    assert parse_rendezvous_endpoint(f"{host}{space}", port) == (host, port)


@given(V6_ADDRESSES, PORTS)
def test_v6_addresses_survive(host: str, port: int) -> None:
    assert parse_rendezvous_endpoint(f"[{host}]:{port}", 1) == (host, port)
    assert parse_rendezvous_endpoint(f"[{host}]", port) == (host, port)
    assert parse_rendezvous_endpoint(f"{host}:{port}", 1) == (host, port)


@given(st.text() | st.text("0123456789", max_size=7))
def test_any_text_is_a_port_or_none(text: str) -> None:
    port = try_parse_port(text)
    assert port is None or (0 <= port < 65536 and int(text) == port)


@given(st.text() | st.text("ab=, \n", max_size=20))
def test_any_text_is_settings_or_a_value_error(text: str) -> None:
    result = value_or_refusal(parse_rendezvous_config, text)
    if isinstance(result, ValueError):
        assert len(str(result).splitlines()) == 1
    else:
        assert all(key.strip() == key and key for key in result)
        assert all(value.strip() == value and value for value in result.values())


@given(st.dictionaries(LABELS.map("x".__add__), LABELS))
def test_settings_survive(settings: dict[str, str]) -> None:
    text = " , ".join(f"{key} = {value}" for key, value in settings.items())
    assert parse_rendezvous_config(text) == settings
