"""What a re-upload reuses, by real ingests of a part of this repository."""

import shutil

import pytest

from engine.model_folder import resolve_model
from loadtests.reupload import measure
from service.prompt import PromptFormat
from service.settings import Settings


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="the repository is read with git")
def test_one_changed_file() -> None:
    prompts = PromptFormat.load(resolve_model("default", cache_dir=Settings().resolved().cache_dir))
    shares = measure(prompts, ("engine/kv_store",))
    assert shares["tokens"] > 30_000
    assert shares["late_share"] > 0.85
    assert shares["first_file_share"] == 0, "what stands first is under everything else: a chain can't spare it"
    assert shares["first_file_again_share"] > 0.85, "it stands last by then"
    assert shares["first_file_again_without_base_share"] == 0
