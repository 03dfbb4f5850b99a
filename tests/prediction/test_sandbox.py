"""The sandbox of a child: nothing is written, deleted or sent outside of its scratch folder, and what was blocked is listed."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from in_child import fine, run

from memlab.prediction.child import sandbox
from memlab.prediction.child.channel import MOST_LINES, counted, read_log

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a child is forked on Linux alone")
needs_landlock = pytest.mark.skipif(
    sandbox.landlock_version() < 6, reason="this Linux has no Landlock, or an older one"
)
REFUSED = [
    (lambda: os.mkdir("made", dir_fd=os.open(".", os.O_RDONLY)), "making the folder 'made'"),
    (lambda: shutil.rmtree("sub"), "deleting 'inner'"),
    (lambda: Path("sub").rename("other"), "renaming 'sub' to 'other'"),
    (lambda: Path("link").symlink_to("file"), "linking 'link'"),
    (lambda: os.link("file", "link"), "linking 'link'"),
    (lambda: os.truncate("file", 0), "changing 'file'"),
    (lambda: Path("file").chmod(0o777), "changing 'file'"),
    (lambda: os.utime("file", (0, 0)), "changing 'file'"),
    (lambda: io.FileIO("file", "w"), "writing 'file'"),
    (lambda: sqlite3.connect("data.db"), "opening the database 'data.db'"),
    (lambda: os.kill(os.getppid(), signal.SIGTERM), f"sending signal 15 to process {os.getpid()}"),
    (lambda: os.kill(1, signal.SIGTERM), "sending signal 15 to process 1"),
    (lambda: os.kill(-1, signal.SIGTERM), "sending signal 15 to process -1"),
    (lambda: os.killpg(os.getpgid(os.getppid()), 15), f"sending signal 15 to process group {os.getpgrp()}"),
]


@pytest.mark.parametrize(("act", "what"), REFUSED, ids=[re.sub(r"\d{2,}", "N", what) for _, what in REFUSED])
def test_what_is_refused(untouched, act, what):
    def work():
        with pytest.raises(PermissionError, match="blocked in a prediction"):
            act()

    assert fine(work).refused == (what,)


def test_connections_are_held_off():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def work():
            for connect in (
                lambda: socket.create_connection(("127.0.0.1", port)),
                lambda: socket.create_connection(("192.0.2.1", 80)),
                lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", port)),
                lambda: socket.create_connection(("nowhere.invalid", 80)),
                lambda: socket.gethostbyname("nowhere.invalid"),
                lambda: socket.socket(socket.AF_UNIX).connect("/run/some.sock"),
            ):
                with pytest.raises(OSError, match="blocked in a prediction"):
                    connect()

        assert fine(work).refused == (
            f"connecting to 127.0.0.1:{port} (2 times)", "connecting to 192.0.2.1:80",
            "looking up nowhere.invalid (2 times)", "connecting to '/run/some.sock'",
        )  # fmt: skip


def test_what_harms_nobody_is_let_through(untouched):
    def work():
        assert Path("file").read_text() == "kept"
        assert [name for name in os.listdir(".") if name.startswith("f")] == ["file"]  # noqa: PTH208
        os.makedirs("sub", exist_ok=True)  # noqa: PTH103
        Path("nothing").unlink(missing_ok=True)
        with pytest.raises(FileNotFoundError):
            Path("nothing").rename("other")
        Path(os.devnull).write_text("x")
        assert sqlite3.connect(":memory:").execute("select 1").fetchone() == (1,)
        ours, theirs = socket.socketpair()
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"
        os.kill(os.getpid(), 0)
        assert torch.zeros(1000).share_memory_().sum() == 0
        program = subprocess.Popen(["sleep", "100"])
        program.terminate()
        assert program.wait() == -signal.SIGTERM

    outcome = fine(work)
    assert (outcome.refused, outcome.notes, outcome.started) == ((), (), ("sleep 100",))


def test_started_programs_are_listed():
    def work():
        subprocess.run(["true"], check=True)
        subprocess.run("true && true", shell=True, check=True)
        subprocess.check_output(["true"])
        os.system("true")
        os.waitpid(os.posix_spawn("/bin/true", ["true", "quite"], {}), 0)

    assert fine(work).started == ("true (3 times)", "/bin/sh -c true && true", "true quite")


@needs_landlock
def test_programs_cannot_write_delete_connect_or_kill(untouched):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
        commands = (
            "echo x > new", "echo x >> file", "rm file", "rm -r sub", "mv file other", "mkdir made", "ln -s file link",
            f"kill {os.getpid()}", f"{sys.executable} -c \"{connect}\"",
        )  # fmt: skip

        def work():
            for command in commands:
                assert subprocess.run(command, shell=True, stderr=subprocess.DEVNULL).returncode, command
            subprocess.run("echo x > $TMPDIR/new && rm $TMPDIR/new && echo x > /dev/null", shell=True, check=True)

        fine(work)
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()


def test_what_processes_of_the_child_try_is_held_off_and_listed(untouched):
    def work():
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                try:
                    Path("new").write_text("x")
                    assert Path("new").read_text() == "x"
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)

    assert fine(work).refused == ("writing 'new' (2 times)",)


def test_what_was_held_off_before_a_death_is_listed(untouched):
    def work(channel):
        Path("new").write_text("x")
        os._exit(1)

    assert run(work).refused == ("writing 'new'",)


def test_the_list_has_an_end(untouched):
    def work():
        for _ in range(MOST_LINES + 1000):
            with pytest.raises(PermissionError):
                os.truncate("file" + "/." * 250, 0)

    outcome = fine(work)
    assert len(outcome.refused) == 1
    assert outcome.refused[0].startswith("changing 'file/./.")
    assert outcome.refused[0].endswith(f"… ({MOST_LINES - 1} times)")
    assert len(outcome.refused[0]) < 230
    assert outcome.notes == (f"More than {MOST_LINES} attempts were blocked; those after that are not listed.",)


def test_without_landlock_the_audit_hook_holds_and_the_lack_is_named(untouched, monkeypatch):
    monkeypatch.setattr(sandbox, "landlock_version", lambda: 0)

    def work():
        with pytest.raises(PermissionError):
            io.FileIO("new", "w")
        torch.save({}, "new.pt")

    outcome = fine(work)
    assert outcome.refused == ("writing 'new'", "writing 'new.pt'")
    (note,) = outcome.notes
    assert note.startswith("The sandbox does not hold programs that are started in it")


def test_the_parent_is_not_sandboxed(folder):
    run(lambda channel: b"")
    Path("new").write_text("x")
    torch.save({}, "new.pt")
    assert Path("new").read_text() == "x"
    assert Path("new.pt").stat().st_size


@needs_landlock
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_it_holds_for_a_user_who_is_not_root():
    code = (
        "import os, tempfile\n"
        "from in_child import run; from memlab.prediction.child import forked, sandbox\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "def work(channel):\n"
        "    os.system('echo x > new; echo x >> old')\n"
        "    os.unlink('old')\n"
        "    return b'held off'\n"
        "outcome = run(work)\n"
        "print(outcome.result, outcome.error, outcome.refused, outcome.notes, sorted(os.listdir()))"
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)  # noqa: PTH101
        old = Path(folder, "old")
        old.write_text("")
        old.chmod(0o666)
        paths = os.pathsep.join(str(Path(__file__).parents[at]) for at in (1, 2))
        environment = {**os.environ, "PYTHONPATH": paths, "TMPDIR": folder}
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.stdout == "b'held off' None (\"deleting 'old'\",) () ['old']\n", done.stderr
        assert old.read_text() == ""


def test_a_log_is_read_as_far_as_it_goes():
    found = read_log(b'["refused", "a"]\n["refused", "a"]\n["other", "b"]\n[1]\n["started", "c')
    assert (counted(found["refused"]), counted(found["started"])) == (("a (2 times)",), ())


def test_other_systems_have_no_landlock(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert sandbox.landlock_version() == 0


@needs_landlock
def test_a_link_to_nothing_does_not_take_the_walls_away(tmp_path):
    (tmp_path / "nothing").symlink_to(tmp_path / "gone")
    code = "import pathlib, sys; from memlab.prediction.child.sandbox import restrict as walls; "
    code += "print(walls([pathlib.Path(one) for one in sys.argv[1:]]))"  # in a process of its own: walls stay
    paths = [str(tmp_path), str(tmp_path / "nothing"), str(tmp_path / "gone")]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True)
    assert int(done.stdout) == sandbox.landlock_version()
