"""Leaves secrets out of what people send to others: command lines, environments, logs, JSON. Pure.

Three rules, all of them for every text:

* Values that are known to be secret (a token, a password) are replaced wherever they stand, also as JSON or a URL would
  write them.
* A value that is given a secret's name is replaced: `API_KEY=...`, `--password ...`, `"token": "..."`. A name that says
  where a secret is kept (`token_file`) does not count.
* What has the shape of a secret is replaced: private keys, the user part of a URL, tokens of well-known services.

Too much is replaced rather than too little. Nothing here can find a secret that has neither a name nor a shape, so a
person should look through the result. Every search is linear in the length of the text, because logs may hold anything:
a search that fails after a long look moves on behind the text that it has seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

MASK = "[left out]"
_SHORTEST_VALUE = 4  # A shorter text stands in too many places by chance.
_LONGEST = 4096

_UNQUOTED = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"  # In a URL.

# The middle of a name: MY_API_KEY, --wandb-api-key, passwd. `author` and `tokenizer` do not count. Short words count
# only as a whole part of a name: DB_PW, sentryDsn.
_PART = r"(?-i:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))"
_KEYWORD = re.compile(
    r"token(?!iz)|secret|passw(?:or)?d|passphrase|passcode|cred(?:s|ential)|bearer|cookie|webhook|auth(?!or)|"
    r"(?<!by)(?<!com)pass(?![a-z])|pwd(?![a-z])|"
    rf"{_PART}(?:pw|dsn)(?![a-z])|(?-i:(?<![\w-])-p)(?![\w-])|"
    r"(?:api|access|private|signing|encryption|account|storage|license|ssh|deploy|service|wandb|session)[-_.]?key",
    re.IGNORECASE,
)
_WHERE = re.compile(r"(?:file|path|dir|directory|name|type|count|len|length|limit)s?$", re.IGNORECASE)
_SEVERAL = re.compile(r"^-.*(?:token|secret|passw(?:or)?d|pass|cred|credential|key)s$", re.IGNORECASE)
_BEFORE = re.compile(r"[\w.-]{0,64}\Z")
_QUOTE = r"\\{0,3}[\"']"  # Within a text in JSON it has backslashes in front of it.
_AFTER = re.compile(
    r"(?P<rest>[\w.-]{0,64}+)"
    rf"(?P<between>(?:{_QUOTE})?\]?[ \t]{{0,4}}(?:=>|=(?!>)|:)[ \t]{{0,4}}(?:(?:bearer|basic|token)[ \t]+)?|"  # NAME=
    rf"(?:{_QUOTE})?,?[ \t]{{1,4}}(?!--))b?",  # --name VALUE, or '--name', 'VALUE'.
    re.IGNORECASE,
)
_WORD = r"[^\s,;&\"'(){}\[\]\\]+"
_VALUE = re.compile(
    rf"(?P<quote>{_QUOTE}).*?(?:(?P=quote)|(?=\n|\Z))|"
    rf"{_WORD}(?:,(?![\w.-]{{1,64}}[=:]){_WORD})*+|"  # a,b,c; but of a,user=b only the first.
    r"[\[(](?:[^\[\]()]|[\[(][^\[\]()]{0,200}[\])]){0,4096}+[\])]?"  # A list.
)
_SHAPES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]{0,20000}(?:-----END [A-Z ]{0,40}PRIVATE KEY-----)?", MASK),
        (r"(://)[^/\s@\"'<>]{1,4096}@", rf"\1{MASK}@"),
        (r"\b[Bb](?:earer|asic) [A-Za-z0-9._~+/=-]{8,}+", MASK),
        (r"\bgh[oprsu]_[A-Za-z0-9]{20,}+|\bgithub_pat_\w{20,}+|\bglpat-[\w-]{16,}+", MASK),
        (r"\b(?:hf|pypi|npm|dckr_pat)[_-][A-Za-z0-9_-]{20,}+|\b[sr]k[-_][A-Za-z0-9_-]{16,}+", MASK),
        (r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{35}\b|\bxox[a-z]-[\w-]{10,}+", MASK),
        (r"\bholdfast-(?:run-)?[0-9a-f]{16,}+(?:-[0-9a-f]{1,8})?", MASK),  # Tokens of our own, also cut.
        (r"(?<![\w-])(-p)(?![a-z-]*+(?![^\s\"',]))(?!\d{1,7}\b)[^\s=:\"',\[\]-][^\s\"',]*+", rf"\1{MASK}"),  # -pSECRET
    )
)
_JSON_WEB_TOKEN = re.compile(r"eyJ[\w-]{8,}+(?P<rest>\.[\w-]{8,}+\.[\w-]*+)?")

# Only these variables are shown, and a value with the name of a secret is not.
_SHOWN_VARIABLES = re.compile(
    r"(?:PET|HOLDFAST|TORCH[A-Z]*|NCCL|GLOO|UCX|FI|MPI|MPICH|OMPI|OMP|MKL|CUDA|NVIDIA|ROCM|HIP|HSA|XLA|JAX|TF|RAY|SLURMD?|"
    r"PBS|LSB|KUBERNETES|MASTER|LD|LC|XDG_RUNTIME)_[A-Z0-9_]*|PYTHON[A-Z0-9_]*|"
    r"PATH|LANG|TERM|TMPDIR|TEMP|TMP|HOSTNAME|USER|HOME|SHELL|LOGLEVEL|NO_COLOR|VIRTUAL_ENV|CONDA_PREFIX"
)


def is_secret_name(name: str) -> bool:
    """Whether a value of that name, as of a variable, an option or a key, is not for others."""
    return bool(_KEYWORD.search(name[:_LONGEST]) or re.search(r"[-_.]key$", name, re.IGNORECASE)) and not _WHERE.search(
        name
    )


def secrets_in(environ: Mapping[str, str]) -> list[str]:
    return [value for name, value in environ.items() if is_secret_name(name) and not _is_plain(value, name)]


class Redactor:
    """`values` are known to be secret."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        known = {value.strip() for value in values}
        forms = {form for value in known if len(value) >= _SHORTEST_VALUE for form in _forms(value)}
        self._values = sorted(forms, key=len, reverse=True)

    def text(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, MASK)
        for shape, replacement in _SHAPES:
            text = shape.sub(replacement, text)
        text = _JSON_WEB_TOKEN.sub(lambda found: MASK if found["rest"] else found[0], text)
        return "".join(_without_named(_without_cut_key(text)))

    def arguments(self, arguments: Sequence[str]) -> list[str]:
        """A command line. The value of an option is the next argument or stands behind `=`. An option with a plural for
        a name (`--tokens`) may have several."""
        shown: list[str] = []
        option = ""  # The secret's name, while its values follow.
        for each in arguments:
            name, equals, value = each.partition("=")
            if option and not re.match(r"--|-[A-Za-z]$", each):
                each = each if option == "-p" and _is_plain(each) else MASK
                option = option if _SEVERAL.search(option) else ""
            else:
                option = each if each.startswith("-") and not equals and is_secret_name(each) else ""
                if equals and is_secret_name(name.rpartition(",")[2]) and not _is_plain(value, name):
                    each = f"{name}={MASK}"
            shown.append(self.text(each))
        return shown

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        shown = {name: value for name, value in sorted(environ.items()) if _SHOWN_VARIABLES.fullmatch(name)}
        return {name: MASK if is_secret_name(name) else self.text(value) for name, value in shown.items()}

    def record(self, value: Any) -> Any:
        """What JSON can hold, with all the texts in it. All texts under a secret's name are secret."""
        return self._record(value, is_secret=False)

    def _record(self, value: Any, is_secret: bool) -> Any:
        if isinstance(value, Mapping):
            return {
                self.text(str(name)): self._record(each, is_secret or is_secret_name(str(name)))
                for name, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._record(each, is_secret) for each in value]
        if isinstance(value, str):
            return MASK if is_secret and value else self.text(value)
        return value


