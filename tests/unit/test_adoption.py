"""The environment of an adopted command, and that of its workers."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from holdfast import adopt
from holdfast.process import adoption
from holdfast.process.spawner import kept
from tests.promises import proves


@proves("adopted-commands.workers-inherit-nothing")
@pytest.mark.parametrize(
    "before",
    [
        {"PATH": "/bin", "X": "1"},
        {"PATH": "/bin::/usr/bin", "PYTHONPATH": "/a:/b"},
        {"PATH": "/opt/bin:/bin", "PYTHONPATH": ":/a"},
    ],
)
def test_workers_get_the_environment_from_before(before: dict[str, str]) -> None:
    once = adopt.adopted_environment(Path("/one"), before)
    twice = adopt.adopted_environment(Path("/two"), {**once, "HOLDFAST_OPTS": "--tee 3"})
    assert (once["PATH"], twice["PATH"]) == (f"/one/bin:{before['PATH']}", f"/two/bin:/one/bin:{before['PATH']}")
    for after in (before, once, twice):
        environment = {name.encode(): value.encode() for name, value in after.items()}
        found = adoption.without_adoption(environment)
        assert {name.decode(): value.decode() for name, value in found.items()} == before


def test_what_was_kept_for_one_adopted_command_is_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept.digest()
    for directory in ("/one", "/two"):
        for name, value in adopt.adopted_environment(Path(directory), os.environ).items():
            monkeypatch.setenv(name, value)
        assert kept.digest() == before


def test_what_holdfast_opts_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_OPTS", "--tee 3")
    monkeypatch.delenv("HOLDFAST_ADOPT", raising=False)
    assert adoption.options_text() == ""
    monkeypatch.setenv("HOLDFAST_ADOPT", "/one")
    assert adoption.options_text() == "--tee 3"


def test_files_in_a_directory_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    directory = tmp_path / "\udcff"
    adopt.write_files(directory)
    script = (directory / adoption.SCRIPTS / "torchrun").read_bytes()
    assert os.fsencode(shlex.quote(str(directory))) in script
    assert repr(str(directory)) in (directory / adoption.SITE / "sitecustomize.py").read_text(encoding="utf-8")
