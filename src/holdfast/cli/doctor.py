"""`holdfast doctor`: checks this host and, with an endpoint, the way to the coordinator. It takes some seconds at most.

`checks` has a function for each check: `host` those of this host, `endpoint` those of the way to a coordinator.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence

from holdfast import escape
from holdfast.cli import console, runs
from holdfast.cli.arguments.parser import PlainParser
from holdfast.cli.checks import endpoint, findings, host
from holdfast.cli.checks.findings import Finding, Level
from holdfast.errors import HoldfastError, UserError
from holdfast.frozen import fields_of
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
    args = get_parser().parse_args(argv)
    found: list[Finding] = []

    def show() -> str:
        found.extend(examine(args))
        if args.json:
            return json.dumps({"findings": [fields_of(each) for each in found]}, indent=2) + "\n"
        return "\n".join(lines_of(found)) + "\n"

    code = console.show(PROGRAM, show)
    return code or int(any(each.level is Level.PROBLEM for each in found))


def examine(args: argparse.Namespace) -> list[Finding]:
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
    return [Finding(check, *verdict) for check, verdict in found.items()]


def _run_here(args: argparse.Namespace) -> findings.Verdict:
    try:
        view = run_view.look(runs.open_run(argparse.Namespace(**{**vars(args), "token_file": ""})))
    except HoldfastError as error:
        return findings.problem(str(error), endpoint.COMPARE_RUN)
    return findings.ok(words.heading(view))


def lines_of(found: Sequence[Finding]) -> Iterator[str]:
    """One for each finding, and a last one that counts them."""
    width = max(len(each.check) for each in found)
    for each in found:
        fix = f"; fix: {each.fix}" if each.fix else ""
        yield f"{each.level:<7}  {each.check:<{width}}  {escape.cut(escape.one_line(each.text + fix))}"
    counts = {level: sum(each.level is level for each in found) for level in (Level.PROBLEM, Level.WARNING)}
    yield ", ".join(f"{number or 'no'} {level}{'' if number == 1 else 's'}" for level, number in counts.items())
