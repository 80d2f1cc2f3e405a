"""`holdfast remote-agent`: ssh starts it on each host of `holdfast run --hosts` (`hosts/ssh`). It is not for users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from holdfast.cli import console, exit_status, run
from holdfast.cli.arguments import command_line
from holdfast.hosts.ssh import remote_agent


class _Run:
    args: Any

    def read(self, words: Sequence[str], prefix_template: str) -> None:
        self.args = command_line.read(words)
        self.args.prefix_template = prefix_template
        console.set_up(quiet=self.args.quiet, verbose=self.args.verbose)

    def run(self) -> None:
        run.run(self.args)

    def explain(self, error: BaseException) -> int:
        return exit_status.explain(error)

    def place(self) -> tuple[str, str, dict[str, Any]]:
        return self.args.rdzv_endpoint, self.args.rdzv_id, run.rendezvous_settings(self.args)


def main(argv: Sequence[str]) -> NoReturn:
    mark, timeout_s = argv
    remote_agent.serve(mark, float(timeout_s), _Run())
