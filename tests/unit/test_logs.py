"""Log specs: parsing, the layout on disk, and what happens when the disk does not play along."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import TextIO

import pytest

from holdfast.errors import UserError
from holdfast.process.output.logs import (
    DefaultLogsSpecs,
    LogDirNotADirectoryError,
    LogsDest,
    Std,
    get_std_cm,
    logs_dir,
    remove_left,
    to_map,
)
from tests import support
from tests.promises import promise, proves

Envs = dict[int, dict[str, str]]


def envs_for(nprocs: int, run_id: str = "job") -> Envs:
    return {rank: {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": "0"} for rank in range(nprocs)}


def files_under(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


@pytest.fixture
def temp_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that is the system's temporary directory."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    return directory


class TestStd:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("0", Std.NONE),
            ("1", Std.OUT),
            ("2", Std.ERR),
            ("3", Std.ALL),
            ("0:1", {0: Std.OUT}),
            ("0:1,1:2,2:3,3:0", {0: Std.OUT, 1: Std.ERR, 2: Std.ALL, 3: Std.NONE}),
            ("10:1,127:3", {10: Std.OUT, 127: Std.ALL}),
            ("0:1,0:1", {0: Std.OUT}),
        ],
    )
    def test_reads(self, text: str, expected: Std | dict[int, Std]) -> None:
        assert Std.from_str(text) == expected

    @pytest.mark.parametrize(
        "text",
        [
            *["4", "11", "-1", "x", "0:1,", "0:1,1", "1,0:1", "0:4", ":1", "0:", "٣", "0:٣", "12:1,0:1,12:2"],
            *("", "0:1 ", "0:1\n", "3\n", "9" * 5000 + ":1"),
        ],
    )
    def test_refuses_and_names_the_text(self, text: str) -> None:
        with pytest.raises(ValueError) as caught:
            Std.from_str(text)
        assert isinstance(caught.value, UserError)
        assert repr(text) in str(caught.value)

    @pytest.mark.parametrize(
        ("choice", "nprocs", "expected"),
        [
            (Std.OUT, 2, {0: Std.OUT, 1: Std.OUT}),
            (Std.OUT, 0, {}),
            ({}, 2, {0: Std.NONE, 1: Std.NONE}),
            ({1: Std.ERR}, 3, {0: Std.NONE, 1: Std.ERR, 2: Std.NONE}),
            ({0: Std.ALL, 5: Std.OUT}, 2, {0: Std.ALL, 1: Std.NONE}),
        ],
    )
    def test_to_map(self, choice: Std | dict[int, Std], nprocs: int, expected: dict[int, Std]) -> None:
        assert to_map(choice, nprocs) == expected


class TestLayout:
    def test_paths(self, tmp_path: Path) -> None:
        specs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects={0: Std.OUT}, tee={1: Std.ERR})
        envs = envs_for(2)
        dest = specs.reify(envs)
        (run_dir,) = support.run_dirs(tmp_path / "logs")
        assert run_dir.name.startswith("job_")
        attempt = run_dir / "attempt_0"
        assert dest == LogsDest(
            stdouts={0: str(attempt / "0/stdout.log"), 1: ""},
            stderrs={0: "", 1: str(attempt / "1/stderr.log")},
            tee_stdouts={},
            tee_stderrs={1: str(attempt / "1/stderr.log")},
            error_files={0: str(attempt / "0/error.json"), 1: str(attempt / "1/error.json")},
            filtered_stdout=str(attempt / "filtered_stdout.log"),
            filtered_stderr=str(attempt / "filtered_stderr.log"),
        )
        assert files_under(run_dir) == {"attempt_0", "attempt_0/0", "attempt_0/1"}
        assert {rank: env["TORCHELASTIC_ERROR_FILE"] for rank, env in envs.items()} == dest.error_files

    # For each case: stdout's entry in stdouts and tee_stdouts, as "file", "null", "console" or None (no entry).
    @promise("""output.streams-go-redirects-tee: Streams go where `--redirects`, `--tee` and `--local-ranks-filter` say,
        by rank.""")
    @pytest.mark.parametrize(
        ("redirects", "tee", "ranks_filter", "expected"),
        [
            (Std.NONE, Std.NONE, None, ("console", None)),
            (Std.OUT, Std.NONE, None, ("file", None)),
            (Std.ERR, Std.NONE, None, ("console", None)),
            (Std.NONE, Std.OUT, None, ("file", "file")),
            (Std.OUT, Std.OUT, None, ("file", "file")),
            (Std.NONE, Std.ERR, None, ("console", None)),
            (Std.NONE, Std.NONE, {0}, ("console", None)),
            (Std.NONE, Std.OUT, {0}, ("file", "file")),
            (Std.NONE, Std.NONE, {1}, ("null", None)),
            (Std.OUT, Std.NONE, {1}, ("file", None)),
            (Std.NONE, Std.OUT, {1}, ("file", None)),
            (Std.NONE, Std.OUT, set(), ("file", "file")),
            (Std.NONE, Std.NONE, set(), ("console", None)),
        ],
    )
    def test_stdout_of_rank_0(
        self, tmp_path: Path, redirects: Std, tee: Std, ranks_filter: set[int] | None, expected: tuple[str, str | None]
    ) -> None:
        dest = DefaultLogsSpecs(str(tmp_path), redirects, tee, ranks_filter).reify(envs_for(2))
        names = {
            str(Path(dest.error_files[0]).parent / "stdout.log"): "file",
            "/dev/null": "null",
            "": "console",
            None: None,
        }
        assert (names[dest.stdouts[0]], names[dest.tee_stdouts.get(0)]) == expected

    @proves("output.streams-go-redirects-tee")
    def test_filter_applies_to_stderr_too_and_a_choice_may_name_ranks_beyond_nine(self, tmp_path: Path) -> None:
        dest = DefaultLogsSpecs(str(tmp_path), tee=Std.ERR, local_ranks_filter={11}).reify(envs_for(12))
        assert dest.stdouts == {**dict.fromkeys(range(11), "/dev/null"), 11: ""}
        assert set(dest.tee_stderrs) == {11}
        assert dest.stderrs[0].endswith("/0/stderr.log")

    @promise("""output.start-group-log-directory: Every start of the group has its own log directory. None is reused or
        deleted.""")
    def test_every_reify_has_its_own_directory_and_none_is_deleted(self, tmp_path: Path) -> None:
        specs, other = (DefaultLogsSpecs(str(tmp_path), redirects=Std.OUT) for _ in range(2))
        other.reify(envs_for(1))
        seen = []
        for _ in range(3):
            path = Path(specs.reify(envs_for(1)).stdouts[0])
            path.write_text("kept")
            seen.append(path)
        assert [path.parts[-3] for path in seen] == ["attempt_0", "attempt_1", "attempt_2"]
        assert all(path.read_text() == "kept" for path in seen)
        (seen[0].parents[2] / "attempt_3").mkdir()
        (seen[0].parents[2] / "attempt_4").write_text("a file")
        assert Path(specs.reify(envs_for(1)).stdouts[0]).parts[-3] == "attempt_5"
        assert len(support.run_dirs(tmp_path)) == 2

    def test_goes_on_if_somebody_cleaned_up(self, tmp_path: Path) -> None:
        specs = DefaultLogsSpecs(str(tmp_path / "logs"))
        first = Path(specs.reify(envs_for(1)).error_files[0])
        shutil.rmtree(first.parents[3])
        second = Path(specs.reify(envs_for(1)).error_files[0])
        assert second.parent.is_dir()
        assert second.parts[-3] == "attempt_1"

    def test_relative_log_dir_gives_absolute_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        specs = DefaultLogsSpecs("logs")
        assert specs.root_log_dir == "logs"
        monkeypatch.chdir("/")
        envs = envs_for(1)
        specs.reify(envs)
        assert envs[0]["TORCHELASTIC_ERROR_FILE"].startswith(str(tmp_path))

    @promise("output.dev-null-log-dir: With `/dev/null` as the log dir no logs are kept.")
    def test_dev_null_keeps_nothing(self) -> None:
        specs = DefaultLogsSpecs("/dev/null", Std.ALL, Std.ALL, {0})
        envs = envs_for(2)
        null = {0: "/dev/null", 1: "/dev/null"}
        assert specs.reify(envs) == LogsDest(
            stdouts={0: "", 1: ""},
            stderrs={0: "", 1: ""},
            tee_stdouts=null,
            tee_stderrs=null,
            error_files=null,
            filtered_stdout="/dev/null",
            filtered_stderr="/dev/null",
        )
        assert [env["TORCHELASTIC_ERROR_FILE"] for env in envs.values()] == ["", ""]


class TestRunId:
    @promise("output.text-run-id: Any text can be a run id.")
    @pytest.mark.parametrize(
        ("run_id", "start"),
        [
            ("job", "job_"),
            ("a b:c+d=e", "a b:c+d=e_"),
            ("träning-日本", "träning-日本_"),
            ("", "_"),
            ("team/job", "team_job_"),
            ("/abs", "_abs_"),
            ("..", "___"),
            (".hidden", "_hidden_"),
            ("../../etc", "__"),
            ("a\0b\nc\x1bd", "a_b_c_d_"),
            ("bad\udcff\ud800", "bad___"),
            ("x" * 5000, "x" * 120 + "_"),
            ("日" * 5000, "日" * 40 + "_"),
            ("x" + "日" * 5000, "x" + "日" * 39 + "_"),
        ],
    )
    def test_becomes_a_file_name(self, tmp_path: Path, run_id: str, start: str) -> None:
        dest = DefaultLogsSpecs(str(tmp_path), redirects=Std.OUT).reify(envs_for(1, run_id))
        (run_dir,) = support.run_dirs(tmp_path)
        assert run_dir.name.startswith(start)
        assert len(os.fsencode(run_dir.name)) <= 143
        Path(dest.stdouts[0]).write_text("it is a real path")
        assert Path(dest.stdouts[0]).parents[2] == run_dir


class TestLogDir:
    @proves("output.unusable-log-dir-refused")
    @pytest.mark.parametrize("below", ["", "sub", "sub/dir"])
    def test_a_file_is_not_a_directory(self, tmp_path: Path, below: str) -> None:
        (tmp_path / "file").write_text("")
        path = str(tmp_path / "file" / below) if below else str(tmp_path / "file")
        with pytest.raises(NotADirectoryError) as caught:
            DefaultLogsSpecs(path)
        assert isinstance(caught.value, LogDirNotADirectoryError)
        assert isinstance(caught.value, UserError)
        assert path in str(caught.value)
        assert "Not a directory" in str(caught.value)
        assert caught.value.errno == errno.ENOTDIR

    @promise("output.unusable-log-dir-refused: An unusable log dir is refused before anything starts.")
    @pytest.mark.parametrize(
        ("path", "reason"),
        [
            ("/proc/holdfast", "No such file"),
            ("/tmp/nul\0", "null"),
            ("/tmp/" + "x" * 300, "File name too long"),
            ("/tmp/\ud800", "surrogates not allowed"),
            ("/proc", "No such file"),  # Not even root can make a directory there.
        ],
    )
    def test_cannot_be_created(self, path: str, reason: str) -> None:
        with pytest.raises(UserError) as caught:
            DefaultLogsSpecs(path)
        assert repr(path) in str(caught.value)
        assert reason in str(caught.value)
        assert "\n" not in str(caught.value)

    @proves("output.log-dir-becomes-unusable")
    def test_a_place_that_is_lost_costs_the_logs_until_it_is_back(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Said once, and that they are written again, too. What is tee'd still has its console, and nobody else's."""
        logs = tmp_path / "logs"
        specs = DefaultLogsSpecs(str(logs), redirects=Std.OUT, tee=Std.ERR, local_ranks_filter={0})
        specs.reify(envs_for(2))
        shutil.rmtree(logs)
        logs.write_text("now a file")
        for _ in range(3):
            envs = envs_for(2)
            dest = specs.reify(envs)
        assert set(dest.stdouts.values()) | set(dest.stderrs.values()) == {os.devnull}
        assert dest.tee_stderrs == {0: os.devnull}
        assert (dest.tee_stdouts, dest.filtered_stderr) == ({}, os.devnull)
        assert envs[0]["TORCHELASTIC_ERROR_FILE"] == ""
        logs.unlink()
        again = specs.reify(envs_for(2))
        assert Path(again.stdouts[1]).parent.is_dir()
        lost, back = caplog.messages
        assert "Not a directory; the workers run without logs" in lost
        assert back.startswith("logs are written again, to ")


