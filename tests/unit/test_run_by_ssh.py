"""`holdfast run --hosts`: from a command line to a job for ssh, and the lines for wrong input."""

from __future__ import annotations

import contextlib
import os
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli import run as cli
from holdfast.cli.arguments import command_line, detection
from holdfast.cli.arguments.options import RunArguments
from holdfast.errors import HostError, UserError
from holdfast.hosts.ssh import copying
from holdfast.hosts.ssh.transport import HostsJob
from holdfast.rendezvous.membership import keys
from tests.promises import promise, proves
from tests.unit.test_engine_detection import OPEN_MPI, SLURM
from tests.unit.test_option_effects import job_of


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()


def options_of(job: HostsJob, host: int, endpoint: str = "10.0.0.1:4321") -> RunArguments:
    """What the agent of that host reads from its command line."""
    return command_line.read(job.arguments(host, job.hosts[host], endpoint)[1:])


@proves("ssh.hosts-starts-agent-host")
def test_each_agent_gets_the_users_options_and_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    monkeypatch.setenv("PET_VIRTUAL_LOCAL_RANK", "yes")
    job = job_of(
        ["--hosts=a,b:8", "--nproc-per-node=2", "--lease", "7s", "-t3", "--rdzv-conf=read_timeout=9"], monkeypatch
    )
    first, second = (options_of(job, host) for host in (0, 1))
    assert (first.nproc_per_node, second.nproc_per_node) == ("2", "8")
    assert (first.node_rank, second.node_rank) == (0, 1)
    for each in (first, second):
        assert (each.nnodes, each.max_restarts, each.virtual_local_rank) == ("2", 3, True)
        assert (each.lease, each.tee, each.prefix) == (7.0, 3, "always")
        assert (each.rdzv_backend, each.rdzv_endpoint, each.rdzv_id) == ("tcp", "10.0.0.1:4321", job.job.run_id)
        assert each.rdzv_conf == "outage_timeout=60,read_timeout=9"
        assert (each.hosts, each.training_script) == (None, "x.py")
    assert job.needs_place
    assert len(job.job.run_id) == 32


def test_the_token_is_fresh_or_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (job_of(["--hosts=a"], monkeypatch).token for _ in range(2))
    assert first != second
    assert keys.is_made(first.encode())
    monkeypatch.setenv("HOLDFAST_TOKEN", "the word of the day\n")
    assert job_of(["--hosts=a"], monkeypatch).token == "the word of the day"


@proves("ssh.user-rdzv-endpoint-rdzv")
def test_what_the_user_says_about_the_rendezvous_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(["--hosts=a,b", "--rdzv-endpoint=c:77", "--rdzv-id=job7"], monkeypatch)
    read = options_of(job, 1, "")
    assert (read.rdzv_backend, read.rdzv_endpoint, read.rdzv_id, read.rdzv_conf) == ("tcp", "c:77", "job7", "")
    assert (job.needs_place, job.place) == (False, "c")
    job = job_of(["--hosts=a,b", "--rdzv-backend=etcd", "--rdzv-endpoint=http://e:2379,f"], monkeypatch)
    assert (options_of(job, 1, "").rdzv_backend, job.needs_place, job.place) == ("etcd", False, "e")
    job = job_of(["--hosts=a,b", "--rdzv-backend=plugin", "--rdzv-endpoint=zk://x/y"], monkeypatch)
    read = options_of(job, 1, "")
    assert (read.rdzv_endpoint, read.node_rank, job.needs_place, job.place) == ("zk://x/y", None, False, "")
    job = job_of(["--hosts=a,b", "--master-addr=m"], monkeypatch)
    read = options_of(job, 1, "")
    assert (read.rdzv_backend, read.master_addr, read.node_rank, job.place) == ("static", "m", 1, "m")


