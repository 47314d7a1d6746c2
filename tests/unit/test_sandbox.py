"""Attacks on the sandbox. After each one the outcome is right, and no process of the program is alive.

`sandbox_attacks.py` has the attacks that run in both kinds of sandbox: with namespaces in this process, and without
them as another user, for whom the kernel denies namespaces.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import sandbox_attacks
from sandbox_attacks import alive

from paceline.config import Config, RewardSection
from paceline.doctor import machine
from paceline.doctor.run import _sandbox
from paceline.tasks import landlock, memory, sandbox, supervisor
from paceline.tasks.rewards import LocalRewarder
from paceline.tasks.sandbox import Isolation, Limits, Outcome, SandboxUnavailable, isolation, run_program

TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True, scope="module")
def namespaces() -> None:
    try:
        isolation("namespaces")
    except SandboxUnavailable as error:
        pytest.skip(f"this machine does not allow namespaces: {error}")


def run(source: str, stdin: str = "", **limits: Any) -> Outcome:
    return run_program(
        source, stdin, Limits(**{"cpu_s": 2, "memory_mb": 128, "wall_s": 10.0, "output_kb": 64, **limits})
    )


def test_a_program_that_succeeds() -> None:
    outcome = run("import json, sys\nprint(json.dumps(input()))\nprint('é', file=sys.stderr)", "two words\nmore")
    assert outcome.ok and outcome.returncode == 0
    assert (outcome.stdout, outcome.stderr) == ('"two words"\n', "é\n")


def test_a_program_that_fails() -> None:
    outcome = run("print('before')\nraise SystemExit(3)")
    assert (outcome.returncode, outcome.stdout, outcome.reason) == (3, "before\n", "ended with code 3")
    assert run("import os; os.abort()").reason == "was ended by signal 6"


def test_a_program_behaves_the_same_in_every_run() -> None:
    assert run("print(hash('a'))").stdout == run("print(hash('a'))").stdout


def test_no_environment_variables_and_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATE", "secret")
    outcome = run("import os; print(sorted(os.environ)); print(os.listdir()); open('x', 'w').write('y')")
    assert outcome.ok and "PRIVATE" not in outcome.stdout and "['program.py']" in outcome.stdout
    assert run("import os; print(os.path.exists('x'))").stdout == "False\n"


def test_an_infinite_loop() -> None:
    assert run("while True: pass", cpu_s=1).reason == "used more than 1 s of CPU time"


def test_a_sleep_that_ignores_sigterm() -> None:
    source = "import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(1000)"
    assert run(source, wall_s=0.3).reason == "ran for more than 0.3 s"


def test_unlimited_memory() -> None:
    outcome = run("buffers = []\nwhile True: buffers.append(bytearray(1 << 20))")
    assert outcome.returncode == 1 and "MemoryError" in outcome.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_unlimited_output(stream: str) -> None:
    outcome = run(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
    assert outcome.reason == "wrote more than 64 KB"
    assert len(outcome.stdout) + len(outcome.stderr) <= 2 * (64 << 10)


def test_a_huge_file_and_many_files() -> None:
    assert "File too large" in run("open('huge', 'wb').write(bytes(1 << 20))").stderr
    many = "for i in range(10**6): open(str(i), 'wb').write(bytes(1 << 15))"
    assert "No space left" in run(many, disk_mb=2).stderr


def test_a_fork_bomb() -> None:
    source = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert run(source, wall_s=0.5, num_processes=8).reason == "ran for more than 0.5 s"
    # The limit stops it long before 50 processes.
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


def test_alive_finds_processes() -> None:
    """The tests that no process survives rely on `alive`."""
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
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=2)"
        assert "OSError" in run(connect).stderr
        exec(connect)  # without the sandbox the connection works


def test_no_files_of_the_user(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.write_text("secret")
    private.chmod(0o644)
    assert "FileNotFoundError" in run(f"print(open({str(private)!r}).read())").stderr
    listing = run("import os; print(os.path.exists('/etc/passwd'), os.path.exists('/proc/1'))").stdout
    assert listing == "False False\n"


def test_no_privilege_escalation() -> None:
    outcome = run("import os\nfor f in (os.setuid, os.setgid):\n    try: f(0); print('root')\n    except OSError: pass")
    assert outcome.ok and outcome.stdout == ""
    escalate = "import ctypes, os\nlibc = ctypes.CDLL(None)\nprint(libc.unshare(0x10000000), libc.chroot(b'.'))"
    assert run(escalate).stdout == "-1 -1\n"


def test_a_program_can_not_kill_init_or_the_supervisor() -> None:
    outcome = run("import os, signal, time\nos.kill(1, 9) if os.getpid() < 5 else None\nprint('here')")
    assert outcome.stdout in ("", "here\n")
    outcome = run("import os\nos.kill(0, 9)")
    assert outcome.returncode == -9 and outcome.reason == "was ended by signal 9"


def test_the_program_ends_when_the_caller_is_killed(tmp_path: Path) -> None:
    mark = f"orphan-{os.getpid()}-{time.monotonic_ns()}"
    inner = f"import os; os.execv({base_python()!r}, ['p', '-I', '-S', '-c', 'import time; time.sleep(600)', {mark!r}])"
    outer = (
        "import sys; from paceline.tasks.sandbox import Limits, run_program; "
        "run_program(sys.stdin.read(), limits=Limits(wall_s=500))"
    )
    # Through standard input, as the mark must only be on the program's command line.
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


def test_folders_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o755)
    run("open('x', 'w').write('y')")
    assert list(tmp_path.iterdir()) == []


# ---- the attacks on both kinds of sandbox ----

# What each attack may achieve.
ALLOWED: dict[str, list[str]] = {
    "files": ["own", "own:truncate"],  # only files in its own folder
    "other_programs": [],
    "environment": [],
    "descriptors": [],
    "network": ["pair"],  # a pair of sockets connects only the program's own processes
    "other_processes": [],
    "kill_supervisor": ["3"],
    "survivors": ["started"],
    "fork_chain": ["started"],
    "status": ["3"],
    "tree_memory": ["used more than 128 MB of memory in all its processes"],
    "shared_memory": ["shared"],
    "forged_passes": [],
}


@pytest.mark.parametrize("attack", sandbox_attacks.ATTACKS)
def test_attacks_with_namespaces(attack: str) -> None:
    allowed = ALLOWED | {
        "kill_supervisor": ["-9"],  # kill(-1) kills every process of its namespace, and no other
        "files": ["own", "own:chmod", "own:flags", "own:truncate"],  # it has access to no other files
    }
    assert sandbox_attacks.ATTACKS[attack]("namespaces") == allowed[attack]


def as_other_user(*arguments: str) -> dict[str, Any]:
    script = (TESTS / "sandbox_attacks.py").read_text()
    options = [argument for argument in arguments if argument.startswith("--")]
    attacks = [argument for argument in arguments if not argument.startswith("--")]
    command = [sys.executable, str(TESTS / "other_user.py"), *options, script, *attacks]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_attacks_as_a_user_without_namespaces() -> None:
    if not landlock.version():
        pytest.skip("this kernel has no Landlock; the next test covers this case")
    found = as_other_user()
    assert os.geteuid() != 0 or found["uid"] not in (0, os.geteuid())
    error = found["namespaces"]
    assert error.startswith('unavailable: reward.sandbox = "namespaces": programs can\'t be isolated by namespaces')
    assert "unshare" in error and 'set reward.sandbox = "process"' in error
    assert found["process"] == "process (not isolated: names and sizes of files, disk space)"
    assert {name: found[name] for name in ALLOWED} == ALLOWED


def with_mount_beneath_usr(*runner: str) -> list[str]:
    """Runs the attack `mounts` in a mount namespace where /usr/share is a file system that everyone may write."""
    script = (TESTS / "sandbox_attacks.py").read_text()
    script = script[: script.rindex("if __name__")] + 'print(isolation("namespaces"), *mounts("namespaces"), sep="\\n")'
    prepare = "mount -t tmpfs -o mode=1777 tmpfs /usr/share && (umask 0; echo > /usr/share/secret) && exec"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{prepare} "$@"', "sh", *runner, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_a_file_system_that_is_mounted_beneath_usr() -> None:
    assert with_mount_beneath_usr(sys.executable, "-c") == ["namespaces", "own"]
    # In a user namespace it can't be left out: it is visible, read-only, and reported.
    assert with_mount_beneath_usr(sys.executable, str(TESTS / "other_user.py"), "--namespaces") == [
        "namespaces (not isolated: what is mounted beneath /usr)", "list", "read", "own",
    ]  # fmt: skip


def test_attacks_without_landlock() -> None:
    """The other protections still work, and the missing ones are reported."""
    not_prevented = ("files", "other_programs", "environment", "other_processes", "forged_passes")
    prevented = [name for name in ALLOWED if name not in not_prevented]
    found = as_other_user("--no-landlock", *prevented, "other_processes", "other_programs", "files")
    assert {name: found[name] for name in prevented} == {name: ALLOWED[name] for name in prevented}
    assert found["process"].startswith("process (not isolated: the user's files, memory of the user's processes")
    assert "expected values of tests" in found["process"] and "program.py" in found["other_programs"]
    assert not [name for name in found["other_processes"] if name.startswith(("supervisor", "all")) or "kill" in name]
    assert found["files"] == ["read", "write", "list", *ALLOWED["files"], "written"], (
        "if this is prevented now, change `not_isolated` and the docs"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives each program its own user")
def test_attacks_on_root_without_landlock() -> None:
    prevented = ("files", "other_programs", "descriptors", "other_processes", "status")
    found = as_other_user("--root", "--no-landlock", *prevented)
    assert found["uid"] == 0
    assert found["process"] == "process (not isolated: files that everyone may read, disk space)"
    assert {name: found[name] for name in prevented} == {name: ALLOWED[name] for name in prevented}


def test_a_reward_worker_can_not_be_inspected() -> None:
    """A program that runs as the worker's user must not change the worker's memory; root may inspect every process."""
    script = """
