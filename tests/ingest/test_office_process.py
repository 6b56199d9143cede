"""Word 97 files through a real LibreOffice, and without one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from service.ingest import IngestOptions, landlock
from service.ingest import office as office_module
from service.ingest.office import Office
from tests.ingest.conftest import Read
from tests.ingest.makers import W_NAMESPACES, make_doc, make_zip, paragraph

needs_libreoffice = pytest.mark.skipif(Office.find() is None, reason="LibreOffice is not installed")
NUMBERED = '<w:pPr><w:numPr><w:ilvl w:val="0"/><w:numId w:val="1"/></w:numPr></w:pPr>'
NUMBERING = (
    '<w:abstractNum w:abstractNumId="0"><w:lvl w:ilvl="0"><w:start w:val="1"/>'
    '<w:numFmt w:val="decimal"/><w:lvlText w:val="%1."/></w:lvl></w:abstractNum>'
    '<w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>'
)
CHANGED = (
    '<w:p><w:r><w:t xml:space="preserve">The rent is </w:t></w:r>'
    '<w:del w:id="1" w:author="A"><w:r><w:delText>900</w:delText></w:r></w:del>'
    '<w:ins w:id="2" w:author="A"><w:r><w:t>950</w:t></w:r></w:ins></w:p>'
)
PACKAGE = "http://schemas.openxmlformats.org/package/2006"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
WORD = "application/vnd.openxmlformats-officedocument.wordprocessingml"
ROOT = Path(__file__).resolve().parents[2]
WITH_OFFICE = IngestOptions(ocr="off", office="auto")


def complete_docx(body: str) -> bytes:
    """With all the parts that LibreOffice, unlike our reader, insists on."""
    relation = '<Relationship Id="r1" Type="{}" Target="{}"/>'
    relations = f'<Relationships xmlns="{PACKAGE}/relationships">{relation}</Relationships>'
    kinds = {"rels": "application/vnd.openxmlformats-package.relationships+xml", "xml": "application/xml"}
    defaults = "".join(f'<Default Extension="{name}" ContentType="{kind}"/>' for name, kind in kinds.items())
    overrides = "".join(
        f'<Override PartName="/word/{name}.xml" ContentType="{WORD}.{kind}+xml"/>'
        for name, kind in (("document", "document.main"), ("numbering", "numbering"))
    )
    return make_zip(
        {
            "[Content_Types].xml": f'<Types xmlns="{PACKAGE}/content-types">{defaults}{overrides}</Types>',
            "_rels/.rels": relations.format(f"{OFFICE}/officeDocument", "word/document.xml"),
            "word/_rels/document.xml.rels": relations.format(f"{OFFICE}/numbering", "numbering.xml"),
            "word/document.xml": f"<w:document {W_NAMESPACES}><w:body>{body}</w:body></w:document>",
            "word/numbering.xml": f"<w:numbering {W_NAMESPACES}>{NUMBERING}</w:numbering>",
        }
    )


@pytest.fixture(scope="module")
def old_word(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A Word 97 file as LibreOffice writes it: clause numbers and a tracked change."""
    folder = tmp_path_factory.mktemp("word")
    body = paragraph("Scope", NUMBERED) + paragraph("Term", NUMBERED) + CHANGED
    (folder / "input.docx").write_bytes(complete_docx(body))
    office = Office.find()
    assert office is not None
    program = next(found for name in office_module.PROGRAMS if (found := shutil.which(name)))
    profile = f"-env:UserInstallation={(folder / 'profile').as_uri()}"
    command = [program, profile, "--headless", "--convert-to", "doc:MS Word 97", "--outdir", str(folder)]
    subprocess.run([*command, str(folder / "input.docx")], check=True, capture_output=True, timeout=120)
    return (folder / "input.doc").read_bytes()


@needs_libreoffice
def test_numbers_and_changes_of_old_word_files(read: Read, old_word: bytes) -> None:
    document = read(old_word, name="a.doc", kind="doc", options=WITH_OFFICE)
    assert document.body("a.doc").split("\n")[:3] == ["1. Scope", "2. Term", "The rent is 950"]
    assert document.codes() == {"doc_by_libreoffice", "tracked_changes"}
    assert document.row("a.doc")["kind"] == "ole"
    again = read(old_word, name="a.doc", kind="doc", options=WITH_OFFICE)
    assert (again.text, again.summary["content_hash"]) == (document.text, document.summary["content_hash"])
    plain = read(old_word, name="a.doc", kind="doc")
    assert "Scope" in plain.body("a.doc")
    assert "1. Scope" not in plain.body("a.doc")
    assert plain.codes() == {"doc_text_only"}
    assert plain.summary["content_hash"] != document.summary["content_hash"]


@needs_libreoffice
def test_what_libreoffice_cannot_read_our_own_reader_may(
    read: Read, old_word: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = make_doc("Words of a file that lacks most of what makes one.\r")
    document = read(stub, name="a.doc", kind="doc", options=WITH_OFFICE)
    assert "Words of a file" in document.text
    assert document.codes() == {"doc_text_only"}
    monkeypatch.setattr(office_module, "TIMEOUT_S", 0.05)  # no LibreOffice starts in that
    late = read({"a.doc": old_word}, kind="bundle", options=WITH_OFFICE)
    assert "Scope" in late.text
    assert late.codes() == {"doc_text_only"}


@needs_libreoffice
def test_nothing_is_left_of_it(tmp_path: Path, old_word: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office.find()
    assert office is not None
    work = tmp_path / "work"
    work.mkdir()
    (work / "input.doc").write_bytes(old_word)
    assert office.to_docx(work / "input.doc", work / "output.docx")
    assert sorted(p.name for p in work.iterdir()) == ["input.doc", "output.docx"]
    groups: list[int] = []
    popen = subprocess.Popen

    def remember(*arguments: object, **options: object) -> "subprocess.Popen[bytes]":
        process = popen(*arguments, **options)  # type: ignore[call-overload]
        groups.append(process.pid)
        return process  # type: ignore[no-any-return]

    monkeypatch.setattr(office_module, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(subprocess, "Popen", remember)
    assert not office.to_docx(work / "input.doc", work / "late.docx")
    assert sorted(p.name for p in work.iterdir()) == ["input.doc", "output.docx"]
    with pytest.raises(ProcessLookupError):
        os.killpg(groups[0], 0)


PROBE = """
import socket, subprocess, sys
from service.ingest import office_process
def convert(library, folder):
    attempts = [
        lambda: open("/etc/passwd"), lambda: open(folder.parent / "elsewhere", "w"), lambda: subprocess.run(["true"]),
        lambda: socket.socket(), lambda: open(folder / "own", "w"),
    ]
    for attempt in attempts:
        try:
            attempt()
            print("done")
        except PermissionError:
            print("refused")
    return True
office_process.convert = convert
sys.exit(office_process.main())
"""


@pytest.mark.skipif(not landlock.version(), reason="this kernel has no Landlock")
def test_its_process_reaches_nothing_but_its_folder(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", PROBE, "/usr/lib/libreoffice/program/library.so", str(tmp_path / "own")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        outcome = process.stdout.read().split()
    assert outcome == ["refused"] * 4 + ["done"]
    assert process.returncode == 0
