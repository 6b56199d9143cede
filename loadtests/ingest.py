"""Speed, memory and exactness of ingest. Writes its figures into loadtests/results/summary.json.

python -m loadtests.ingest                              source text, made PDF pages, peak memory, page ranges
python -m loadtests.ingest --source FOLDER              source text of this folder instead of Python's own library
python -m loadtests.ingest --contracts FOLDER           word recall of PDFs against the .txt of the same name
python -m loadtests.ingest --cases FOLDER               runs FOLDER/run_ingest_cases.py and counts what holds
"""

import argparse
import io
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from foreword.ingest_command import default_tokenizer_file
from loadtests.results import write_entry
from service.ingest import IngestOptions, IngestSummary, Kind, Source, ingest

MB = 1e6
SOURCE_BYTES = 8_000_000
PAGES_PER_PDF = 40
NUM_PDFS = 20
RANDOM_PAGES = 1000
WORD = re.compile(r"\w+")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Speed, memory and exactness of ingest")
    parser.add_argument("--source", type=Path, help="folder of source text")
    parser.add_argument("--contracts", type=Path, help="folder of PDFs with .txt files of the same names")
    parser.add_argument("--cases", type=Path, help="folder that holds run_ingest_cases.py")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--only", nargs="*", default=[], choices=["text", "pdf", "memory", "pages", "contracts", "cases"]
    )
    args = parser.parse_args(arguments)
    wanted = set(args.only)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args.repeats)
        steps: list[tuple[str, Callable[[], None]]] = [
            ("text", lambda: bench.source_speed(args.source)),
            ("pdf", bench.pdf_speed),
            ("memory", bench.peak_memory),
            ("pages", bench.page_ranges),
        ]
        if args.contracts:
            steps.append(("contracts", lambda: bench.word_recall(args.contracts)))
        if args.cases:
            steps.append(("cases", lambda: bench.cases(args.cases)))
        for name, step in steps:
            if not wanted or name in wanted:
                step()
    return 0


