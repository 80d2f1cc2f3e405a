"""What is learned from the imports that workers note, and the file that keeps it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from holdfast.process import learning
from holdfast.process.spawner import learned_imports
from tests.promises import promise, proves

NOTES = """\
torch.optim __main__
torch._dynamo torch.optim
sympy torch._dynamo.utils
mpmath sympy
json torch
unrelated __main__
holdfast.progress_board __main__
torch._dynamo again
"""


@promise("""workers.preload-learns-which: `--preload torch` learns modules of torch and what these import; `--preload
    auto` learns all that is installed, never what lies beside the program. At most 4,000 names; a worker that writes
    junk where they are noted does no harm.""")
def test_which_names_are_learned() -> None:
    of_torch = ["torch.optim", "torch._dynamo", "sympy", "mpmath"]
    assert learning.learned(NOTES, ("torch",)) == of_torch
    assert learning.learned(NOTES, ("torch.nn",)) == of_torch
    assert learning.learned(NOTES, ()) == [*of_torch, "unrelated"]
    assert learning.learned(NOTES, ("numpy",)) == []


@proves("workers.preload-learns-which")
@pytest.mark.parametrize(
    "junk", ["\0\n", " ", "a b c\n" * 3, "a..b x\n", "-x\n", "../x y\n", "é" * 300, "1a\n", "os;x y\n"]
)
def test_junk_is_no_name(junk: str) -> None:
    assert set(learning.learned(junk + "\ntorch.x y\n", ())) <= {"a", "torch.x"}


@proves("workers.preload-learns-which")
def test_the_number_of_names_is_limited() -> None:
    notes = "".join(f"torch.m{number} x\n" for number in range(9000))
    assert len(learning.learned(notes, ())) == learning.MOST_NAMES


def test_names_are_news_once_the_workers_have_stopped_importing(tmp_path: Path) -> None:
    path = str(tmp_path / "cache" / "file")
    found = learning.Learning(("torch",), path)
    assert found.news(is_last=True) == []
    os.write(found.imports_fd, b"torch.a x\n")
    assert found.news(is_last=False) == []
    assert found.news(is_last=False) == ["torch.a"]
    os.write(found.imports_fd, b"torch.b x\ntorch.bad x\n")
    assert found.news(is_last=True) == ["torch.a", "torch.b", "torch.bad"]
    assert found.news(is_last=True) == []
    found.close({"torch.bad"})
    later = learning.Learning(("torch",), path)
    assert later.known == ["torch.a", "torch.b"]
    os.write(later.imports_fd, b"torch.bad x\n")
    assert later.news(is_last=True) == []
    later.close(())


@promise("""workers.preload-learned-file: What was learned is kept in the user's cache. A file that is not the user's
    alone, a symbolic link, or anything but names is ignored.""")
def test_the_file_must_be_ours(tmp_path: Path) -> None:
    path = tmp_path / "learned"
    learning.save(str(path), ["torch.a", "b"], {"torch.c"})
    assert path.stat().st_mode & 0o777 == 0o600
    good = (["torch.a", "b"], {"torch.c"})
    assert learning.load(str(path)) == good
    link = tmp_path / "link"
    link.symlink_to(path)
    assert learning.load(str(link)) == ([], set())
    path.chmod(0o640)
    assert learning.load(str(path)) == ([], set())
    path.chmod(0o600)
    assert learning.load(str(path)) == good
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
        assert learning.load(str(path)) == ([], set())
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert learning.load(str(tmp_path / "pipe")) == ([], set())


@proves("workers.preload-learned-file")
@pytest.mark.parametrize("content", [b"", b"\xff" * 99, b"torch\n", b"holdfast learned 2\ntorch\n", b"\0" * (2 << 20)])
def test_a_file_of_junk_is_ignored(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    path.chmod(0o600)
    assert learning.load(str(path)) == ([], set())


def test_names_in_a_file_of_junk(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"holdfast learned 1\nos; evil\n__import__('x')\ngood.name\n-\n--x\n-bad\n" + b"a\n" * 9000)
    path.chmod(0o600)
    names, left_out = learning.load(str(path))
    assert (names[:2], len(names), left_out) == (["good.name", "a"], learning.MOST_NAMES, {"bad"})


def test_the_cache_is_bounded(tmp_path: Path) -> None:
    for number in range(learning._MOST_FILES + 5):
        learning.save(str(tmp_path / str(number)), [], ())
        os.utime(tmp_path / str(number), (number, number))
    learning.save(str(tmp_path / "last"), ["a"], ())
    assert len(list(tmp_path.iterdir())) == learning._MOST_FILES
    assert learning.load(str(tmp_path / "last")) == (["a"], set())


@proves("workers.preload-learns-which")
def test_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (tmp_path / "site-packages", tmp_path):
        package = place / f"of_{place.name.replace('-', '_')[:4]}"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        monkeypatch.syspath_prepend(str(place))
    assert learned_imports.is_installed("of_site")
    assert not learned_imports.is_installed(f"of_{tmp_path.name[:4]}")
    assert not learned_imports.is_installed("json")
    assert not learned_imports.is_installed("nowhere_to_be_found")


def test_imports_are_noted_with_the_module_that_needs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outer_of_test.py").write_text(
        "import inner_of_test\nimport importlib\nimportlib.import_module('late_of_test')\n"
    )
    for name in ("inner", "late"):
        (tmp_path / f"{name}_of_test.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    fd = os.memfd_create("imports")
    noting = learned_imports.Imports(fd)
    monkeypatch.setattr(sys, "meta_path", [noting, *sys.meta_path])
    __import__("outer_of_test")
    expected = f"outer_of_test {__name__}\ninner_of_test outer_of_test\nlate_of_test outer_of_test\n"
    assert os.pread(fd, 1000, 0).decode() == expected
    noting.find_spec("x" * 10)
    size = os.fstat(fd).st_size
    with (tmp_path / "of the program").open("wb") as file:
        os.dup2(file.fileno(), fd)  # The program has closed it, and reuses the number.
        noting.find_spec("y")
        assert os.fstat(fd).st_size == 0
    os.close(fd)
    noting.find_spec("z")
    assert size > len(expected)