@proves("ssh.hosts-starts-agent-host")
def test_a_host_alone_needs_no_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(["--hosts=a:4"], monkeypatch)
    read = options_of(job, 0, "")
    assert (job.needs_place, read.rdzv_backend, read.nnodes, read.node_rank) == (False, "static", "1", None)
    assert job_of(["--hosts=a", "--nnodes=1:3"], monkeypatch).needs_place  # Others may join.
    assert job_of(["--hosts=a,b", "--nnodes=1"], monkeypatch).needs_place  # One of them stands by.


@promise("ssh.variables-engine-host-change: Variables of an engine on a host change nothing of what the command says.")
@pytest.mark.parametrize("tokens", ["--hosts=a", "--hosts=a:4", "--hosts=a,b", "--hosts=a --nnodes=1:3"])
@pytest.mark.parametrize("engine", [SLURM, OPEN_MPI], ids=["slurm", "mpirun"])
def test_engines_of_the_hosts_have_no_say(tokens: str, engine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(tokens.split(), monkeypatch)
    asked, read = (options_of(job, 0) for _ in range(2))
    for name, value in engine.items():
        monkeypatch.setenv(name, value)
    detection.complete(read)  # type: ignore[arg-type]
    assert vars(read) == vars(asked)
    monkeypatch.setenv("SLURM_NODEID", "99")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "99")
    detection.complete(read)  # type: ignore[arg-type]


def test_hosts_above_the_maximum_stand_by(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(["--hosts=a,b,c", "--nnodes=1:2"], monkeypatch)
    assert [options_of(job, host).node_rank for host in range(3)] == [0, 1, None]
    assert (job.job.min_nodes, job.job.max_nodes) == (1, 2)


def test_the_directory_is_named_as_the_users_shell_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "link")
    monkeypatch.setenv("PWD", str(tmp_path / "link"))
    assert job_of(["--hosts=a"], monkeypatch).job.directory == str(tmp_path / "link")
    monkeypatch.setenv("PWD", "/elsewhere")
    assert job_of(["--hosts=a"], monkeypatch).job.directory == str(tmp_path / "real")


def test_variables_may_be_given_one_by_one_and_contain_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "x,y")
    job = job_of(["--hosts=a", "--env", "A=1,,2,HERE", "--env=B="], monkeypatch)
    assert job.job.environment == (("A", "1,2"), ("HERE", "x,y"), ("B", ""))
    assert cli.parse_args(["--env=A", "--env", "B=1", "x.py"]).env == ["A", "B=1"]


@promise("""ssh.token-values-env-name: The token and the values of `--env NAME` are in no command line, and in nothing
    that another user can read. A value in `--env NAME=VALUE` is in the command line that the user types: for a secret's
    name there is a warning.""")
