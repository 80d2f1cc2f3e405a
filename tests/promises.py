"""Promises to users, beside the tests that prove them. `make docs` makes docs/behaviour.md from them.

    @promise("restarts.at-once: A restart follows at once, unless a delay was asked for.")
    def test_...

A promise has its identifier and its text here alone; its identifier begins with its section of the page. Other tests
that prove it, too, name the identifier: `@proves("restarts.at-once")`. docs/make_behaviour.py reads both from the
source, so the text is a literal; white space in it does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test")


def promise(text: str) -> Callable[[Test], Test]:
    """The test, or the class of tests, proves this."""
    return lambda test: test


def proves(*identifiers: str) -> Callable[[Test], Test]:
    """The test, or the class of tests, proves these promises of other tests, too."""
    return lambda test: test