import os
from paceline.tasks.checks import code_check
code_check(1, 128, 5.0, "process")
worker = os.getpid()
if os.fork() == 0:
    try: open(f"/proc/{worker}/mem", "rb"); print("open", flush=True)
    except OSError: print("denied", flush=True)
    os._exit(0)
os.wait()
"""
    command = [sys.executable, str(TESTS / "other_user.py"), script]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "denied\n"


# ---- error messages, and how the isolation is reported ----

UNSHARE_DENIED = """
import sys
from paceline.tasks import seccomp
seccomp.install([*seccomp.deny("unshare"), *seccomp.deny(sys.argv[1])])
from paceline.config import RewardSection
from paceline.tasks.rewards import LocalRewarder
LocalRewarder(RewardSection(functions=["code"]))
"""


def test_root_without_namespaces_gets_an_error_too() -> None:
    done = subprocess.run([sys.executable, "-c", UNSHARE_DENIED, "setns"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and 'set reward.sandbox = "process"' in done.stderr


def test_a_program_that_can_not_be_started_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error between fork and exec is not the program's failure."""
    python = tmp_path / "python"
    python.write_text("not executable")
    monkeypatch.setattr(sandbox.sys, "_base_executable", str(python))
    with pytest.raises(SandboxUnavailable, match="programs can't be started"):
        run("print(1)")