class TestTemporaryDirectory:
    @pytest.mark.parametrize("log_dir", [None, ""])
    def test_is_made_when_no_log_dir_is_given(self, temp_dir: Path, log_dir: str | None) -> None:
        """And goes with a configuration that was never used."""
        specs = DefaultLogsSpecs(log_dir)
        (made,) = temp_dir.iterdir()
        assert specs.root_log_dir == str(made)
        assert made.name.startswith("torchelastic_")
        assert made.stat().st_mode & 0o777 == 0o700
        del specs
        assert list(temp_dir.iterdir()) == []

    def test_falls_back_if_tmpdir_is_unusable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("TMPDIR", "TEMP", "TMP"):
            monkeypatch.setenv(name, "/nonexistent")
        specs = DefaultLogsSpecs()
        assert Path(specs.root_log_dir).is_dir()
        specs.remove_if_unused()
        assert not Path(specs.root_log_dir).exists()

    @promise("""output.temporary-log-directory-files: A temporary log directory without files is removed, and so are the
        error files of restarts in it unless the run has failed. A user's log dir is left alone.""")
    def test_unused_is_removed_and_can_be_used_again(self, temp_dir: Path) -> None:
        specs = DefaultLogsSpecs(redirects=Std.OUT)
        for _ in range(2):
            assert Path(specs.reify(envs_for(2)).error_files[0]).parent.is_dir()
            assert Path(specs.root_log_dir).stat().st_mode & 0o777 == 0o700
            specs.reify(envs_for(2))
            specs.remove_if_unused()
            assert list(temp_dir.iterdir()) == []
            specs.remove_if_unused()

    @proves("output.temporary-log-directory-files")
    def test_used_is_kept(self, temp_dir: Path) -> None:
        specs = DefaultLogsSpecs()
        dest = specs.reify(envs_for(2))
        Path(dest.error_files[1]).write_text("{}")
        for _ in range(2):
            specs.remove_if_unused()
        assert [path for path in temp_dir.rglob("*") if path.is_file()] == [Path(dest.error_files[1])]
        assert not Path(dest.error_files[0]).parent.exists()
        Path(specs.reify(envs_for(1)).error_files[0]).write_text("{}")
        specs.remove_if_unused(keep_errors=False)
        assert list(temp_dir.iterdir()) == []

    @proves("output.temporary-log-directory-files")
    def test_of_an_agent_that_was_killed(self, temp_dir: Path) -> None:
        unused, used = (DefaultLogsSpecs() for _ in range(2))
        unused.reify(envs_for(2))
        kept = Path(used.reify(envs_for(2)).error_files[1])
        kept.write_text("{}")
        for specs in (unused, used):
            remove_left(specs.temporary_dir)
        assert [path for path in temp_dir.rglob("*") if not any(path.iterdir() if path.is_dir() else ())] == [kept]

    @proves("output.temporary-log-directory-files")
    def test_what_is_no_temporary_directory_of_ours_is_left_alone(self, tmp_path: Path) -> None:
        name = "torchelastic_0123abcd"
        others = [tmp_path / "logs", tmp_path / f"{name}x", tmp_path / "below" / name / "run"]
        for each in others:
            each.mkdir(parents=True)
        (tmp_path / name).symlink_to(others[0])
        for each in (*others, tmp_path / name, tmp_path / "torchelastic_89abcdef"):
            remove_left(str(each))
        assert all(each.is_dir() for each in others)
        assert DefaultLogsSpecs(str(tmp_path)).temporary_dir == ""


