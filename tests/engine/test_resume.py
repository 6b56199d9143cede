"""Resume points: two slots, digests, the cap, and a disk that refuses."""

import os
from pathlib import Path

import numpy as np
import pytest
from tiny_models import OpenEngine, prefill_request, random_tokens, run, stored_kv

from engine.chain import Segment
from engine.resume import ResumeFile, ResumeFolder

KEY, OTHER = "ab" * 32, "cd" * 32
HIDDEN = np.arange(5000, dtype=np.uint8)


def save(file: ResumeFile, layer: int, hidden: np.ndarray = HIDDEN) -> None:
    for _ in file.save(layer, hidden, {"layer": layer}):
        pass


def opened(folder: Path, key: str = KEY, cap: int = 1 << 30, owner: str = "job") -> ResumeFile | None:
    return ResumeFolder(folder, cap_bytes=cap).open(owner, key=key, hidden_bytes=len(HIDDEN))


def test_the_furthest_usable_point_is_found_again(tmp_path: Path) -> None:
    file = opened(tmp_path)
    assert file is not None
    save(file, 4)
    save(file, 8, HIDDEN[::-1].copy())
    file.note_progress(11)
    file.close()
    again = opened(tmp_path)
    assert again is not None
    assert again.layers_computed == 11
    point = again.load(up_to=30)
    assert point is not None
    assert (point.layer, point.notes) == (8, {"layer": 8})
    np.testing.assert_array_equal(point.hidden, HIDDEN[::-1])
    earlier = again.load(up_to=7)
    assert earlier is not None
    assert earlier.layer == 4
    assert again.load(up_to=3) is None


def test_a_damaged_slot_is_not_used(tmp_path: Path) -> None:
    file = opened(tmp_path)
    assert file is not None
    save(file, 4)
    save(file, 8, HIDDEN + 1)
    file.close()
    (path,) = tmp_path.glob("*.resume")
    data = bytearray(path.read_bytes())
    data[data.find(bytes((HIDDEN + 1)[:64]))] ^= 1
    path.write_bytes(data)
    again = opened(tmp_path)
    assert again is not None
    point = again.load(up_to=30)
    assert point is not None
    assert point.layer == 4


def test_other_work_of_the_same_owner_starts_afresh(tmp_path: Path) -> None:
    file = opened(tmp_path)
    assert file is not None
    save(file, 4)
    file.close()
    other = opened(tmp_path, key=OTHER)
    assert other is not None
    assert other.load(up_to=30) is None
    assert other.layers_computed == 0


def test_the_cap_holds_and_idle_files_make_room(tmp_path: Path) -> None:
    first = opened(tmp_path, owner="first")
    assert first is not None
    save(first, 4)
    (path,) = tmp_path.glob("*.resume")
    size = path.stat().st_size
    assert opened(tmp_path, cap=size - 1) is None  # never fits
    assert opened(tmp_path, cap=2 * size - 1, owner="second") is None  # the first is at work
    first.close()
    second = opened(tmp_path, cap=2 * size - 1, owner="second")
    assert second is not None
    second.close()
    assert len(list(tmp_path.glob("*.resume"))) == 1


def test_work_that_nobody_takes_up_is_forgotten(tmp_path: Path) -> None:
    for owner in ("dead", "at work", "recent"):
        file = opened(tmp_path, owner=owner)
        assert file is not None
        save(file, 4)
        if owner == "at work":
            working = file
        else:
            file.close()
        if owner != "recent":
            os.utime(file._path, (0, 0))
    size = working._path.stat().st_size
    folder = ResumeFolder(tmp_path, cap_bytes=1 << 30)
    assert len(list(tmp_path.iterdir())) == 2
    working.close()
    assert folder.sweep() == size
    recent = opened(tmp_path, owner="recent")
    assert recent is not None
    assert recent.load(up_to=30) is not None


def test_two_processes_never_share_a_file(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert first is not None
    assert opened(tmp_path) is None
    first.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("trouble", ["cap", "folder"])
def test_a_prefill_goes_on_without_resume_points(
    trouble: str, llama_folder: Path, engine_on: OpenEngine, tmp_path: Path
) -> None:
    (tmp_path / "a file").write_text("")
    options = {"resume_bytes": 10} if trouble == "cap" else {"resume_dir": tmp_path / "a file" / "below"}
    engine = engine_on(llama_folder, checkpoint_s=0.0, **options)
    tokens = random_tokens(500)
    run(engine.start_prefill(prefill_request(tokens)))
    assert len(stored_kv(engine, tokens)) == 3


def test_a_finished_prefill_leaves_no_resume_file(llama_folder: Path, engine_on: OpenEngine, tmp_path: Path) -> None:
    engine = engine_on(llama_folder, checkpoint_s=0.0)
    prefill = engine.start_prefill(prefill_request(random_tokens(500)))
    assert len(list((tmp_path / "kv-resume").iterdir())) == 1
    run(prefill)
    assert list((tmp_path / "kv-resume").iterdir()) == []
    engine.start_prefill(prefill_request(random_tokens(600), owner="cancelled")).cancel()
    assert list((tmp_path / "kv-resume").iterdir()) == []


def test_layers_recomputed_are_counted(llama_folder: Path, engine_on: OpenEngine) -> None:
    engine = engine_on(llama_folder, checkpoint_s=1e9)
    tokens = random_tokens(500)
    prefill = engine.start_prefill(prefill_request(tokens))
    assert prefill._resume is not None
    prefill._resume.note_progress(2)  # as if two layers had been computed and no point was due
    prefill.suspend()
    result = run(engine_on(llama_folder).start_prefill(prefill_request(tokens))).result
    assert (result.resumed_from_layer, result.layers_recomputed) == (0, 0)  # nothing to go on from: not a resume


def test_layers_behind_the_resume_point_count_as_recomputed(
    llama_folder: Path, engine_on: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.prefill.STEP_S", 0.0)
    tokens = random_tokens(500)
    prefill = engine_on(llama_folder, checkpoint_s=0.0).start_prefill(prefill_request(tokens))
    while prefill.progress < 0.5:
        assert prefill.step()
    assert prefill._resume is not None
    prefill._resume.note_progress(3)  # as if two more layers had been computed before the kill
    prefill.suspend()
    result = run(engine_on(llama_folder).start_prefill(prefill_request(tokens))).result
    assert (result.resumed_from_layer, result.layers_recomputed) == (1, 2)


def test_what_is_evicted_before_it_is_leased_is_computed(
    llama_folder: Path, engine_on: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(llama_folder)
    tokens = random_tokens(500)
    run(engine.start_prefill(prefill_request(tokens)))
    expected = stored_kv(engine, tokens)
    store, match = engine.store, engine.store.match

    def match_and_lose(chain: list[Segment]) -> int:
        found = match(chain)
        store.release("document")
        return found

    monkeypatch.setattr(store, "match", match_and_lose)
    result = run(engine.start_prefill(prefill_request(tokens, owner="again"))).result
    monkeypatch.undo()
    assert result.cached_tokens == 0
    assert stored_kv(engine, tokens) == expected
