"""The archive of the run over REST, and what its figures say; the run itself needs a server and is made by hand."""

import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine import default_model
from loadtests.http.scrape import Scrape
from loadtests.rest_gpu import EngineAlone, build_archive, cold_stages, figures, label
from service.settings import Settings


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    folder = default_model.tokenizer_folder(Settings().resolved().cache_dir)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def sources(folder: Path) -> Path:
    """Three files of code and two that are no part of it."""
    package = folder / "package"
    for name in ("a.py", "b/c.py", "d.py", "site-packages/other.py", "notes.txt"):
        file = package / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"x = 1  # {name}\n" * 100, encoding="utf-8")
    return package


def test_the_archive_holds_sources_until_there_are_tokens_enough(tmp_path: Path, tokenizer: Tokenizer) -> None:
    package, path = sources(tmp_path), tmp_path / "repository.zip"
    counted = build_archive(path, [package], 1500, tokenizer)
    names = zipfile.ZipFile(path).namelist()
    assert names == ["repository/package/a.py", "repository/package/b/c.py"]
    texts = [zipfile.ZipFile(path).read(name).decode() for name in names]
    assert counted == sum(len(tokenizer.encode(text).ids) for text in texts) >= 1500


def test_too_few_sources_are_refused_with_both_numbers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"only \d+ tokens of Python in .*package, expected 1000000"):
        build_archive(tmp_path / "repository.zip", [sources(tmp_path)], 1_000_000, tokenizer)


DOCUMENT = {
    "prefix_tokens": 999,
    "density": 0.25,
    "recall": None,
    "heads": {"dense": 1},
    "stage_seconds": {"upload": 0.1, "ingest": 2.0, "prefill": 10.0},
    "cold_ttft_s": 12.5,
}


def test_the_overhead_is_over_the_engine_by_itself_where_that_was_run() -> None:
    stages = {"ingest": 2.0, "queue": 0.5, "prefill": 9.0, "kv_store": 1.0}
    found = figures(DOCUMENT, stages, EngineAlone(9.5, 10.0, 0.25), to_first_text_s=15.0)
    assert found["engine"] == "by itself"
    assert (found["overhead"], found["overhead_with_ingest"], found["overhead_to_first_text"]) == (0.05, 0.25, 0.5)
    assert found["overhead_in_server"] == 0.05
    assert found["mean_keys"] == 125
    inside = figures({**DOCUMENT, "stage_seconds": {"prefill": 5.0}}, stages, None, to_first_text_s=15.0)
    assert (inside["engine"], inside["engine_s"], inside["overhead"]) == ("in the server", 5.0, 1.1)


def test_stages_are_those_of_the_cold_first_token() -> None:
    name = "foreword_time_to_first_token_stage_seconds_sum"
    values = {
        (name, (("cache_state", state), ("stage", stage))): seconds
        for state, stage, seconds in (("cold", "ingest", 2.0), ("cold", "prefill", 9.0), ("warm_disk", "prefill", 7.0))
    }
    assert cold_stages(Scrape(values)) == {"ingest": 2.0, "queue": 0.0, "prefill": 9.0, "kv_store": 0.0}


def test_labels_say_the_length() -> None:
    assert [label(tokens) for tokens in (8000, 131_072, 1_048_576)] == ["8k", "128k", "1m"]
