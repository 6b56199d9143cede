"""What sparse prefill loses against dense attention, task by task, on the real engine.

    python -m loadtests.fidelity --lengths 32768 --fidelities exact,default,fast --documents 20 --questions 10
    python -m loadtests.fidelity --tasks contracts --contracts FOLDER --lengths 65536 --fidelities exact,a_shape
    python -m loadtests.fidelity --fidelities default,fp8_kv,late --lengths 32768  # FP8 KV; when a question is asked
    python -m loadtests.fidelity --report                      # tables and pictures from what was measured before

Every document is prefilled once for each fidelity; its questions come later and are answered from the stored KV. Each
(document, fidelity) is appended to fidelity.jsonl when it is done, and a run that finds it there passes it over.
"""

import argparse
import logging
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from engine.threads import share_cores

share_cores()

from engine.model_folder import resolve_model  # noqa: E402 (threads first)
from loadtests.fidelity import plots, report  # noqa: E402
from loadtests.fidelity.documents import GROUPS, DocumentMaker, parse_tasks  # noqa: E402
from loadtests.fidelity.evaluation import Evaluation  # noqa: E402
from loadtests.fidelity.records import Key, Record, RecordFile  # noqa: E402
from loadtests.fidelity.tasks import TaskDocument  # noqa: E402
from loadtests.fidelity.variants import LATE, MEASURED, Engines, Variant  # noqa: E402
from loadtests.results import command_line  # noqa: E402
from service.prompt import PromptFormat  # noqa: E402

log = logging.getLogger("loadtests.fidelity")
RESULTS = Path(__file__).resolve().parent.parent / "results"
Place = tuple[str, int, int]  # task, length, number of the document
Job = tuple[Place, int, int]  # with the tokens of the document's text and the number of questions
MakeDocuments = Callable[[Sequence[Job]], Iterable[tuple[Place, TaskDocument | str]]]

# The next measurement is expected to take as long as the longest of so many before it: the first ones compile.
_LATELY = 6

_maker: DocumentMaker | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if LATE in options.fidelities and options.in_prompt < 1:
        parser.error(f"--in-prompt: got {options.in_prompt}, but {LATE} asks at least 1 question")
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    log.setLevel(logging.INFO)
    records = RecordFile(options.results / "fidelity.jsonl")
    if not options.report:
        try:
            given = sys.argv[1:] if arguments is None else arguments
            evaluate(options, records, command=command_line("loadtests.fidelity", given))
        except KeyboardInterrupt:
            log.info("stopped; what is done is kept")
    kept = records.newest()
    if not kept:
        log.info("nothing was measured")
        return 1
    table = report.build(kept)
    report.write(table, options.results / "fidelity.json")
    report.write_summary(table, kept, summary=options.results / "summary.json")
    plots.plot_table(table, options.results / "fidelity.png")
    plots.plot_needle_map(table["needle_map"], options.results / "fidelity_needles.png")
    print(report.printed(table), flush=True)
    return 0


def evaluate(options: argparse.Namespace, records: RecordFile, *, command: str) -> None:
    """Measure what is missing, document by document, until everything is there or the time is used.

    Raises ModelError and what the engine raises.
    """
    deadline = time.monotonic() + options.budget_s
    folder = Path(tempfile.mkdtemp(prefix="foreword-fidelity-", dir=options.kv_dir))
    try:
        model = resolve_model(options.model, cache_dir=options.cache_dir)
        prompts = PromptFormat.load(model)
        maker = DocumentMaker(lambda text: len(prompts.tokenizer.encode(text)), options.contracts)
        # Before the engine: forked workers inherit neither its threads nor a device.
        with document_makers(maker, sorted({place[0] for place in plan(options)}), options.workers) as make:
            engines = Engines(model, folder, device=options.device, dtype=options.dtype, threads=options.threads)
            evaluation = Evaluation(engines, prompts, late_questions=options.in_prompt, command=command)
            measure_missing(evaluation, make, records, options, deadline)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_missing(
    evaluation: Evaluation, make: MakeDocuments, records: RecordFile, options: argparse.Namespace, deadline: float
) -> None:
    """Each record is kept as soon as it is there. The time is up where the next one would probably not fit."""
    variants = [Variant.named(name) for name in options.fidelities]

    def missing(place: Place) -> list[tuple[Variant, Key]]:
        task, length, index = place
        keys = [
            (variant, evaluation.key(variant, task=task, length=length, questions=options.questions, index=index))
            for variant in variants
        ]
        return [(variant, key) for variant, key in keys if key not in records]

    places = [place for place in plan(options) if missing(place)]
    log.info("%d documents to measure on %s", len(places), evaluation.device(variants[0]))
    lately: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_LATELY))  # seconds, by length
    jobs = [(place, evaluation.document_tokens(place[1]), options.questions) for place in places]
    for place, document in make(jobs):
        if isinstance(document, str):
            log.info("passed over: %s", document)
            continue
        for variant, key in missing(place):
            started = time.monotonic()
            if started + max(lately[place[1]], default=0.0) > deadline:
                log.info("the time is used up; the same command goes on from here")
                return
            records.append(evaluation.measure(document, key, variant))
            lately[place[1]].append(time.monotonic() - started)
            log.info("%s", _line(records.records[-1]))


