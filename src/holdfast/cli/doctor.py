"""`holdfast doctor`: checks this host and, with an endpoint, the way to the coordinator. It takes some seconds at most.

`checks` has a function for each check: `host` those of this host, `endpoint` those of the way to a coordinator.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast import escape
from holdfast.cli import runs
from holdfast.cli.arguments.parser import PlainParser
from holdfast.cli.checks import endpoint, findings, host
from holdfast.cli.checks.findings import Level, Verdict
from holdfast.errors import HoldfastError, UserError
from holdfast.observe import run_view, words

PROGRAM = "holdfast doctor"

LIMIT_S = 9.0

_EPILOG = """\
Each check is a line: ok, warning (a run works, but worse, or not yet) or problem, and what to do about it. With
--rdzv-endpoint it takes the steps of an agent that joins: name, connection, TLS, version, token, and RUN if it is
given. With RUN alone the run is looked for on this host. Nothing is changed, and it takes ten seconds at most.

exit status:
  0  there is no problem; there may be warnings
  1  there is a problem
  2  wrong usage

examples:
  holdfast doctor
  holdfast doctor job7 --rdzv-endpoint node1:29400 --token-file token
"""


def get_parser() -> PlainParser:
    return runs.parser_for(PROGRAM, "Check this host, and the way to the coordinator of a run.", _EPILOG)


def main(argv: Sequence[str]) -> int:
    found: dict[str, Verdict] = {}

    def show(args: argparse.Namespace) -> str:
        found.update(examine(args))
        return json.dumps(as_json(found), indent=2) + "\n" if args.json else text_of(found)

    return get_parser().run(argv, show) or int(any(level is Level.PROBLEM for level, *_ in found.values()))


def examine(args: argparse.Namespace) -> dict[str, Verdict]:
    """Raises UserError if the options make no sense."""
    checks: dict[str, findings.Check] = dict(host.CHECKS)
    way = None
    if args.rdzv_endpoint is not None:
        way = endpoint.Way(args)
        checks["endpoint"] = way.examine
    elif args.rdzv_conf or args.rdzv_backend != "tcp":
        raise UserError("--rdzv-backend and --rdzv-conf are for --rdzv-endpoint")
    else:
        if runs.name_in(args) is not None:
            checks["run"] = lambda: _run_here(args)
        if args.token_file or os.environ.get("HOLDFAST_TOKEN"):
            checks["token"] = lambda: endpoint.read_token(args.token_file)[2]
    found = findings.run_all(checks, LIMIT_S)
    if way is not None:
        late = found.pop("endpoint", None)
        found |= {check: way.found[check] for check in endpoint.ORDER if check in way.found}
        found |= {"endpoint": late} if late is not None else {}
    return found


def _run_here(args: argparse.Namespace) -> Verdict:
    try:
        view = run_view.look(runs.open_run(argparse.Namespace(**{**vars(args), "token_file": ""})))
    except HoldfastError as error:
        return findings.problem(str(error), endpoint.COMPARE_RUN)
    return findings.ok(words.heading(view))


def as_json(found: Mapping[str, Verdict]) -> dict[str, Any]:
    rows = [(check, *verdict) for check, verdict in found.items()]
    return {"findings": [dict(zip(("check", "level", "text", "fix"), row, strict=True)) for row in rows]}


def text_of(found: Mapping[str, Verdict]) -> str:
    """A line for each finding, and a last one that counts them."""
    width, lines = max(map(len, found)), []
    for check, (level, text, fix) in found.items():
        whole = f"{text}; fix: {fix}" if fix else text
        lines.append(f"{level:<7}  {check:<{width}}  {escape.cut(escape.one_line(whole))}")
    levels = [level for level, *_ in found.values()]
    counts = {level: levels.count(level) for level in (Level.PROBLEM, Level.WARNING)}
    lines.append(", ".join(f"{number or 'no'} {level}{'' if number == 1 else 's'}" for level, number in counts.items()))
    return "\n".join(lines) + "\n"
