"""What the shell of a run on etcd makes of requests that fail: when etcd counts as out of reach, and when not."""

from __future__ import annotations

from typing import Any, cast

import pytest

from holdfast.rendezvous import elected_words as words
from holdfast.rendezvous.elected import Elected
from holdfast.rendezvous.etcd_client import EtcdClient, Unavailable
from holdfast.rendezvous.etcd_link import EtcdLink, _Posted
from holdfast.rendezvous.keyspace import Keyspace
from holdfast.rendezvous.participant import Participant
from holdfast.rendezvous.reach import Reach
from holdfast.rendezvous.session import Session, SessionSettings
from holdfast.rendezvous.vocabulary import Settings
from holdfast.rendezvous.world import NodeFacts

AWAY = Unavailable("connection refused")
SOMEBODY = words.Found(b"b-1-x", 3, 3, lease=7)


def nowhere(*_: Any) -> None:
    pass


@pytest.fixture
def link() -> EtcdLink:
    """Of a node that has said its first word. Nothing of it runs, and it asks nobody."""
    node = Participant(NodeFacts("a"), Settings(), Session(SessionSettings()))
    client = cast(EtcdClient, None)
    made = EtcdLink(client, Keyspace("p", "r"), Elected(node), Reach("e", 9.0, 0.0, "etcd"), nowhere, nowhere, nowhere)
    made._note(_Posted(made, None, "say"))
    assert made.reach.since is None
    return made


@pytest.mark.parametrize("request_", ["lease", "follow", "say", "campaign"])
def test_what_fails_counts_until_it_works(link: EtcdLink, request_: str) -> None:
    link._note(_Posted(link, None, request_, AWAY))
    link._note(_Posted(link, None, "something else"))
    assert link.reach.since is not None
    link._note(_Posted(link, None, request_))
    assert link.reach.since is None


def test_what_failed_for_a_leader_that_is_none_any_more_is_no_outage(link: EtcdLink) -> None:
    """It would never be asked for again, and the outage never be over."""
    link._note(_Posted(object(), words.WriteFailed(1), "write", AWAY))
    link._note(_Posted(object(), words.LoadFailed(1), "load", AWAY))
    assert link.reach.since is None


def test_an_election_that_somebody_has_won_need_not_be_held(link: EtcdLink) -> None:
    link._see_leader(SOMEBODY)
    link._note(_Posted(link, words.CampaignFailed(), "campaign", AWAY))
    assert link.reach.since is None
    link._see_leader(None)
    link._note(_Posted(link, words.CampaignFailed(), "campaign", AWAY))
    assert link.reach.since is not None
    link._see_leader(SOMEBODY)
    link._note(_Posted(link, None, "lease"))
    assert link.reach.since is None