def test_the_isolation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    rewarder = LocalRewarder(RewardSection(functions=["code"]))
    assert rewarder.sandbox == "namespaces"
    rewarder.close()
    config = Config(reward=RewardSection(functions=["code"]))
    [task] = config.tasks
    assert _sandbox(task).status == "ok" and next(iter(machine._sandbox())).status == "ok"

    def denied(kind: str) -> Isolation:
        if kind == "namespaces":
            raise SandboxUnavailable('reward.sandbox = "namespaces": no; set reward.sandbox = "process"')
        return Isolation("process", ("disk space",))

    monkeypatch.setattr(sandbox, "isolation", denied)
    found = _sandbox(task)
    assert (found.status, found.required) == ("missing", True) and 'reward.sandbox = "process"' in found.remedy
    found = next(iter(machine._sandbox()))
    assert found.status == "degraded" and 'reward.sandbox = "process"' in found.remedy
    weaker = RewardSection(functions=["code"], sandbox="process")
    assert _sandbox(*Config(reward=weaker).tasks).detail == "process (not isolated: disk space)"
    rewarder = LocalRewarder(weaker)
    assert rewarder.sandbox == "process (not isolated: disk space)"
    rewarder.close()
    with pytest.raises(SandboxUnavailable):
        LocalRewarder(RewardSection(functions=["code"]))
    rewarder = LocalRewarder(RewardSection(functions=["exact"]))
    assert rewarder.sandbox is None
    rewarder.close()