class Bench:
    def __init__(self, folder: Path, repeats: int) -> None:
        self.folder, self.repeats = folder, repeats
        self.tokenizer_file = default_tokenizer_file()
        self._count = 0

    def _ingest(self, path: Path, kind: Kind, options: IngestOptions | None = None) -> tuple[IngestSummary, Path]:
        self._count += 1
        out = self.folder / f"out{self._count}"
        summary = ingest([Source(path, path.name)], out, kind=kind, tokenizer_file=self.tokenizer_file, options=options)
        return summary, out

    def source_speed(self, source: Path | None) -> None:
        root = source or self._library_copy()
        samples, tokens, busy = [], 0, []
        for _ in range(self.repeats):
            before = _cpu_s()
            summary, out = self._ingest(root, "repo")
            size = (out / "document.txt").stat().st_size
            samples.append(size / MB / summary.seconds)
            busy.append(size / MB / (_cpu_s() - before))
            tokens = summary.num_tokens
            shutil.rmtree(out)
        _record("ingest_mb_per_s", median(samples), "MB/s", "higher", samples, "--only text", tokens=tokens,
                mb_per_cpu_s=round(median(busy), 3))  # fmt: skip

    def _library_copy(self) -> Path:
        """Source text that every machine has: modules of Python's standard library."""
        target = self.folder / "library"
        taken = 0
        for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
            if taken > SOURCE_BYTES or "site-packages" in file.parts:
                continue
            taken += file.stat().st_size
            copy = target / file.relative_to(sysconfig.get_paths()["stdlib"])
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        return target

    def pdf_speed(self) -> None:
        root = self.folder / "pdfs"
        root.mkdir()
        rnd = random.Random(0)
        for number in range(NUM_PDFS):
            (root / f"{number:03d}.pdf").write_bytes(make_pdf([_page_words(rnd) for _ in range(PAGES_PER_PDF)]))
        samples, busy = [], []
        for _ in range(self.repeats):
            before = _cpu_s()
            summary, out = self._ingest(root, "bundle")
            samples.append(NUM_PDFS * PAGES_PER_PDF / summary.seconds)
            busy.append(NUM_PDFS * PAGES_PER_PDF / (_cpu_s() - before))
            shutil.rmtree(out)
        _record("pdf_pages_per_s", median(samples), "pages/s", "higher", samples, "--only pdf",
                pages_per_cpu_s=round(median(busy), 1))  # fmt: skip

    def peak_memory(self) -> None:
        """A tar.gz upload of 1 GB: a large binary, a large data file, and text and PDFs among them."""
        upload = self.folder / "upload.tar"
        rnd = random.Random(0)
        with tarfile.open(upload, "w") as archive:
            noise = os.urandom(1 << 20)
            _add(archive, "weights.bin", (noise for _ in range(700)))
            line = b"".join(b"%d,name %d,%f\n" % (i, i, rnd.random()) for i in range(40_000))
            _add(archive, "data/rows.csv", (line for _ in range(max(1, 230_000_000 // len(line)))))
            text = "\n".join(" ".join(_page_words(rnd)) for _ in range(40)).encode()
            _add(archive, "docs/large.md", (text for _ in range(max(1, 20_000_000 // len(text)))))
            for number in range(10):
                _add(archive, f"docs/{number}.pdf", iter([make_pdf([_page_words(rnd) for _ in range(PAGES_PER_PDF)])]))
        with _MemoryWatch() as watch:
            self._ingest(upload, "repo")
        size = upload.stat().st_size
        upload.unlink()
        _record(
            "ingest_peak_mb",
            watch.peak_bytes / MB,
            "MB",
            "lower",
            [watch.peak_bytes / MB],
            "--only memory",
            upload_bytes=size,
        )

    def page_ranges(self) -> None:
        """Decode the token range of random pages and look for that page's words, and only those."""
        rnd = random.Random(1)
        pages = [_page_words(rnd, f"p{number}x") for number in range(RANDOM_PAGES)]
        root = self.folder / "numbered"
        root.mkdir()
        for start in range(0, RANDOM_PAGES, 200):
            (root / f"{start:05d}.pdf").write_bytes(make_pdf(pages[start : start + 200]))
        _, out = self._ingest(root, "bundle")
        tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        tokens = np.load(out / "tokens.npy")
        rows = [page for row in _manifest(out)["files"] for page in row["pages"]]
        exact = 0
        for words, row in zip(pages, rows, strict=True):
            piece = tokenizer.decode(tokens[row["token_start"] : row["token_end"]].tolist(), skip_special_tokens=False)
            exact += piece.split() == words
        _record(
            "pages_mapped_exactly_share", exact / len(pages), "share", "higher", [exact / len(pages)], "--only pages"
        )

    def word_recall(self, folder: Path) -> None:
        texts = {file.stem.lower(): file for file in folder.rglob("*.txt")}
        pdfs = sorted(
            file for file in folder.rglob("*") if file.suffix.lower() == ".pdf" and file.stem.lower() in texts
        )
        recalls: dict[str, float] = {}
        for start in range(0, len(pdfs), 100):
            recalls |= self._recall_of(pdfs[start : start + 100], texts)
        worst = min(recalls, key=lambda name: recalls[name])
        print(f"{len(recalls)} contracts, worst {worst}: {recalls[worst]:.4f}")
        command = "--only contracts --contracts FOLDER"
        average = mean(recalls.values())
        _record("cuad_word_recall_mean", average, "share", "higher", [average], command, files=len(recalls),
                worst=worst, worst_recall=round(recalls[worst], 4))  # fmt: skip

    def _recall_of(self, pdfs: Sequence[Path], texts: dict[str, Path]) -> dict[str, float]:
        self._count += 1
        out = self.folder / f"out{self._count}"
        sources = [Source(file, f"{index:05d}.pdf") for index, file in enumerate(pdfs)]
        ingest(sources, out, kind="bundle", tokenizer_file=self.tokenizer_file)
        manifest = _manifest(out)
        document, offsets = (out / "document.txt").read_bytes(), np.load(out / "offsets.npy")
        recalls = {}
        for index, file in enumerate(pdfs):
            row = next(r for r in manifest["files"] if r["path"] == f"{index:05d}.pdf")
            found: Counter[str] = Counter()
            if row["status"] == "included":
                text = document[int(offsets[row["token_start"]]) : int(offsets[row["token_end"]])].decode()
                found.update(WORD.findall(text.lower()))
            # A running header stands once in the stream; the manifest tells how often it was left out.
            for line in row.get("running_lines", ()):
                for word in WORD.findall(line["text"].lower()):
                    found[word] += line["times"]
            wanted = Counter(WORD.findall(texts[file.stem.lower()].read_text("utf-8", "replace").lower()))
            recalls[file.name] = sum(min(n, found[w]) for w, n in wanted.items()) / max(1, wanted.total())
        return recalls

    def cases(self, folder: Path) -> None:
        command = f"{sys.executable} -m foreword.ingest_command"
        done = subprocess.run(
            [sys.executable, str(folder / "run_ingest_cases.py"), "--command", command],
            capture_output=True,
            text=True,
            check=False,
        )
        print(done.stdout)
        found = re.search(r"(\d+) of (\d+) cases hold; hard ones: (\d+) of (\d+)", done.stdout)
        if found is None:
            raise SystemExit(f"the cases' runner said nothing of its result: {done.stderr[-500:]}")
        held, total, hard, hard_total = map(int, found.groups())
        _record("cases_ok", held, "cases", "higher", [held], "--only cases --cases FOLDER", of=total)
        _record("cases_hard_ok", hard, "cases", "higher", [hard], "--only cases --cases FOLDER", of=hard_total)


def _record(
    name: str,
    value: float,
    unit: str,
    better: Literal["lower", "higher"],
    samples: Sequence[float],
    flags: str,
    **details: Any,
) -> None:
    print(f"{name}: {value:.4g} {unit} {details or ''}")
    rounded = [round(sample, 4) for sample in samples]
    write_entry(
        name,
        round(value, 4),
        unit,
        better=better,
        samples=rounded,
        command=f"python -m loadtests.ingest {flags}",
        **details,
    )


def _cpu_s() -> float:
    """CPU seconds of ended children: what a machine with other work on it can still measure."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _manifest(out: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((out / "manifest.json").read_text("utf-8"))
    return manifest


def _add(archive: tarfile.TarFile, name: str, blocks: Iterator[bytes]) -> None:
    """A member of unknown length, by way of a temporary file."""
    with tempfile.TemporaryFile(dir=Path(str(archive.name)).parent) as file:
        for block in blocks:
            file.write(block)
        info = tarfile.TarInfo(name)
        info.size = file.tell()
        file.seek(0)
        archive.addfile(info, file)


class _MemoryWatch:
    """Largest sum of the resident sets of all descendants, looked at every 20 ms."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "_MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while not self._done.wait(0.02):
            total = sum(_resident_pages(pid) for pid in _descendants(os.getpid())) * page
            self.peak_bytes = max(self.peak_bytes, total)


def _descendants(pid: int) -> Iterator[int]:
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))
    except OSError:
        return


def _resident_pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0


SYLLABLES = "ten ant land lord pay ment no tice re pair in sur ance ar ti cle sec tion par ty term".split()  # noqa: SIM905


def _page_words(rnd: random.Random, prefix: str = "") -> list[str]:
    """About as many words as a page of a contract has."""
    return [prefix + "".join(rnd.choices(SYLLABLES, k=rnd.randint(1, 4))) for _ in range(420)]


def make_pdf(pages: Sequence[Sequence[str]]) -> bytes:
    """A PDF of pages of words, set in lines of ten."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for words in pages:
        lines = [" ".join(words[at : at + 10]) for at in range(0, len(words), 10)]
        shown = b"".join(
            b"1 0 0 1 40 %d Tm (%s) Tj\n" % (750 - 16 * i, line.encode("latin-1")) for i, line in enumerate(lines)
        )
        stream = b"BT /F1 6 Tf\n" + shown + b"ET"
        kids.append(len(objects) + 1)
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >>"
            b" /Contents %d 0 R >>" % (len(objects) + 2)
        )
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream))
    objects[1] = b"<< /Type /Pages /Count %d /Kids [%s] >>" % (len(kids), b" ".join(b"%d 0 R" % kid for kid in kids))
    out = io.BytesIO(b"%PDF-1.7\n")
    out.seek(0, io.SEEK_END)
    places = []
    for number, body in enumerate(objects, 1):
        places.append(out.tell())
        out.write(b"%d 0 obj\n%s\nendobj\n" % (number, body))
    start = out.tell()
    out.write(b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1))
    out.write(b"".join(b"%010d 00000 n \n" % place for place in places))
    out.write(b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start))
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(main())
