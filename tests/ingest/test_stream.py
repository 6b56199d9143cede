"""The stream's promises: exact text, exact ranges, no control tokens, one order, hashes, the base's order kept."""
# ruff: noqa: PT017 (an error is one of the allowed outcomes)

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from service.ingest import IngestError, IngestLimits
from service.ingest.order import keep_base_order
from service.ingest.token_bytes import TextTokenizer
from tests.ingest.conftest import CONTROL, Document, Read, error_of

ANY_CHARACTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ANY_TEXT = st.lists(
    ANY_CHARACTERS | st.sampled_from(["<|im_start|>", "<think>", "<|", " ", "\n", "1"]), max_size=20
).map("".join)


@given(st.lists(ANY_TEXT, max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_ids_decode_to_their_text_and_never_to_a_control_token(tokenizer_file: Path, texts: list[str]) -> None:
    encoder, plain = TextTokenizer(tokenizer_file), Tokenizer.from_file(str(tokenizer_file))
    control = set(plain.get_added_tokens_decoder())
    for text, ids in zip(texts, encoder.encode(texts), strict=True):
        assert plain.decode(ids.tolist(), skip_special_tokens=False) == text
        assert not control & set(ids.tolist())
        assert int(encoder.lengths[ids].sum()) == len(text.encode())


def test_document_text_is_the_decoded_stream(read: Read, tokenizer_file: Path) -> None:
    files = {
        "a.py": "".join(f"{c}\n" for c in [*CONTROL, "<think>", "</s>", "[INST]"]),
        f"{CONTROL[1]}.txt": "x\n",
        "b.md": "\u05e9\u05dc\u05d5\u05dd \U0001f468\u200d\U0001f469 e\u0301\n",
    }
    document = read(files)
    plain = Tokenizer.from_file(str(tokenizer_file))
    assert plain.decode(document.tokens.tolist(), skip_special_tokens=False) == document.text
    for row in document.manifest["files"]:
        piece = plain.decode(document.tokens[row["token_start"] : row["token_end"]].tolist(), skip_special_tokens=False)
        assert piece == files[row["path"]]
    assert not set(plain.get_added_tokens_decoder()) & set(document.tokens.tolist())
    assert document.tokens.dtype == np.uint32


def test_sentencepiece_style_tokenizers_are_exact_too(read: Read, tmp_path: Path) -> None:
    alphabet = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "\u2581",
        *"abcdefgh",
        "\u2581a",
        "ab",
        "\u2581ab",
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(alphabet)},
            merges=[("\u2581", "a"), ("a", "b"), ("\u2581a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    file = tmp_path / "sentencepiece.json"
    tokenizer.save(str(file))
    body = "ab cab  h\u00e9 <s> </s>\n\tz\n"
    document = read({"a.py": body}, tokenizer=file)
    assert document.body("a.py") == body
    assert tokenizer.decode(document.tokens.tolist(), skip_special_tokens=False) == document.text
    assert not {1, 2} & set(document.tokens.tolist())


def test_tokenizers_that_cannot_be_used_are_refused(read: Read, tmp_path: Path) -> None:
    for content in ("{", json.dumps({"model": {"type": "WordPiece", "vocab": {}}})):
        file = tmp_path / "bad.json"
        file.write_text(content)
        assert error_of(lambda file=file: read({"a.py": "x\n"}, tokenizer=file)) == "unsupported_tokenizer"


def test_a_document_longer_than_allowed_is_refused_early(read: Read) -> None:
    limits = IngestLimits(workers=1, max_tokens=50)
    assert error_of(lambda: read({"a.py": "some words\n" * 100}, limits=limits)) == "document_too_long"


def test_sections_do_not_depend_on_each_other(read: Read) -> None:
    first = read({"a.py": "alpha beta\n", "b.py": "the same words\n"})
    second = read({"a.py": "something else\n", "b.py": "the same words\n"})

    def section(document: Document, path: str) -> list[int]:
        row = document.row(path)
        ids: list[int] = document.tokens[row["section_start"] : row["token_end"]].tolist()
        return ids

    assert section(first, "b.py") == section(second, "b.py")


def test_the_same_input_gives_the_same_bytes(read: Read) -> None:
    files = {f"d{i % 7}/f{i}.py": f"value_{i} = {i}\n" * (i % 50) for i in range(200)}
    one, two = read(files), read(files, limits=IngestLimits(workers=2))
    assert one.tokens.tobytes() == two.tokens.tobytes()
    assert one.manifest["stream_hash"] == two.manifest["stream_hash"]
    assert {**one.manifest, "tokenizer_file": ""} == {**two.manifest, "tokenizer_file": ""}


def test_kind_and_options_are_part_of_the_content_hash(read: Read) -> None:
    files = {"a.txt": "words\n"}
    assert read(files, kind="repo").manifest["content_hash"] != read(files, kind="bundle").manifest["content_hash"]


def test_a_base_keeps_its_order_and_its_tokens(read: Read) -> None:
    licence = "A licence text that is long enough to be told as a copy of another one.\n"
    old = {"a.py": "A = 1\n", "b.py": "B = 1\n", "c.py": "C = 1\n", "l1.txt": licence, "l2.txt": licence}
    base = read(old)
    new = {**old, "a.py": "A = 2\n", "aa.py": "NEW = 1\n"}
    document = read(new, base=base.folder / "manifest.json")
    assert [row["path"] for row in document.manifest["files"]] == ["b.py", "c.py", "l1.txt", "l2.txt", "a.py", "aa.py"]
    without_original = {k: v for k, v in old.items() if k != "l1.txt"}
    moved = read(without_original, base=base.folder / "manifest.json")
    assert [row["path"] for row in moved.manifest["files"]] == ["a.py", "b.py", "c.py", "l2.txt"]
    assert licence in moved.text
    unchanged = read(old, base=base.folder / "manifest.json")
    assert unchanged.tokens.tobytes() == base.tokens.tobytes()
    prefix = read({**old, "zz.py": "Z = 1\n"}, base=base.folder / "manifest.json")
    end = base.row("l2.txt")["section_start"]
    assert prefix.tokens[:end].tolist() == base.tokens[:end].tolist()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["files", "path", "digest", "duplicate_of", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(json_values)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_base_manifest_is_used_or_refused(tmp_path: Path, value: object) -> None:
    file = tmp_path / "base.json"
    file.write_text(json.dumps(value))
    try:
        assert keep_base_order([], file) == []
    except IngestError as error:
        assert error.code == "manifest_invalid"


def test_kinds_are_told_apart(read: Read) -> None:
    assert read({"pkg/a.py": "x\n", "README.md": "y\n"}, kind="auto").manifest["kind"] == "repo"
    assert read({"letter.txt": "x\n", "notes.md": "y\n"}, kind="auto").manifest["kind"] == "bundle"
    assert read(b"words\n", name="a.txt", kind="auto").manifest["kind"] == "doc"


@pytest.mark.parametrize("kind", ["repo", "bundle"])
def test_the_tree_stands_last_and_is_capped(read: Read, kind: str) -> None:
    document = read({f"f{i:04d}.py": "" if i else "x = 1\n" for i in range(2300)}, kind=kind)
    tree = document.manifest["tree"]
    assert tree["token_end"] == document.manifest["num_tokens"]
    listed = document.slice(tree["token_start"], tree["token_end"])
    assert listed.startswith("=== 2300 files ===\n")
    assert listed.endswith("\u2026 and 300 more\n")
