"""`holdfast completion`: scripts with which bash, zsh and fish complete commands, options and their values.

They are made from the catalogue of commands and need no Python when they complete. The program that `holdfast run`
starts, and its arguments, are completed as files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from holdfast.cli.arguments.parser import PlainParser
from holdfast.cli.catalogue import Command, Flag, commands

PROGRAM = "holdfast completion"
_LONGEST_SUMMARY = 90
_EPILOG = """\
examples:
  source <(holdfast completion bash)              # in ~/.bashrc
  source <(holdfast completion zsh)               # in ~/.zshrc, after compinit
  holdfast completion fish > ~/.config/fish/completions/holdfast.fish
"""


def get_parser() -> PlainParser:
    parser = PlainParser(PROGRAM, "Print a script with which a shell completes holdfast's commands.", _EPILOG)
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")
    return parser


def main(argv: Sequence[str]) -> int:
    return get_parser().run(argv, lambda args: script(args.shell))


def script(shell: str) -> str:
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands())


# bash splits words at `=`, and shows no descriptions.

_BASH = """\
_holdfast() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]}
    local flags= valued= words= starts= choices= skip= at
    COMPREPLY=()
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W "@NAMES@ --help --version" -- "$cur"))
        return
    fi
    [ "$cur" != = ] || cur=
    [ "$prev" != = ] || prev=${COMP_WORDS[COMP_CWORD-2]}
    case $command in
@COMMANDS@
    *) return ;;
    esac
    for ((at = 2; at < COMP_CWORD; at++)); do
        case ${COMP_WORDS[at]} in
        =) skip=1 ;;
        -*) case " $valued " in *" ${COMP_WORDS[at]} "*) skip=1 ;; *) skip= ;; esac ;;
        *) if [ -n "$skip" ]; then skip=
           elif [ -n "$starts" ] && { [ "$at" != 2 ] || [ -z "$words" ]; }; then return
           fi ;;
        esac
    done
    case $command:$prev in
@VALUES@
    *) case " $valued " in *" $prev "*) return ;; esac
       case $cur in
       -*) choices=$flags ;;
       *) [ "$COMP_CWORD" != 2 ] || choices=$words ;;
       esac ;;
    esac
    COMPREPLY=($(compgen -W "$choices" -- "$cur"))
}
complete -o default -F _holdfast holdfast
"""


def _bash(known: Sequence[Command]) -> str:
    cases, values = [], []
    for each in known:
        named = {"flags": _names(each.flags), "valued": _names(flag for flag in each.flags if flag.metavar)}
        named |= {"words": " ".join(each.words), "starts": "1" if each.starts_program else ""}
        settings = "\n        ".join(f"{name}='{value}'" for name, value in named.items() if value)
        cases.append(f"    {each.name})\n        {settings} ;;")
        for flag in each.flags:
            if flag.choices:
                patterns = "|".join(f"{each.name}:{name}" for name in flag.names)
                values.append(f"    {patterns}) choices='{' '.join(flag.choices)}' ;;")
    texts = {"@NAMES@": _names_of(known), "@COMMANDS@": "\n".join(cases), "@VALUES@": "\n".join(values)}
    return re.sub("@[A-Z]+@", lambda found: texts[found.group()], _BASH)


def _names(flags: Iterable[Flag]) -> str:
    return " ".join(name for flag in flags for name in flag.names)


def _names_of(known: Iterable[Command]) -> str:
    return " ".join(each.name for each in known)


# zsh: `_arguments` reads a specification of each option.

_ZSH = """\
#compdef holdfast
_holdfast() {
    if (( CURRENT == 2 )); then
        local -a names=(
@NAMES@
        )
        _describe -t commands command names
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
@COMMANDS@
    *) _files ;;
    esac
}
if [[ $funcstack[1] == _holdfast ]]; then
    _holdfast "$@"
else
    compdef _holdfast holdfast
fi
"""


def _zsh(known: Sequence[Command]) -> str:
    names = "\n".join(f"            {_quoted(f'{each.name}:{each.what}')}" for each in known)
    cases = []
    for each in known:
        specs = [spec for flag in each.flags for spec in _zsh_specs(flag)]
        if each.words:
            specs.append(f"1:name:({' '.join(each.words)})")
        # Options after the program are the program's own; those of `submit` come after the engine.
        is_program_first = each.starts_program and not each.words
        specs.append("*::program and its arguments:_files" if is_program_first else "*:file:_files")
        lines = " \\\n            ".join(map(_quoted, specs))
        ends = "-A '-*' " if is_program_first else ""
        cases.append(f"    {each.name})\n        _arguments {ends}\\\n            {lines} ;;")
    texts = {"@NAMES@": names, "@COMMANDS@": "\n".join(cases)}
    return re.sub("@[A-Z]+@", lambda found: texts[found.group()], _ZSH)


def _zsh_specs(flag: Flag) -> Iterable[str]:
    action = f"({' '.join(flag.choices)})" if flag.choices else "_files" if flag.takes_file else " "
    value = ":".join(["", re.sub(r"([:\[\]\\])", r"\\\1", flag.metavar), action]) if flag.metavar else ""
    text = re.sub(r"([:\[\]\\])", r"\\\1", _shortened(flag))
    for name in flag.names:
        before = "*" if flag.may_repeat else f"({' '.join(flag.names)})" if len(flag.names) > 1 else ""
        joined = "=" if value and name.startswith("--") else ""
        yield f"{before}{name}{joined}[{text}]{value}"


# fish: one line for each option, with its description.

_FISH = """\
function __holdfast_in
    set -l words (commandline -opc)
    test (count $words) -ge 2; and test $words[2] = $argv[1]
end
"""


def _fish(known: Sequence[Command]) -> str:
    lines = [
        f"complete -c holdfast -f -n __fish_use_subcommand -a {each.name} -d {_fished(each.what)}" for each in known
    ]
    for each in known:
        start = f"complete -c holdfast -n '__holdfast_in {each.name}'"
        if each.words:
            lines.append(f"{start} -f -a {_fished(' '.join(each.words))}")
        lines += [f"{start} {_fish_flag(flag)}" for flag in each.flags]
    return _FISH + "\n".join(lines) + "\n"


def _fish_flag(flag: Flag) -> str:
    names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
    value = ""
    if flag.metavar:
        value = f" -x -a {_fished(' '.join(flag.choices))}" if flag.choices else " -r -F" if flag.takes_file else " -x"
    return f"{names}{value} -d {_fished(_shortened(flag))}"


def _shortened(flag: Flag) -> str:
    text = flag.summary
    return text if len(text) <= _LONGEST_SUMMARY else text[: text.rindex(" ", 0, _LONGEST_SUMMARY)].rstrip(",") + " ..."


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fished(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