def test_a_secret_in_the_command_line_causes_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other users can read it there, and not in the environment."""
    monkeypatch.setenv("API_KEY", "hush")
    job_of(["--hosts=a", "--env=API_KEY,NCCL_DEBUG=INFO"], monkeypatch)
    monkeypatch.setenv("PET_ENV", "API_KEY=hush")
    job_of(["--hosts=a"], monkeypatch)
    assert caplog.messages == []
    job_of(["--hosts=a", "--env=API_KEY=hush"], monkeypatch)
    reason = "other users of this host can read the value in this command line; export API_KEY, and give --env API_KEY"
    assert caplog.messages == [f"--env API_KEY=...: {reason}"]


@proves("ssh.hosts-hostfiles-options-make")
@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ("--hosts=a --hostfile=b", "--hosts and --hostfile exclude each other"),
        ("--hostfile=nosuch", "--hostfile 'nosuch' cannot be read: No such file or directory"),
        ("--hostfile=.", "--hostfile '.' cannot be read: Is a directory"),
        ("--hostfile=binary", "--hostfile 'binary' is not a text file"),
        ("--hostfile=large", "is larger than 1 MiB"),
        ("--hosts=a --standalone", "--standalone cannot be combined with --hosts"),
        ("--hosts=a,b --node-rank=1", "--node-rank 1 cannot be combined"),
        ("--hosts=a,b --local-addr=x", "--local-addr x cannot be combined"),
        ("--hosts=a --nnodes=2", "--nnodes 2 needs 2 hosts, and the list has 1 host"),
        ("--hosts=a,b --nnodes=3:4", "--nnodes 3:4 needs 3 hosts, and the list has 2 hosts"),
        ("--hosts=a,b --nnodes=x", "is neither a number nor MIN:MAX"),
        ("--hosts=a,b --rdzv-endpoint=::1", "write an IPv6 address in brackets"),
        ("--hosts=a,b --rdzv-backend=etcd", "--rdzv-backend etcd with --nnodes 2 needs --rdzv-endpoint"),
        ("--hosts=a,b --rdzv-backend=static", "static nodes need --master-addr"),
        ("--hosts=a,b,c --nnodes=2 --master-addr=x", "static nodes are always 2 .--nnodes., and the list has 3 hosts"),
        ("--hosts=a --ssh=nosuchssh", "there is no 'nosuchssh' on PATH"),
        ("--hosts=a --ssh='", "--ssh .*No closing quotation"),
        ("--hosts=a --ssh=", "--ssh is empty"),
        ("--hosts=a --env=NOSUCH", "--env NOSUCH: the variable is not set here"),
        ("--hosts=a --env=1A=2", "'1A' is not the name of a variable"),
        ("--hosts=a --env==2", "'' is not the name of a variable"),
        ("--hosts=a --host-timeout=0", "--host-timeout 0: give a second at least, and a day at most"),
        ("--hosts=a --host-timeout=100h", "--host-timeout 360000: give a second at least, and a day at most"),
        ("--hosts=a --rdzv-conf=x", "--rdzv-conf: "),
        ("--hosts=a --event-log-handler=nowhere", "--event-log-handler: unknown event handler 'nowhere'"),
        ("--hosts=a --copy=script --module", "a module is not a file"),
        ("--host-discovery= --nnodes=1:2", "--host-discovery is empty"),
    ],
)
def test_wrong_input(tokens: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "large").write_bytes(b"a\n" * (1 << 20))
    with pytest.raises(UserError, match=problem):
        job_of(tokens.split(), monkeypatch)


@proves("ssh.hosts-hostfiles-options-make")
def test_no_ssh_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="there is no 'ssh' on PATH: install an ssh client, or name one with --ssh"):
        job_of(["--hosts=a"], monkeypatch)


def test_a_script_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="script '-' is read from stdin, which the hosts do not have"):
        cli.main(["--hosts=a", "-"])


def names_in(archive: copying.Archive) -> list[str]:
    archive.file.seek(0)
    with tarfile.open(fileobj=archive.file) as tar:
        return sorted(tar.getnames())


def test_the_working_directory_is_copied_without_what_tools_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("pkg/a.py", ".git/config", "pkg/__pycache__/a.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "link").symlink_to("/nowhere")
    os.mkfifo(tmp_path / "fifo")
    job = job_of(["--hosts=a,b", "--copy=directory", str(tmp_path / "x.py")], monkeypatch)
    assert job.archive is not None
    assert names_in(job.archive) == ["link", "pkg", "pkg/a.py", "x.py"]
    assert f"copying {tmp_path} without .git, __pycache__ (4 files, 4 bytes) to 2 hosts" in capsys.readouterr().err
    assert job.job.program[0] == "x.py"


def test_the_script_is_copied_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(["--hosts=a", "--copy=script"], monkeypatch)
    assert job.archive is not None
    assert (names_in(job.archive), job.job.program) == (["x.py"], ("x.py",))
    job = job_of(["--hosts=a", "--copy=script", "--no-python"], monkeypatch)
    assert job.job.program == ("./x.py",)


def test_a_script_is_found_in_a_copy_of_a_directory_that_is_named_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real" / "pkg").mkdir(parents=True)
    (tmp_path / "real" / "pkg" / "x.py").touch()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "link")
    monkeypatch.setenv("PWD", str(tmp_path / "link"))
    for script in ("pkg/x.py", f"{tmp_path}/link/pkg/x.py", f"{tmp_path}/real/pkg/x.py"):
        assert copying.pack("directory", script, str(tmp_path / "link")).script == "pkg/x.py"
    (tmp_path / "real" / "x.py").touch()
    assert job_of(["--hosts=a", "--copy=directory"], monkeypatch).job.program == ("x.py",)


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_a_full_disk_is_one_line(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.py").write_bytes(os.urandom(size))
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: Path("/dev/full").open("r+b"))  # noqa: SIM115
    with pytest.raises(HostError, match=r"--copy: 'x\.py' cannot be packed: No space left on device"):
        job_of(["--hosts=a", "--copy=script"], monkeypatch)


@proves("ssh.env-remote-python-copy")
def test_a_copy_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    monkeypatch.setattr(copying, "MOST_BYTES", 99)
    with pytest.raises(UserError, match="has more than 20000 files or 0 MiB; copy it to the hosts by other means"):
        job_of(["--hosts=a", "--copy=directory"], monkeypatch)


@promise("""ssh.copy-lists-more-directory: `--copy` lists no more of a directory than its bound, and is unpacked by
    every Python from 3.11.0.""")
@pytest.mark.parametrize("name", ["{}", "{}/x"])
def test_a_tree_is_not_listed_beyond_the_bound(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(100):
        path = tmp_path / "tree" / name.format(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    seen = []
    scan = os.scandir

    @contextlib.contextmanager
    def watched(path: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scan(path) as entries:
            yield (seen.append(entry.path) or entry for entry in entries)  # type: ignore[func-returns-value]

    monkeypatch.setattr(copying, "MOST_FILES", 10)
    monkeypatch.setattr(os, "scandir", watched)
    with pytest.raises(UserError, match="has more than 10 files or 256 MiB; copy it to the hosts by other means"):
        copying.pack("directory", "", str(tmp_path / "tree"))
    assert len(seen) <= 10 + 1 + len(copying.LEFT_OUT)


@proves("ssh.copy-lists-more-directory")
def test_a_copy_is_unpacked_by_every_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.11.0 to 3.11.3 have no filters."""
    extract = tarfile.TarFile.extractall
    monkeypatch.delattr(tarfile, "tar_filter")
    monkeypatch.setattr(tarfile.TarFile, "extractall", lambda archive, path: extract(archive, path, filter="tar"))
    copy = copying.Copy()
    try:
        archive = copying.pack("script", "x.py", str(tmp_path))
        archive.file.seek(0)
        copy.unpack(archive.file)
        assert os.listdir(copy.directory) == ["x.py"]
    finally:
        copy.close()


def test_what_cannot_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "MOST_FILES", 1)
    with pytest.raises(UserError, match=r"'nosuch\.py' is not a file here"):
        copying.pack("script", "nosuch.py", str(tmp_path))
    with pytest.raises(UserError, match="is not in the working directory"):
        copying.pack("directory", "/etc/passwd", str(tmp_path))


@promise("""ssh.exclude: `--exclude` leaves hosts out of `--hosts`, of a hostfile and of what `--host-discovery` prints,
    and nodes out of a Ray cluster.""")
def test_hosts_can_be_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    job = job_of(["--hosts=me@a,b:2,c", "--exclude=a", "--exclude", "c,d"], monkeypatch)
    assert ([host.name for host in job.hosts], job.job.max_nodes) == (["b"], 1)
    assert "--exclude d: the list of hosts does not name it" in caplog.text
    found = job_of(["--host-discovery=printf 'a\\nb\\n'", "--nnodes=1:3", "--exclude=a"], monkeypatch)
    assert found.discover is not None
    assert [host.name for host in found.discover()] == ["b"]
    with pytest.raises(UserError, match="--exclude a: no host is left"):
        job_of(["--hosts=a", "--exclude=a"], monkeypatch)