class TestIdentity:
    def test_equality(self, tmp_path: Path) -> None:
        first = DefaultLogsSpecs(str(tmp_path), Std.OUT, {0: Std.ERR}, {0, 1})
        assert first == DefaultLogsSpecs(str(tmp_path), Std.OUT, {0: Std.ERR}, {1, 0})
        first.reify(envs_for(1))
        assert first == DefaultLogsSpecs(str(tmp_path), Std.OUT, {0: Std.ERR}, {0, 1})
        for other in (
            DefaultLogsSpecs("/dev/null", Std.OUT, {0: Std.ERR}, {0, 1}),
            DefaultLogsSpecs(str(tmp_path), Std.ERR, {0: Std.ERR}, {0, 1}),
            DefaultLogsSpecs(str(tmp_path), Std.OUT, {0: Std.OUT}, {0, 1}),
            DefaultLogsSpecs(str(tmp_path), Std.OUT, {0: Std.ERR}, None),
            "something else",
        ):
            assert first != other


def test_a_block_whose_output_goes_to_a_file_if_there_is_one(tmp_path: Path) -> None:
    def redirect(path: str) -> contextlib.redirect_stdout[TextIO]:
        return contextlib.redirect_stdout(stack.enter_context(open(path, "w")))

    with contextlib.ExitStack() as stack:
        with get_std_cm(str(tmp_path / "out"), redirect):
            print("in the file")
        with get_std_cm("", redirect):
            print("not there")
    assert (tmp_path / "out").read_text() == "in the file\n"


