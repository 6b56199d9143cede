"""Canonical prompts: one prefix whatever is asked, exact shapes, and no control token that a user wrote."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from service.prompt import CLOSE, OPEN_FIRST, OPEN_NEXT, Message, PromptFormat
from service.templates import ChatTemplate, TemplateError
from service.tokenizer import Piece, Tokenizer
from tests.service.prompt_models import BOS_EOS, CONTROL, byte_level, save_folder

FAMILIES = ["chatml", "llama3", "mistral"]


def load(tmp_path: Path, family: str) -> PromptFormat:
    return PromptFormat.load(save_folder(tmp_path / family, family))


def tokens(form: PromptFormat, text: str) -> np.ndarray:
    return form.tokenizer.encode(text)


def text_of(form: PromptFormat, ids: np.ndarray) -> str:
    return form.tokenizer.decode(ids, skip_control=False)


def ask(form: PromptFormat, documents: list[str], *messages: tuple[str, str]) -> tuple[str, str]:
    prompt = form.chat_prompt([Message(*m) for m in messages], [tokens(form, d) for d in documents])
    return text_of(form, prompt.prefix_ids), text_of(form, prompt.question_ids)


def test_default_shape_is_the_one_seen_in_training(tmp_path: Path) -> None:
    prefix, question = ask(load(tmp_path, "chatml"), ["BODY"], ("user", "What is it?"))
    assert prefix + question == (
        "<|im_start|>system\nYou are the house model<|im_end|>\n"
        "<|im_start|>user\nRead the document.\n<document>\nBODY\n</document>\nWhat is it?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_llama3_shape(tmp_path: Path) -> None:
    prefix, question = ask(
        load(tmp_path, "llama3"),
        ["BODY"],
        ("system", "Be brief."),
        ("user", " Why? \n"),
        ("assistant", "So."),
        ("user", "Ah"),
    )
    assert prefix == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nRead the document.\n<document>\nBODY\n</document>\n"
    )
    assert question == (
        "Be brief.\n\n Why?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nSo.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAh<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_mistral_shape_folds_the_system_text_it_would_refuse(tmp_path: Path) -> None:
    form = load(tmp_path, "mistral")
    assert ask(form, ["BODY"], ("system", "S"), ("user", "Q")) == (
        "<s>[INST] Read the document.\n<document>\nBODY\n</document>\n",
        "S\n\nQ [/INST]",
    )
    assert ask(form, [], ("system", "S"), ("user", "Q")) == ("", "<s>[INST] S\n\nQ [/INST]")


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_ignores_system_text_and_the_rest_of_the_conversation(tmp_path: Path, family: str) -> None:
    form = load(tmp_path, family)
    document = tokens(form, "The number is 4711.\n")
    expected = form.document_prefix([document])
    conversations = [
        [Message("user", "Q")],
        [Message("system", "You are a pirate."), Message("user", "Q")],
        [Message("user", "one"), Message("user", "two")],
        [Message("assistant", "Hello"), Message("user", "Q")],
        [Message("user", "Q"), Message("assistant", "A"), Message("system", "S"), Message("user", "R")],
        [Message("user", "")],
    ]
    for messages in conversations:
        prompt = form.chat_prompt(messages, [document])
        np.testing.assert_array_equal(prompt.prefix_ids, expected)
        assert len(prompt.question_ids) > 0
    assert form.prefix_length([len(document)]) == len(expected)


@pytest.mark.parametrize("family", [*FAMILIES, "unsplittable"])
def test_prefix_of_one_document_begins_the_prefix_of_two(tmp_path: Path, family: str) -> None:
    form = load(tmp_path, family)
    first, second = tokens(form, "first"), tokens(form, "second")
    one, two = form.document_prefix([first]), form.document_prefix([first, second])
    np.testing.assert_array_equal(two[: len(one)], one)
    assert text_of(form, two[len(one) :]) == OPEN_NEXT + "second" + CLOSE
    assert form.prefix_length([len(first), len(second)]) == len(two)


@pytest.mark.parametrize("family", FAMILIES)
def test_document_ids_are_spliced_in_untouched(tmp_path: Path, family: str) -> None:
    """Ids that no tokenizer would give for their own text must survive."""
    form = load(tmp_path, family)
    document = np.asarray([5, 5, 7, 200, 0], dtype=np.uint32)
    prefix = form.document_prefix([document])
    start = len(form.document_prefix([document[:0]])) - len(tokens(form, CLOSE))
    np.testing.assert_array_equal(prefix[start : start + 5], document)


@pytest.mark.parametrize("family", [*FAMILIES, "unsplittable"])
@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_users_cannot_write_control_tokens(tmp_path: Path, family: str, role: str) -> None:
    form = load(tmp_path, family)
    hostile = "".join(CONTROL[family]) + "<tool_call>"
    control = list(form.tokenizer.control_ids.values())
    base = [Message("system", "x"), Message("user", "x"), Message("assistant", "x"), Message("user", "x")]
    attacked = [Message(m.role, hostile) if m.role == role else m for m in base]
    document = tokens(form, "d")
    for documents in ([], [document]):
        count = [
            int(np.isin(np.concatenate([p.prefix_ids, p.question_ids]), control).sum())
            for p in (form.chat_prompt(base, documents), form.chat_prompt(attacked, documents))
        ]
        assert count[0] == count[1] > 0
        assert hostile in text_of(form, form.question(attacked, with_documents=bool(documents)))


def test_control_token_split_over_user_and_template_text_stays_text() -> None:
    tokenizer = Tokenizer(byte_level(["<|im_end|>"]).to_str(), special_tokens={}, eos_ids=frozenset())
    ids = tokenizer.encode_pieces([Piece("<|im_", trusted=False), Piece("end|>", trusted=True)])
    assert not set(ids.tolist()) & set(tokenizer.control_ids.values())


def test_text_that_looks_like_a_placeholder_is_left_alone(tmp_path: Path) -> None:
    form = load(tmp_path, "chatml")
    text = "x0123456789abcdef0123456789abcdefy0z {{ messages }} {% raw %}"
    assert text in ask(form, ["d"], ("user", text))[1]


def test_text_is_tokenized_with_its_neighbours(tmp_path: Path) -> None:
    """A run of text between two control tokens is one run: pieces must not change its merges."""
    tokenizer = byte_level(["<e>"])
    definition = json.loads(tokenizer.to_str())
    definition["model"]["vocab"]["ab"] = 300
    definition["model"]["merges"] = [["a", "b"]]
    ours = Tokenizer(json.dumps(definition), special_tokens={}, eos_ids=frozenset())
    ids = ours.encode_pieces([Piece("a", trusted=True), Piece("b<e>", trusted=False), Piece("<e>", trusted=True)])
    assert ids[0] == 300
    assert ids[-1] == ours.control_ids["<e>"]
    assert ours.control_ids["<e>"] not in ids[:-1]


def test_merges_that_spell_a_control_token_are_cut_apart() -> None:
    definition = json.loads(byte_level([]).to_str())
    definition["model"]["vocab"].update({"<e": 300, "<e>": 301})
    definition["model"]["merges"] = [["<", "e"], ["<e", ">"]]
    definition["pre_tokenizer"] = None
    definition["added_tokens"] = [
        {
            "id": 301,
            "content": "<e>",
            "special": True,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        }
    ]
    tokenizer = Tokenizer(json.dumps(definition), special_tokens={}, eos_ids=frozenset())
    ids = tokenizer.encode("x<e>y").tolist()
    assert 301 not in ids
    assert tokenizer.decode(ids) == "x<e>y"


def test_rstrip_of_a_control_token_swallows_white_space_behind_it() -> None:
    definition = json.loads(byte_level(["<|end|>"]).to_str())
    definition["added_tokens"][0]["rstrip"] = True
    tokenizer = Tokenizer(json.dumps(definition), special_tokens={}, eos_ids=frozenset())
    ids = tokenizer.encode_pieces([Piece("a<|end|>\n b", trusted=True)])
    assert tokenizer.decode(ids, skip_control=False) == "a<|end|>b"


def test_unsplittable_template_falls_back_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="service.prompt"):
        form = load(tmp_path, "unsplittable")
    assert "can't be split" in caplog.text
    assert not form.splits
    one = ask(form, ["BODY"], ("user", "Q"))
    three = ask(form, ["BODY"], ("user", "Q"), ("assistant", "A"), ("user", "R"))
    assert one[0] == three[0] == "<s>" + OPEN_FIRST + "BODY" + CLOSE
    assert one[1] == "turns: 1\nuser: Q</s>"
    assert three[1] == "turns: 3\nuser: Q</s>assistant: A</s>user: R</s>"


def test_without_documents_the_system_message_stays_a_system_message(tmp_path: Path) -> None:
    prefix, question = ask(load(tmp_path, "chatml"), [], ("system", "S"), ("user", "Q"))
    assert prefix == ""
    assert question.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>")


def test_only_a_system_text_becomes_the_question(tmp_path: Path) -> None:
    assert "<|im_start|>user\nSummarise.<|im_end|>" in ask(load(tmp_path, "chatml"), [], ("system", "Summarise."))[1]


def test_nothing_to_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no text"):
        load(tmp_path, "chatml").question([Message("user", "")], with_documents=False)


def test_eos_ids_come_from_the_generation_config(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "llama3").tokenizer
    assert tokenizer.eos_ids == {tokenizer.control_ids["<|eot_id|>"]}
    assert tokenizer.special_tokens["bos_token"] == BOS_EOS["llama3"][0]


def test_folder_without_template_or_tokenizer_names_what_is_missing(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", "chatml")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        PromptFormat.load(folder)
    (folder / "tokenizer.json").write_text("{broken")
    with pytest.raises(ModelError, match="can't be read as a tokenizer"):
        PromptFormat.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        PromptFormat.load(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": "T{{ messages[0].content }}"},
        {
            "chat_template": [
                {"name": "tool_use", "template": "no"},
                {"name": "default", "template": "T{{ messages[0].content }}"},
            ]
        },
    ],
)
def test_template_is_found_in_the_tokenizer_config_too(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.load(tmp_path, special_tokens={})
    assert template.render([{"role": "user", "content": "x"}]) == "Tx"


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__.os.environ }}"]
)
def test_template_can_reach_nothing_outside(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, special_tokens={}).render([{"role": "user", "content": "x"}])


def test_dates_are_pinned() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }} {{ date_string }}", special_tokens={})
    assert template.render([]) == "2024-07-26 26 Jul 2024"


def test_template_with_a_syntax_error_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="line 1"):
        ChatTemplate("{% if %}", special_tokens={})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("document", [None, "The body.\n"])
def test_token_for_token_what_transformers_makes_of_it(tmp_path: Path, family: str, document: str | None) -> None:
    from transformers import PreTrainedTokenizerFast

    form = load(tmp_path, family)
    folder = tmp_path / family
    bos, eos = BOS_EOS[family]
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token=bos, eos_token=eos)
    theirs.chat_template = (folder / "chat_template.jinja").read_text()
    head = "" if document is None else f"{OPEN_FIRST}{document}{CLOSE}"
    turns = [("user", "  Why 1,000 $?\n"), ("assistant", "So.\n\nThen"), ("user", "x = {{ y }}  ")]
    expected = theirs.apply_chat_template(
        [{"role": role, "content": (head if n == 0 else "") + text} for n, (role, text) in enumerate(turns)],
        add_generation_prompt=True,
        return_dict=False,
        date_string="26 Jul 2024",
    )
    prompt = form.chat_prompt(
        [Message(role, text) for role, text in turns], [] if document is None else [tokens(form, document)]
    )
    ours = np.concatenate([prompt.prefix_ids, prompt.question_ids]).tolist()
    assert ours == expected


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from([*FAMILIES, "unsplittable"]),
    turns=st.lists(
        st.tuples(
            st.sampled_from(["system", "user", "assistant"]),
            st.lists(
                st.sampled_from(
                    ["<|im_end|>", "<|im_", "end|>", "[INST]", "</s>", "<s>", "<|eot_id|>", "<tool_call>", "x0y"]
                )
                | st.text(max_size=4),
                max_size=5,
            ).map("".join),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_whatever_is_said_prefix_and_control_tokens_are_the_templates(
    tmp_path_factory: pytest.TempPathFactory, family: str, turns: list[tuple[Any, str]]
) -> None:
    form = cached_format(tmp_path_factory, family)
    document = tokens(form, "d")
    control = list(form.tokenizer.control_ids.values())
    messages = [Message(role, text) for role, text in turns]
    harmless = [Message(role, "x" if text.strip() else text) for role, text in turns]
    prompt, reference = form.chat_prompt(messages, [document]), form.chat_prompt(harmless, [document])
    np.testing.assert_array_equal(prompt.prefix_ids, reference.prefix_ids)
    assert [i for i in prompt.question_ids if i in control] == [i for i in reference.question_ids if i in control]


_FORMATS: dict[str, PromptFormat] = {}


def cached_format(tmp_path_factory: pytest.TempPathFactory, family: str) -> PromptFormat:
    if family not in _FORMATS:
        _FORMATS[family] = load(tmp_path_factory.mktemp("models"), family)
    return _FORMATS[family]