def plan(options: argparse.Namespace) -> Iterator[Place]:
    """One document of every cell before the second of any, so that a run cut short is even.

    The contract tasks are left out without a folder of contracts.
    """
    for index in range(options.documents):
        for length in options.lengths:
            for task in options.tasks:
                if task not in GROUPS["contracts"] or options.contracts is not None:
                    yield task, length, index


@contextmanager
def document_makers(maker: DocumentMaker, tasks: Sequence[str], workers: int) -> Iterator[MakeDocuments]:
    """Makes each job's document, or says why there is none; `workers` processes make them ahead of their use."""
    global _maker
    _maker = maker
    if workers == 0:
        yield partial(map, _make)
        return
    maker.load(tasks)
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield partial(pool.imap, _make)
        pool.terminate()


def _make(job: Job) -> tuple[Place, TaskDocument | str]:
    (task, length, index), num_tokens, num_questions = job
    assert _maker is not None
    try:
        made = _maker.make(task, num_tokens=num_tokens, index=index, num_questions=num_questions)
    except ValueError as error:
        return (task, length, index), f"{task} at {length} tokens: {error}"
    return (task, length, index), made


def _line(record: Record) -> str:
    key, recall = record.key, record.recall
    kept = f", recall {recall['mean']:.3f} (worst {recall['worst']:.3f})" if recall else ""
    return (
        f"{key.tokens} {key.task} #{key.index} {record.variant}: score {sum(record.scores) / len(record.scores):.3f}, "
        f"NLL {sum(record.nlls) / len(record.nlls):.3f}, density {record.density:.2f}{kept}, "
        f"prefill {record.prefill_s:.2f} s, answers {record.answer_s:.2f} s"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=_listed(int), default=[32768], help="tokens of document, question and reply")
    parser.add_argument(
        "--tasks", type=_explained(parse_tasks), default="all", help=f"all, {', '.join(GROUPS)}, or tasks by name"
    )
    parser.add_argument(
        "--fidelities", type=_explained(_listed(_variant_name)), default="exact,default,fast", help=", ".join(MEASURED)
    )
    parser.add_argument("--documents", type=int, default=20, help="of each task and length")
    parser.add_argument("--questions", type=int, default=10, help="asked of each document, later")
    parser.add_argument("--in-prompt", type=int, default=2, help="of them asked by `late`, in the prompt and later")
    parser.add_argument("--contracts", type=Path, help="folder of contracts (.txt, .md) for the contract tasks")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="stop cleanly after so many seconds")
    parser.add_argument("--model", default="default", help="default, a Hugging Face folder or a hub id")
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/foreword").expanduser())
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="processes that make documents ahead")
    parser.add_argument("--kv-dir", type=Path, help="where the KV of one document at a time lies; a temporary folder")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of fidelity.jsonl and what is made of it")
    parser.add_argument("--report", action="store_true", help="measure nothing, only make the tables")
    return parser


def _listed(one: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [one(item) for item in text.split(",")]


def _explained(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse drops a ValueError's text, and keeps an ArgumentTypeError's."""

    def explained(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return explained


def _variant_name(name: str) -> str:
    return Variant.named(name).name


if __name__ == "__main__":
    sys.exit(main())
