"""Signs of life: a session is alive exactly as long as its process holds it."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kv_store.sessions import Session, is_alive, remove_dead_files


def test_alive_until_closed(tmp_path: Path) -> None:
    session = Session(tmp_path)
    assert is_alive(tmp_path, session.id)
    assert is_alive(tmp_path, session.id)  # asking does not disturb it
    session.close()
    assert not is_alive(tmp_path, session.id)
    assert not is_alive(tmp_path, "never opened")


def test_dead_as_soon_as_the_process_is(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from engine.kv_store.sessions import Session\n"
    code += "print(Session(Path(sys.argv[1])).id, flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        other = process.stdout.readline().strip()
        own = Session(tmp_path)
        assert is_alive(tmp_path, other)
        process.kill()
        process.wait()
        assert not is_alive(tmp_path, other)
    assert len(list(tmp_path.iterdir())) == 2
    remove_dead_files(tmp_path)
    assert [path.stem for path in tmp_path.iterdir()] == [own.id]
    own.close()


def test_children_of_a_process_do_not_keep_its_session_alive(tmp_path: Path) -> None:
    session = Session(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        session_file = next(tmp_path.iterdir())
        session.close()
        session_file.touch()  # as if the process had been killed: the file stays, the lock does not
        assert not is_alive(tmp_path, session.id)
        child.communicate(b"\n")


def test_a_session_swept_before_it_was_locked_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, swept = fcntl.flock, []

    def sweep_first(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not swept:
            swept.append(next(tmp_path.iterdir()))
            remove_dead_files(tmp_path)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    session = Session(tmp_path)
    assert is_alive(tmp_path, session.id)
    assert not swept[0].exists()
    session.close()
