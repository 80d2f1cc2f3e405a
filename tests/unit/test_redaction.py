"""Secrets are left out of texts, command lines, environments and JSON; what is none stays."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.rendezvous.membership import keys
from holdfast.telemetry.redaction import MASK, Redactor, is_secret_name, secrets_in
from tests.promises import proves

PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----"


@proves("steering.bundle-collects-configuration")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("API_KEY=abcdef", f"API_KEY={MASK}"),
        ("export DB_PASSWORD='a b c'; ls", f"export DB_PASSWORD='{MASK}'; ls"),
        ('{"token": "abc", "step": 3}', f'{{"token": "{MASK}", "step": 3}}'),
        ("train.py --api-key abcdef --lr 0.1", f"train.py --api-key {MASK} --lr 0.1"),
        ("['train.py', '--api-key', 'abcdef', '--lr']", f"['train.py', '--api-key', '{MASK}', '--lr']"),
        ("password: hunter2, user: bob", f"password: {MASK}, user: bob"),
        ("HOLDFAST_TOKEN=0123456789", f"HOLDFAST_TOKEN={MASK}"),
        ("token=b'abc'", f"token=b'{MASK}'"),
        (r'"{\"token\": \"abc\"}"', rf'"{{\"token\": \"{MASK}\"}}"'),
        ('password="cut off here', f'password="{MASK}"'),
        ("postgres://bob:hunter2@db/x", f"postgres://{MASK}@db/x"),
        ("https://ghp@github.com/x", f"https://{MASK}@github.com/x"),
        ("Authorization: Bearer abcdefghij", f"Authorization: {MASK}"),
        ("authorization: bearer abcdefghij", f"authorization: {MASK}"),
        (f"a key:\n{PEM}\nend", f"a key:\n{MASK}\nend"),
        ("MIIEow\nIBAAKC\n-----END PRIVATE KEY-----", f"{MASK}\n-----END PRIVATE KEY-----"),
        ("ghp_" + "a" * 36, MASK),
        ("hf_" + "a" * 34, MASK),
        ("sk-" + "a" * 40, MASK),
        ("AKIAABCDEFGHIJKLMNOP", MASK),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSM", MASK),
        ("say-eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSM.", f"say-{MASK}."),
        ("wandb_api_key => x1y2z3", f"wandb_api_key => {MASK}"),
        ("DB_PASS=abcdef dbPass: abcdef", f"DB_PASS={MASK} dbPass: {MASK}"),
        ("--pw abcdef; Uid=sa;Pwd=abcdef;PWD=abcdef;", f"--pw {MASK}; Uid=sa;Pwd={MASK};PWD={MASK};"),
        ("creds: abcdef, SENTRY_DSN=http://x", f"creds: {MASK}, SENTRY_DSN={MASK}"),
        ("sshpass -p hunter2 ssh -p 22 a", f"sshpass -p {MASK} ssh -p 22 a"),
        ("mysql -uroot -phunter2 -v", f"mysql -uroot -p{MASK} -v"),
        ("['-p', 'hunter2']", f"['-p', '{MASK}']"),
        ("TOKENS=abc,def,ghi x", f"TOKENS={MASK} x"),
        ("password=abc,user=bob", f"password={MASK},user=bob"),
        ("tokens: ['abc', f('def'), [1]] x", f"tokens: {MASK} x"),
        ('"passwords": [\n  "abc",\n  "def"\n]', f'"passwords": {MASK}'),
        ("secret='" + "a" * 5000 + "'", f"secret='{MASK}'"),
        ("secret=" + "a" * 5000, f"secret={MASK}"),
        (f"is {keys.made_token(bytes(range(32)))}.", f"is {MASK}."),
        (f"is {keys.run_token(b'abc', 'job7').decode()} too", f"is {MASK} too"),
    ],
)
def test_what_is_left_out(text: str, shown: str) -> None:
    assert Redactor().text(text) == shown
    assert Redactor().text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "step 41 loss 0.132",
        "max_tokens=2048",
        "tokenizer: gpt2",
        "author: bob",
        "token_file=/home/bob/token",
        "--token-file /home/bob/token",
        "the token is not the one of this coordinator",
        "this coordinator wants a token, and it brings none",
        "use_auth=true",
        "PWD=/home/bob",
        "forward_pass: 0.31, bypass: all, 2 tests pass and -print, -pthread",
        "https://example.org/a:b",
        "ValueError: key=value is wrong",
        'File "/home/me/train.py", line 41, in <module>',
    ],
)
def test_what_stays(text: str) -> None:
    assert Redactor().text(text) == text


@proves("steering.bundle-collects-configuration")
def test_known_values_are_left_out_in_every_form() -> None:
    secret = 'pass "word"/ä\\'
    redactor = Redactor([f"{secret}\n", "", "abc"])
    for form in (secret, json.dumps(secret)[1:-1], "pass%20%22word%22%2F%C3%A4%5C"):
        assert redactor.text(f"it is {form}!") == f"it is {MASK}!"
    assert redactor.text("abc is too short to be looked for") == "abc is too short to be looked for"


def test_command_lines() -> None:
    given_ = "holdfast run --token-file /t train.py --api-key abc --password=x -v --rdzv-conf user=a,password_file=/p"
    more = "logger.api_key=abc --token --verbose --secret -abc -p t0p -p 8080 --tokens t0p t0p -v --pass t0p name"
    assert Redactor().arguments(f"{given_} {more}".split()) == [
        "holdfast", "run", "--token-file", "/t", "train.py", "--api-key", MASK, f"--password={MASK}", "-v",
        "--rdzv-conf", "user=a,password_file=/p", f"logger.api_key={MASK}", "--token", "--verbose", "--secret", MASK,
        "-p", MASK, "-p", "8080", "--tokens", MASK, MASK, "-v", "--pass", MASK, "name",
    ]  # fmt: skip


def test_environments() -> None:
    environ = {
        "HOLDFAST_TOKEN": "t0p",
        "HOLDFAST_ETCD_PASSWORD": "t0p",
        "NCCL_DEBUG": "INFO",
        "TORCH_HOME": "https://bob:t0p@mirror",
        "SLURM_JWT_KEY": "t0p",
        "MY_DATABASE": "t0p",
        "WANDB_API_KEY": "t0p",
        "LDAP_BIND": "t0p",
        "FIREBASE": "t0p",
        "PWD": "/home/bob",
    }
    assert Redactor().environment(environ) == {
        "HOLDFAST_ETCD_PASSWORD": MASK,
        "HOLDFAST_TOKEN": MASK,
        "NCCL_DEBUG": "INFO",
        "SLURM_JWT_KEY": MASK,
        "TORCH_HOME": f"https://{MASK}@mirror",
    }
    assert len(secrets_in(environ)) == 4


def test_records() -> None:
    record = {
        "token": "t0p",
        "token_file": "/t",
        "require_token": True,
        "passwords": ["t0p", {"user": "t0p"}, 1],
        "also": [{"password": "t0p"}, "key=1", 7, None],
    }
    assert Redactor(["secret value"]).record({**record, "x": ("a secret value",)}) == {
        **record, "token": MASK, "passwords": [MASK, {"user": MASK}, 1],
        "also": [{"password": MASK}, "key=1", 7, None], "x": [f"a {MASK}"],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["token_file", "author", "tokenizer", "key", "keyboard", "password_path", "auth_type"])
def test_names_that_are_none(name: str) -> None:
    assert not is_secret_name(name)


@given(st.text(), st.lists(st.text(min_size=4), max_size=3))
def test_any_text(text: str, values: list[str]) -> None:
    redactor = Redactor(values)
    shown = redactor.text(text + "".join(values))
    for value in values:
        if len(value.strip()) >= 4 and value.strip() not in MASK:
            assert value.strip() not in shown.replace(MASK, "")


PIECES = [
    "a", "token", "token=", "://", "://a@", "eyJ", "password\n", '"', 'token"', "-----BEGIN PRIVATE KEY-----", "-eyJ",
    "-eyJaaaaaaaa", "eyJaaaaaaaa.", "token_file:", "token=[", "tokens=[(", "tokens='\\\"", "-pa", " -p a,", "holdfast-",
    "holdfast-run-", "token=a,", "://:", "sk-", "Bearer ", f"token='{MASK}",
]  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_a_long_text_of_any_kind_is_read_in_one_go(piece: str) -> None:
    """A search that looks at many characters again and again takes many seconds."""
    size = 1_500_000 if "eyJ" in piece else 200_000
    text = piece * (size // len(piece))
    began = time.process_time()
    Redactor(["a secret"]).text(text)
    assert time.process_time() - began < 3
