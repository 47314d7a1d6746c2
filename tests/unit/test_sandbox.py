"""Attacks on the sandbox. After each, the answer is right, and nothing of the program is alive."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.tasks import sandbox
from paceline.tasks.sandbox import Outcome, isolation, run_program


def run(source: str, stdin: str = "", **limits: Any) -> Outcome:
    return run_program(source, stdin, **{"cpu_s": 2, "memory_mb": 128, "wall_s": 10.0, "output_kb": 64, **limits})


def alive(mark: str) -> list[int]:
    """Processes with `mark` on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def needs(what: str) -> None:
    if what in isolation():
        pytest.skip(f"this machine can't isolate {what}, and says so")


def test_a_good_program() -> None:
    outcome = run("import json, sys\nprint(json.dumps(input()))\nprint('é', file=sys.stderr)", "two words\nmore")
    assert outcome.ok and outcome.returncode == 0
    assert (outcome.stdout, outcome.stderr) == ('"two words"\n', "é\n")


def test_a_program_that_fails() -> None:
    outcome = run("print('before')\nraise SystemExit(3)")
    assert (outcome.returncode, outcome.stdout, outcome.reason) == (3, "before\n", "ended with code 3")
    assert run("import os; os.abort()").reason == "was ended by signal 6"


def test_runs_repeat() -> None:
    assert run("print(hash('a'))").stdout == run("print(hash('a'))").stdout


def test_no_environment_and_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUSH", "secret")
    outcome = run("import os; print(sorted(os.environ)); print(os.listdir()); open('x', 'w').write('y')")
    assert outcome.ok and "HUSH" not in outcome.stdout and "['program.py']" in outcome.stdout
    assert run("import os; print(os.path.exists('x'))").stdout == "False\n"


def test_a_loop_without_end() -> None:
    assert run("while True: pass", cpu_s=1).reason == "used more than 1 s of CPU time"


def test_a_sleep_that_ignores_sigterm() -> None:
    source = "import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(1000)"
    assert run(source, wall_s=0.3).reason == "ran for more than 0.3 s"


def test_memory_without_end() -> None:
    outcome = run("hoard = []\nwhile True: hoard.append(bytearray(1 << 20))")
    assert outcome.returncode == 1 and "MemoryError" in outcome.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_without_end(stream: str) -> None:
    outcome = run(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
    assert outcome.reason == "wrote more than 64 KB"
    assert len(outcome.stdout) + len(outcome.stderr) <= 2 * (64 << 10)


def test_a_huge_file_and_many_files() -> None:
    assert "File too large" in run("open('huge', 'wb').write(bytes(1 << 20))").stderr
    needs("files")
    many = "for i in range(10**6): open(str(i), 'wb').write(bytes(1 << 15))"
    assert "No space left" in run(many, disk_mb=2).stderr


def test_a_fork_bomb() -> None:
    source = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert run(source, wall_s=0.5, num_processes=8).reason == "ran for more than 0.5 s"
    # The limit is what stops it: far fewer than asked for.
    count = """
import os, time
n = 0
try:
    for n in range(50):
        if os.fork() == 0: time.sleep(9); os._exit(0)
except OSError: pass
print(n)
"""
    outcome = run(count, num_processes=8)
    assert outcome.ok and int(outcome.stdout) < 8


def test_children_left_behind_are_gone() -> None:
    """Double fork, own session, ignoring every signal that can be; the program itself ends at once."""
    mark = f"left-behind-{os.getpid()}-{time.monotonic_ns()}"
    source = f"""
import os, signal, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)
        for fd in (0, 1, 2): os.close(fd)
        os.execv({base_python()!r}, ['python', '-I', '-S', '-c', 'import time; time.sleep(600)', {mark!r}])
    os._exit(0)
os.wait()
import time; time.sleep(0.3)
"""
    outcome = run(source)
    assert outcome.ok, outcome
    assert alive(mark) == []


def test_the_hunt_for_processes_finds_them() -> None:
    """The twin of the test above that must see something."""
    import subprocess

    mark = f"seen-{os.getpid()}"
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)", mark]) as process:
        try:
            deadline = time.monotonic() + 20  # between fork and exec its command line is empty
            while process.pid not in alive(mark) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert process.pid in alive(mark)
        finally:
            process.kill()


def base_python() -> str:
    return str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


def test_no_network() -> None:
    needs("network")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=2)"
        assert "OSError" in run(connect).stderr
        exec(connect)  # from here it can be reached


def test_no_files_of_the_user(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.write_text("secret")
    private.chmod(0o600)
    outcome = run(f"print(open({str(private)!r}).read())")
    if "files" not in isolation():
        assert not outcome.ok and "secret" not in outcome.stdout
    for path in ("files", "files that everyone may read"):
        if path in isolation():
            return
    private.chmod(0o644)
    assert "FileNotFoundError" in run(f"print(open({str(private)!r}).read())").stderr
    listing = run("import os; print(os.path.exists('/etc/passwd'), os.path.exists('/proc/1'))").stdout
    assert listing == "False False\n"


def test_no_way_to_more_rights() -> None:
    outcome = run("import os\nfor f in (os.setuid, os.setgid):\n    try: f(0); print('root')\n    except OSError: pass")
    assert outcome.ok and outcome.stdout == ""
    needs("files")
    climb = "import ctypes, os\nlibc = ctypes.CDLL(None)\nprint(libc.unshare(0x10000000), libc.chroot(b'.'))"
    assert run(climb).stdout == "-1 -1\n"


def test_a_program_can_not_stop_its_keepers() -> None:
    outcome = run("import os, signal, time\nos.kill(1, 9) if os.getpid() < 5 else None\nprint('here')")
    assert outcome.stdout in ("", "here\n")
    outcome = run("import os\nos.kill(0, 9)")
    assert outcome.returncode == -9 and outcome.reason == "was ended by signal 9"


def test_whoever_asked_is_killed_and_the_program_with_it(tmp_path: Path) -> None:
    import subprocess

    mark = f"orphan-{os.getpid()}-{time.monotonic_ns()}"
    inner = f"import os; os.execv({base_python()!r}, ['p', '-I', '-S', '-c', 'import time; time.sleep(600)', {mark!r}])"
    outer = "import sys; from paceline.tasks.sandbox import run_program; run_program(sys.stdin.read(), wall_s=500)"
    # By standard input, as the mark must be on the program's command line alone.
    with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(inner)
        process.stdin.close()
        wait_until(lambda: alive(mark) != [])
        process.kill()
    wait_until(lambda: alive(mark) == [])


def wait_until(condition: Any) -> None:
    deadline_s = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_boxes_are_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o755)
    run("open('x', 'w').write('y')")
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.config import RewardSection
    from paceline.tasks.rewards import Rewarder

    monkeypatch.setattr(sandbox, "isolation", lambda: ["network", "files"])
    Rewarder(RewardSection(functions=["code"])).close()
    assert capsys.readouterr().err == "code: this machine can't isolate: network, files\n"
