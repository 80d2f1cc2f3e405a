"""`holdfast snapshots`: the snapshots that a run has in memory and on disk, or those of a directory."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from typing import Any

from holdfast.agent.snapshot_transfers import parts_on_disk
from holdfast.cli import console, runs
from holdfast.cli.arguments.parser import PlainParser
from holdfast.errors import HostError, UserError
from holdfast.observe import run_view, snapshots, words
from holdfast.observe.ask import AskedRun
from holdfast.observe.run_view import RunView
from holdfast.observe.snapshots import Listed
from holdfast.telemetry.status import SnapshotList, plain
from holdfast.text import plural, size_text

PROGRAM = "holdfast snapshots"

_EXPORT_LIMIT_S = 600.0
_HEADING = ("STEP", "RANKS", "SIZE", "AGE", "MEMORY", "COPIES", "DISK")

_EPILOG = """\
A snapshot that lacks ranks cannot be loaded, unless it is replicated. SIZE is that of all parts that were found.

exit status:
  0  the snapshots were listed, or written
  1  there is no such run, it cannot be asked, or the files cannot be written
  2  wrong usage, or more than one run fits

examples:
  holdfast snapshots job7
  holdfast snapshots job7 --export /data/step
  holdfast snapshots --dir /data/snapshots
"""


def get_parser() -> PlainParser:
    parser = runs.parser_for(PROGRAM, "List the snapshots of a run: steps, ages, sizes, and where they are.", _EPILOG)
    parser.add_argument("--dir", metavar="DIR", help="list those in a directory of --snapshot-dir; needs no run")
    parser.add_argument("--export", metavar="DIR", help="have the agents of this host write the newest snapshot of "
                        "which they have all parts, copies included, to DIR/step-N, as safetensors files; if parts are "
                        "on other hosts only, the newest one in memory, without these")  # fmt: skip
    return parser


def main(argv: Sequence[str]) -> int:
    return get_parser().run(argv, _show)


def _show(args: argparse.Namespace) -> str:
    if args.dir is not None:
        if args.export is not None or runs.name_in(args):
            raise UserError("--dir is for a directory; leave out RUN and --export")
        found = parts_on_disk(args.dir, time.time(), _complain)
        return _text({os.uname().nodename: SnapshotList(0, 0, args.dir, tuple(found))}, args)
    run = runs.open_run(args)
    view = run_view.look(run)
    nodes, problems = run.ask_each([*view.agents], {"command": "snapshots"}, SnapshotList)
    for name, problem in problems.items():
        _complain(f"node {name} is left out: {problem}")
    if problems and not nodes:
        raise HostError("no node has answered")
    if args.export is None:
        return _text(nodes, args)
    told = _export(run, view, nodes, args.export)
    return json.dumps(told) + "\n" if args.json else f"{told['text']}\n"


def _complain(text: str) -> None:
    console.write_error(PROGRAM, text)


def _text(nodes: dict[str, SnapshotList], args: argparse.Namespace) -> str:
    listed = snapshots.listed(nodes)
    if args.json:
        told = [
            {**plain(each), "step": each.step, "world_size": each.key[3], "is_replicated": each.key[4]}
            for each in listed
        ]
        return json.dumps({"snapshots": told, "nodes": plain(nodes)}, indent=2) + "\n"
    if not listed:
        return "there are no snapshots\n"
    return "\n".join(words.table([_HEADING, *map(_row, listed)])) + "\n"


def _row(each: Listed) -> tuple[str, ...]:
    places = [plural(len(each.places[where]), "node") if where in each.places else "-" for where in ("memory", "copy")]
    on_disk = "yes" if "disk" in each.places else "-"
    return (str(each.step), each.rank_words(), size_text(each.bytes), words.age_text(each.age_s), *places, on_disk)


def _export(run: AskedRun, view: RunView, nodes: dict[str, SnapshotList], directory: str) -> dict[str, Any]:
    here = [name for name, told in view.agents.items() if told.is_here and name in nodes]
    newest, asked, others = _chosen(nodes, here)
    if not asked:
        raise HostError(f"step {newest.step} is on other hosts ({', '.join(others)}); run this command there")
    os.makedirs(directory, exist_ok=True)
    request = {"command": "export", "snapshot": newest.key, "directory": os.path.abspath(directory)}
    for name, answer in run.ask_nodes(asked, request, _EXPORT_LIMIT_S).items():
        if isinstance(answer, HostError):
            raise HostError(f"{name}: {answer}")
    if others:
        _complain(f"parts of step {newest.step} are on other hosts ({', '.join(others)}); run this command there, too")
    where = f"{directory}/step-{newest.step}"
    text = "\n".join(f"{name}: wrote its part of step {newest.step} to {where}" for name in asked)
    return {"step": newest.step, "directory": where, "nodes": asked, "missing_nodes": others, "text": text}


def _chosen(nodes: dict[str, SnapshotList], here: Sequence[str]) -> tuple[Listed, list[str], list[str]]:
    """The snapshot to write, the nodes of this host that have a part of it, and the nodes of other hosts whose parts
    would be missing. The newest one of which this host has every part, perhaps as a copy, comes first."""
    of_this_host = snapshots.listed({name: nodes[name] for name in here})
    for each in of_this_host:
        if not each.missing and (holders := {*each.places.get("memory", ()), *each.places.get("copy", ())}):
            return each, sorted(holders), []
    in_memory = [each for each in snapshots.listed(nodes) if "memory" in each.places and not each.missing]
    if not in_memory:
        raise HostError("no snapshot in memory is complete")
    newest = in_memory[0]
    holders = {*newest.places["memory"]}
    return newest, sorted(holders & {*here}), sorted(holders - {*here})
