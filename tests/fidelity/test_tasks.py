import random

import pytest

from loadtests.fidelity.filler import Filler, in_split, load_filler, prose, split_passages
from loadtests.fidelity.tasks import NOISE, TASKS, Question, TaskDocument, fit, make_document, spread

NUM_TOKENS = 6000


def count_words(text: str) -> int:
    """A tokenizer for tests: words and single digits, about as coarse as a real one."""
    return sum(1 + sum(character.isdigit() for character in word) for word in text.split())


@pytest.fixture(scope="module")
def filler() -> Filler:
    rng = random.Random(0)
    return Filler(["\n\n".join(prose(rng) for _ in range(60)) for _ in range(12)])


def document(task: str, filler: Filler, seed: int = 3, num_questions: int = 10) -> TaskDocument:
    return make_document(
        task,
        num_tokens=NUM_TOKENS,
        seed=seed,
        count_tokens=count_words,
        filler=filler,
        num_questions=num_questions,
    )


@pytest.mark.parametrize("task", TASKS)
def test_document_fills_its_budget_and_never_passes_it(task: str, filler: Filler) -> None:
    made = document(task, filler)
    assert made.num_tokens == count_words(made.text)
    assert 0.97 * NUM_TOKENS <= made.num_tokens <= NUM_TOKENS


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_document_other_seed_other_document(task: str, filler: Filler) -> None:
    assert document(task, filler) == document(task, filler)
    assert document(task, filler).text != document(task, filler, seed=4).text


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_stands_in_the_document_and_scores_one(task: str, filler: Filler) -> None:
    made = document(task, filler)
    assert len(made.questions) == 10
    assert len({question.text for question in made.questions}) == 10
    for question in made.questions:
        assert all(answer in made.text for answer in question.answers)
        assert question.score(f"{question.answer_prefix} {', '.join(question.answers)}.") == 1.0
        assert question.score(question.answer_prefix) == 0.0


@pytest.mark.parametrize(
    ("task", "answers"),
    [
        ("niah_single_1", 1),
        ("niah_single_2", 1),
        ("niah_single_3", 1),
        ("niah_multikey_1", 1),
        ("niah_multikey_2", 1),
        ("niah_multikey_3", 1),
        ("niah_multivalue", 4),
        ("niah_multiquery", 4),
        ("vt", 5),
        ("cwe", 10),
        ("fwe", 3),
    ],
)
def test_number_of_answers_is_rulers(task: str, answers: int, filler: Filler) -> None:
    assert all(len(question.answers) == answers for question in document(task, filler).questions)


@pytest.mark.parametrize(("task", "needles"), [("niah_single_2", 1), ("niah_multikey_1", 4), ("niah_multivalue", 4)])
def test_one_question_gives_rulers_own_needles(task: str, needles: int, filler: Filler) -> None:
    assert document(task, filler, num_questions=1).text.count("One of the special magic") == needles


def test_needle_haystack_is_made_of_other_needles(filler: Filler) -> None:
    made = document("niah_multikey_2", filler)
    assert NOISE not in made.text
    for question in made.questions:
        key = question.text.split(" for ")[1].split(" mentioned")[0]
        assert made.text.count(f" for {key} is: ") == 1


def test_noise_tasks_have_the_noise_haystack(filler: Filler) -> None:
    assert document("niah_single_1", filler).text.count(NOISE) > 100
    assert document("vt", filler).text.count(NOISE) > 100


def test_needles_lie_at_all_depths(filler: Filler) -> None:
    depths = []
    for seed in range(20):
        made = document("niah_single_2", filler, seed=seed)
        depths += [made.text.index(question.answers[0]) / len(made.text) for question in made.questions]
    assert min(depths) < 0.05
    assert max(depths) > 0.95
    assert 0.4 < sum(depths) / len(depths) < 0.6


def test_variable_chains_stand_in_order_and_lead_to_the_value(filler: Filler) -> None:
    made = document("vt", filler)
    for question in made.questions:
        value = question.text.split("the value ")[1].split(" in ")[0]
        lines = [f"VAR {question.answers[0]} = {value}"]
        lines += [f"VAR {b} = VAR {a}" for a, b in zip(question.answers, question.answers[1:], strict=False)]
        places = [made.text.index(line) for line in lines]
        assert places == sorted(places)


def test_common_words_occur_thirty_times_and_all_others_three(filler: Filler) -> None:
    made = document("cwe", filler)
    words = made.text.split("\n", 1)[1].split()[1::2]
    counts = {word: words.count(word) for word in set(words)}
    assert {word for word, count in counts.items() if count == 30} == set(made.questions[0].answers)
    assert set(counts.values()) == {3, 30}


def test_frequent_words_are_the_three_most_frequent_in_order(filler: Filler) -> None:
    made = document("fwe", filler)
    words = [word for word in made.text.split("coded words. ")[-1].split() if word != "..."]
    top = sorted(set(words), key=words.count, reverse=True)[:3]
    assert tuple(top) == made.questions[0].answers


def test_score_is_the_share_of_answers_ignoring_case() -> None:
    question = Question("?", ("ABCDE", "FGHIJ"), "", 10)
    assert question.score("it is abcde") == 0.5
    assert question.score("FGHIJ and ABCDE") == 1.0
    assert question.score("ABCD E") == 0.0


def test_unknown_task_and_too_small_a_budget_say_what_was_expected(filler: Filler) -> None:
    with pytest.raises(ValueError, match="unknown task 'niah'"):
        document("niah", filler)
    with pytest.raises(ValueError, match="a document of 50 tokens was asked for, its needles alone have"):
        make_document("vt", num_tokens=50, seed=0, count_tokens=count_words, filler=filler)
    with pytest.raises(ValueError, match="num_questions must be at least 1, got 0"):
        document("vt", filler, num_questions=0)


def test_fit_handles_pieces_of_very_different_length() -> None:
    pieces = ["word " * (1 if i % 7 else 400) for i in range(2000)]
    text, used = fit(lambda size: "".join(pieces[:size]), 5000, count_words)
    assert used == count_words(text)
    assert 4000 < used <= 5000


def test_spread_keeps_both_orders() -> None:
    pieces = spread(random.Random(1), [f"h{i}" for i in range(30)], ["n0", "n1", "n2"])
    assert [piece for piece in pieces if piece[0] == "h"] == [f"h{i}" for i in range(30)]
    assert [piece for piece in pieces if piece[0] == "n"] == ["n0", "n1", "n2"]


def test_train_and_eval_share_no_text() -> None:
    train, held_out = load_filler("train", max_files=60), load_filler("eval", max_files=15)
    assert not set(train.texts) & set(held_out.texts)
    assert all(in_split(text, "eval") and not in_split(text, "train") for text in held_out.texts)


def test_filler_reads_a_folder_and_refuses_what_is_not_there(tmp_path) -> None:
    (tmp_path / "contract.txt").write_text("This agreement is made on the first day of May. " * 20)
    assert any("This agreement" in text for text in load_filler("all", [tmp_path]).texts)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_filler("all", [tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="split must be one of train, eval, all, got 'test'"):
        load_filler("test")
    with pytest.raises(ValueError, match="at least one text"):
        Filler(["", "\n\n"])


def test_passages_are_short_and_lose_no_line() -> None:
    text = "\n".join(f"line {i} " + "x" * 60 for i in range(50)) + "\n\n\nlast"
    passages = split_passages(text)
    assert max(map(len, passages)) <= 700
    assert "\n".join(passages).split("\n") == [line for line in text.split("\n") if line]
