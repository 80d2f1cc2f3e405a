"""Prints docs/verdicts.md, which is made from the table in holdfast.failures.verdict.

python docs/make_verdicts.py > docs/verdicts.md
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.failures.verdict import NONE, RULES, SUBJECTS, Rule

_OPENING = """# Verdicts

`report.json` ([report.md](report.md)) and the events `failed`, `hung` and `ended` ([events.md](events.md)) have three
fields for a scheduler: `verdict`, `confidence` and `rule`. They are advice. holdfast itself does not act on them:
restarts follow `--max-restarts`, `--fatal-exceptions` and the other options of the restart policy.

| verdict | meaning |
|---|---|
| `restart` | the same nodes may try again |
| `stop` | another try ends in the same way until a person has changed something |
| `exclude-node` | try again without the host of the first failure |

`certain`: the evidence has one explanation. `likely`: other explanations exist, but are rarer. `unknown`: the evidence
does not tell; the verdict is then `restart`.

The first rule of the table that matches gives the verdict. Patterns are regular expressions; upper and lower case are
the same in messages and texts. Of a long text the first or the last 16,384 characters are searched. Texts are the
worker's own: a program that prints the line of a hardware error gets its verdict.

The report for people shows a verdict only if it is `certain` and not `restart`.

"""


def _row(rule: Rule) -> str:
    looks = f"<br>{rule.looks_at}: `{rule.pattern}`".replace("|", "\\|") if rule.looks_at else ""
    return f"| `{rule.name}` | {rule.verdict}, {rule.confidence} | {rule.why}{looks} |"


def page() -> Iterator[str]:
    yield f"{_OPENING}| rule looks at | which is |\n|---|---|"
    yield from (f"| {name} | {words} |" for name, (words, _) in SUBJECTS.items())
    yield "\n## The table\n\n| rule | verdict, confidence | why, and what it looks at |\n|---|---|---|"
    yield from map(_row, (*RULES, NONE))


if __name__ == "__main__":
    print("\n".join(page()))