class TestLatest:
    @promise("""output.latest-log-directory-leads: `latest` in the log directory leads to the newest attempt, unless a
        file of the user has that name. The line that says that the workers are started says where the log files
        are.""")
    def test_leads_to_the_newest_attempt_of_the_newest_run(self, tmp_path: Path) -> None:
        for specs in (DefaultLogsSpecs(str(tmp_path)), DefaultLogsSpecs(str(tmp_path))):
            for attempt in range(2):
                dest = specs.reify(envs_for(1))
                here = os.path.dirname(os.path.dirname(dest.error_files[0]))
                assert os.path.realpath(tmp_path / "latest") == os.path.realpath(here)
                assert here.endswith(f"attempt_{attempt}")
        assert not os.path.isabs(os.readlink(tmp_path / "latest")), "the directory may be moved, or mounted elsewhere"

    @proves("output.latest-log-directory-leads")
    def test_a_file_of_the_user_stays(self, tmp_path: Path) -> None:
        (tmp_path / "latest").write_text("mine")
        DefaultLogsSpecs(str(tmp_path)).reify(envs_for(1))
        assert (tmp_path / "latest").read_text() == "mine"
        assert sorted(path.name[:4] for path in tmp_path.iterdir()) == ["job_", "late"]

    def test_there_is_none_in_a_temporary_directory(self, temp_dir: Path) -> None:
        specs = DefaultLogsSpecs()
        specs.reify(envs_for(1))
        assert [path.name for path in temp_dir.rglob("latest")] == []
        assert specs.run_dir is None


@pytest.mark.parametrize(
    ("dest", "expected"),
    [
        (LogsDest(), ""),
        (LogsDest(stdouts={0: "", 1: os.devnull}), ""),
        (LogsDest(stdouts={0: "/l/r/a/0/stdout.log", 1: ""}, stderrs={1: "/l/r/a/1/stderr.log"}), "/l/r/a"),
        (LogsDest(stdouts={0: "/l/r/a/0/stdout.log"}), "/l/r/a/0"),
        (LogsDest(stdouts={0: "/l/out.log"}, stderrs={0: "err.log"}), ""),
    ],
)
def test_logs_dir(dest: LogsDest, expected: str) -> None:
    assert logs_dir(dest) == expected