def _forms(value: str) -> Iterator[str]:
    yield value
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    octets = value.encode("utf-8", "replace")
    yield "".join(chr(each) if chr(each) in _UNQUOTED else f"%{each:02X}" for each in octets)


_PLAIN = re.compile(r"\d{1,7}(?:\.\d{1,9})?|true|false|yes|no|none|null|on|off", re.IGNORECASE)


def _is_plain(value: str, name: str = "") -> bool:
    """A number or a truth value in the place of a secret is the limit of something, or switches it on. PWD mostly
    has the working directory."""
    value = value.strip("\"' ")
    return not value or bool(_PLAIN.fullmatch(value)) or (value[0] == "/" and name in ("PWD", "OLDPWD"))


def _without_cut_key(text: str) -> str:
    """A piece of a log may begin within a private key: the lines of it before its end are left out."""
    end = re.search(r"-----END [A-Z ]{0,40}PRIVATE KEY-----", text)
    lines = text[: end.start()].split("\n") if end else []
    if end is None or len(lines) < 2 or lines.pop():
        return text
    count = len(lines)
    while lines and re.fullmatch(r"[A-Za-z0-9+/=]{1,80}", lines[-1]):
        lines.pop()
    return "\n".join([*lines, MASK, text[end.start() :]]) if len(lines) < count else text


def _without_named(text: str) -> Iterator[str]:
    done = 0
    for keyword in _KEYWORD.finditer(text):
        if keyword.start() < done:
            continue
        found = _AFTER.match(text, keyword.end())
        if found is None:
            continue
        start = _BEFORE.search(text[max(done, keyword.start() - 64) : keyword.start()])
        name = (start[0] if start else "") + keyword[0] + found["rest"]
        # Without a sign between them a word follows a name only if that is an option.
        is_given = any(sign in found["between"] for sign in "=:") or name.startswith("-")
        if not is_given or _WHERE.search(name):
            continue
        value = _VALUE.match(text, found.end())
        if value is None or _is_plain(value[0], name) or value[0].strip("\\\"'") == MASK:
            continue
        quote = value["quote"] or ""
        yield text[done : value.start()]
        yield f"{quote}{MASK}{quote}"
        done = value.end()
    yield text[done:]
