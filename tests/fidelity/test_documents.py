"""The tasks beside RULER's: answers stand where they are said to, exactly once."""

import random
from pathlib import Path

import pytest

from loadtests.fidelity.documents import ALL_TASKS, GROUPS, DocumentMaker, parse_tasks, true_reply
from loadtests.fidelity.filler import in_split
from loadtests.fidelity.sources import load_contracts, load_repository, make_source_document

OWN_TASKS = [task for name, tasks in GROUPS.items() if name != "ruler" for task in tasks]


def count_words(text: str) -> int:
    """A tokenizer for tests: words and single digits."""
    return sum(1 + sum(character.isdigit() for character in word) for word in text.split())


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> DocumentMaker:
    folder = tmp_path_factory.mktemp("contracts")
    rng = random.Random(5)
    for number in range(12):
        lines = []
        for part in range(40):
            term = "".join(rng.choices("abcdefghij", k=8)).title()
            words = " ".join("".join(rng.choices("klmnopqrst", k=5)) for _ in range(12))
            lines += [
                f'"{term}" means {words};',
                f"{number}.{part} Rights of {term}. The parties agree on {words}.",
                "",
            ]
            lines += [f"The first line about {term} that is long enough to be quoted here,", f"and {words}."]
        (folder / f"agreement{number}.txt").write_text("\n".join(lines))
    return DocumentMaker(count_words, folder)


@pytest.mark.parametrize("task", OWN_TASKS)
def test_answers_stand_in_the_document(task: str, maker: DocumentMaker) -> None:
    document = maker.make(task, num_tokens=9000, index=1, num_questions=8)
    assert document.num_tokens == count_words(document.text)
    assert 0.9 * 9000 <= document.num_tokens <= 9000
    assert len({question.text for question in document.questions}) == 8
    flat = " ".join(document.text.split())
    for question in document.questions:
        assert all(" ".join(answer.split()) in flat for answer in question.answers)
        assert question.score(question.answer_prefix + true_reply(document, question)) == 1.0
    again = maker.make(task, num_tokens=9000, index=1, num_questions=8)
    assert again == document
    assert maker.make(task, num_tokens=9000, index=2, num_questions=8).text != document.text


def test_needles_of_the_map_lie_at_even_depths(maker: DocumentMaker) -> None:
    document = maker.make("needle_map", num_tokens=20_000, index=0, num_questions=10)
    depths = [document.text.index(question.answers[0]) / len(document.text) for question in document.questions]
    assert depths == pytest.approx([(i + 0.5) / 10 for i in range(10)], abs=0.04)


def test_a_functions_file_is_the_one_whose_header_stands_before_it(maker: DocumentMaker) -> None:
    document = maker.make("repository_file", num_tokens=12_000, index=3, num_questions=10)
    for question in document.questions:
        name = question.text.split("function ")[1].split()[0]
        before = document.text[: document.text.index(f"def {name}(")]
        assert before.rindex("==> ") == before.rindex(f"==> {question.answers[0]} <==")


def test_repository_text_is_held_out_from_training() -> None:
    files = load_repository()
    assert len(files) > 20
    assert all(in_split(text, "eval") for _, text in files)


def test_all_ruler_tasks_are_made_with_their_true_reply_in_reading_order(maker: DocumentMaker) -> None:
    document = maker.make("niah_multivalue", num_tokens=6000, index=0, num_questions=3)
    for question in document.questions:
        reply = true_reply(document, question)
        assert reply.startswith(" ")
        assert reply.endswith(".")
        places = [document.text.index(answer) for answer in reply.strip(" .").split(", ")]
        assert places == sorted(places)


def test_names_of_tasks() -> None:
    assert parse_tasks("all") == list(ALL_TASKS)
    assert parse_tasks("vt,retrieval,vt") == ["vt", "needle_map", "key_values"]
    with pytest.raises(ValueError, match="unknown task 'needles'"):
        parse_tasks("vt,needles")


def test_too_little_text_and_no_contracts_say_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \.txt or \.md file"):
        load_contracts(tmp_path)
    (tmp_path / "a.txt").write_text("This agreement is short. " * 20)
    with pytest.raises(ValueError, match="tokens of contract text were asked for, there are"):
        make_source_document(
            "contract_terms",
            load_contracts(tmp_path),
            num_tokens=5000,
            seed=0,
            count_tokens=count_words,
            num_questions=2,
        )
    with pytest.raises(ValueError, match="need a folder of contracts"):
        DocumentMaker(count_words).make("contract_terms", num_tokens=500, index=0, num_questions=1)