# ---- users ----

IN_USER_NAMESPACE = """
import ctypes, os, sys
from paceline.tasks import supervisor
for _ in range(2):
    (ready, is_ready), (go, may_go) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        assert ctypes.CDLL(None).unshare(0x10000000) == 0
        os.write(is_ready, b"x")
        os.read(go, 1)
        uid = supervisor.unprivileged_uid()
        if uid != supervisor.NOBODY_UID: os.setuid(uid)
        print(uid, flush=True)
        os._exit(0)
    os.read(ready, 1)
    open(f"/proc/{child}/uid_map", "w").write(sys.argv[1])
    os.write(may_go, b"x")
    os.wait()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a user namespace with many users needs root")
@pytest.mark.parametrize(
    ("uid_map", "users"),
    [
        ("0 0 4294967295", range(0x70000000, 0x80000000)),
        ("0 1000 1\n1 100000 65536", range(32768, 65537)),  # as in rootless containers
        ("0 100000 200000", range(100000, 200000)),
        ("0 1000 1", [65534]),
    ],
)
def test_each_program_gets_its_own_user_in_a_user_namespace(uid_map: str, users: Any) -> None:
    command = [sys.executable, "-c", IN_USER_NAMESPACE, uid_map]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = list(map(int, done.stdout.split()))
    assert all(uid in users for uid in found) and len(set(found)) == min(2, len(users)), found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs programs as another user")
def test_programs_that_share_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The limit on processes adds the processes of the other programs, and the shared limit is reported."""
    for name in ("prctl", "readable_by_all"):
        monkeypatch.setattr(supervisor, name, lambda *_: True)
    monkeypatch.setattr(supervisor, "unprivileged_uid", lambda: supervisor.NOBODY_UID)
    (tmp_path / "work").mkdir()
    for name in ("program.py", "stdin"):
        (tmp_path / name).touch()
    spec = {"folder": str(tmp_path), "sandbox": "process", "python": sys.executable, "num_processes": 16}
    with subprocess.Popen(["sleep", "60"], user=supervisor.NOBODY_UID) as process:
        try:
            setup = supervisor.Setup(spec)
            assert setup.num_processes > 16
        finally:
            process.kill()
    assert "the limit on processes of programs that run at once" in setup.not_isolated
    setup.has_landlock = False
    assert "expected values of tests" in setup.not_isolated


# ---- memory ----


def test_a_cgroup_below_our_own(tmp_path: Path) -> None:
    """With plain files in place of the kernel's: not every machine has writable cgroups."""
    own, top = tmp_path / "self", tmp_path / "cgroup"
    scope = top / "slice" / "scope"
    scope.mkdir(parents=True)
    own.write_text("4:memory:/elsewhere\n0::/slice/scope\n")
    assert memory.Cgroup.make(1 << 20, top, own) is None
    (scope / "cgroup.subtree_control").write_text("cpu\n")
    assert memory.Cgroup.make(1 << 20, top, own) is None
    (scope / "cgroup.subtree_control").write_text("cpu memory pids\n")
    made = memory.Cgroup.make(1 << 20, top, own)
    assert made is not None and made.folder.parent == scope
    made.enter()
    assert (made.folder / "memory.max").read_text() == str(1 << 20)
    assert (made.folder / "cgroup.procs").read_text() == "0"
    assert not made.was_exceeded()
    (made.folder / "memory.events").write_text("low 0\nmax 7\noom 1\noom_kill 2\n")
    assert made.was_exceeded()
    for outside in ("4:memory:/elsewhere\n", "0::/../other\n"):
        own.write_text(outside)
        assert memory.Cgroup.make(1 << 20, top, own) is None


def test_memory_of_processes_is_found() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert process.pid in memory.descendants() and memory.used_bytes(process.pid) > 0
            assert process.pid in memory._all_by_parent()[os.getpid()]
            assert memory.num_tasks(os.getuid()) >= 2
        finally:
            process.kill()
    assert memory.used_bytes(process.pid) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_callers_umask_does_not_affect_the_program() -> None:
    before = os.umask(0o077)
    try:
        outcome = run("print(1)")
    finally:
        os.umask(before)
    assert outcome.stdout == "1\n", outcome
