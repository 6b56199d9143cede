import io
import os
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest
import zstandard

from service.ingest import IngestLimits
from tests.ingest.conftest import Read, error_of
from tests.ingest.makers import make_tar, make_zip, tar_link

FILES = {"b/two.py": "TWO = 2\n", "a/one.py": "ONE = 1\n", "readme.txt": "words\n", "Z.txt": "zed\n"}


def test_same_files_in_any_container_give_the_same_document(read: Read, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    backwards = dict(reversed(FILES.items()))
    containers = [
        make_zip(FILES),
        make_zip(backwards, compression=zipfile.ZIP_STORED),
        make_zip(FILES, compression=zipfile.ZIP_LZMA),
        *(make_tar(backwards, mode) for mode in ("w", "w:gz", "w:bz2", "w:xz")),
        zstandard.compress(make_tar(FILES)),
        folder,
    ]
    documents = [read(content) for content in containers]
    assert len({d.manifest["content_hash"] for d in documents}) == 1
    assert len({d.text for d in documents}) == 1
    assert len({d.tokens.tobytes() for d in documents}) == 1
    other = read({**FILES, "Z.txt": "zee\n"})
    assert other.manifest["content_hash"] != documents[0].manifest["content_hash"]


def test_bombs_are_refused_while_they_inflate(read: Read) -> None:
    block = make_zip({"zeros": bytes(8 << 20)})
    assert error_of(lambda: read(make_zip({"big.txt": b"0" * (80 << 20)}))) == "archive_bomb"
    nested = make_zip({f"{i}.zip": make_zip({f"{j}.zip": block for j in range(4)}) for i in range(4)})
    assert error_of(lambda: read(nested, kind="bundle")) == "archive_bomb"
    small = IngestLimits(workers=1, max_unpacked_bytes=1000)
    assert error_of(lambda: read({"a.txt": os.urandom(2000).hex()}, limits=small)) == "archive_bomb"


def test_a_zip_that_lies_about_sizes_yields_no_more_than_it_declares(read: Read) -> None:
    data = bytearray(make_zip({"a.txt": "x" * 5000, "ok.txt": "fine\n"}))
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = (10).to_bytes(4, "little")
    document = read(bytes(data))
    assert document.reasons() == {"a.txt": "entry_corrupt"}


@pytest.mark.parametrize(
    "name", ["../evil.txt", "/tmp/evil.txt", "a/../../evil.txt", "C:\\evil.txt", "\\\\host\\evil.txt", "..\\evil.txt"]
)
def test_paths_out_of_the_archive_refuse_it(read: Read, name: str) -> None:
    files = {"good.txt": "good\n", name: "EVIL\n"}
    assert error_of(lambda: read(make_zip(files))) == "archive_unsafe_path"
    assert error_of(lambda: read(make_tar(files))) == "archive_unsafe_path"


def test_backslashes_of_old_windows_tools_are_separators(read: Read) -> None:
    assert "=== folder/a.txt ===" in read(make_zip({"folder\\a.txt": "x\n"})).text


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_cut_off_archives_are_corrupt(read: Read, mode: str) -> None:
    data = make_tar({f"{i}.txt": os.urandom(3000).hex() for i in range(6)}, mode)
    assert error_of(lambda: read(data[: len(data) // 2])) == "archive_corrupt"
    whole = make_tar({"a.txt": "a\n", "b.txt": "b\n"})
    assert error_of(lambda: read(whole[:1024])) == "archive_corrupt"  # cut between two members
    damaged = bytearray(whole)
    damaged[1024 + 10] ^= 0xFF  # the second header
    assert error_of(lambda: read(bytes(damaged))) == "archive_corrupt"
    packed = make_zip({"a.txt": os.urandom(3000).hex()})
    assert error_of(lambda: read(packed[: len(packed) // 2])) == "archive_corrupt"


def test_a_damaged_entry_costs_itself(read: Read) -> None:
    data = bytearray(make_zip({"bad.txt": "BAD" * 50, "good.txt": "good\n"}, compression=zipfile.ZIP_STORED))
    data[data.index(b"BADBAD")] ^= 1
    document = read(bytes(data))
    assert document.reasons() == {"bad.txt": "entry_corrupt"}
    assert "entry_corrupt" in document.codes()
    assert "ADBAD" not in document.text


def _encrypted(files: dict[str, str]) -> bytes:
    """Flags the named entries as encrypted, in both headers: what a reader without the password can tell."""
    data = bytearray(make_zip(files, compression=zipfile.ZIP_STORED))
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.find(signature)
        while at >= 0:
            if b"secret" in data[at : at + 60]:
                data[at + flags] |= 1
            at = data.find(signature, at + 4)
    return bytes(data)


def test_encrypted_entries_are_told_and_all_of_them_refuse(read: Read) -> None:
    document = read(_encrypted({"secret.txt": "HIDDEN", "open.txt": "open\n"}), kind="bundle")
    assert document.reasons() == {"secret.txt": "entry_encrypted"}
    assert "entry_encrypted" in document.codes()
    assert error_of(lambda: read(_encrypted({"secret.txt": "HIDDEN"}), kind="bundle")) == "archive_encrypted"


def test_links_and_devices_are_named_and_never_opened(read: Read) -> None:
    fifo, device = tarfile.TarInfo("pipe"), tarfile.TarInfo("null")
    fifo.type, device.type = tarfile.FIFOTYPE, tarfile.CHRTYPE
    extra = [
        tar_link("passwd", "/etc/passwd"),
        tar_link("loop", "loop"),
        tar_link("alias.txt", "real.txt", tarfile.LNKTYPE),
        tar_link("outside.txt", "/etc/passwd", tarfile.LNKTYPE),
        fifo,
        device,
    ]
    document = read(
        make_tar({"real.txt": "REAL body of the file, long enough to be told as a copy of another\n"}, extra=extra)
    )
    reasons = document.reasons()
    assert reasons == {
        "passwd": "symlink",
        "loop": "symlink",
        "outside.txt": "link_target_missing",
        "pipe": "special_file",
        "null": "special_file",
    }
    assert document.row("real.txt")["duplicate_of"] == "alias.txt"
    assert "root:x:0" not in document.text
    assert "passwd -> /etc/passwd" in document.text


def test_a_zip_can_hold_symlinks(read: Read) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        link = zipfile.ZipInfo("link")
        link.create_system, link.external_attr = 3, 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr("a.txt", "a\n")
    assert read(out.getvalue()).reasons() == {"link": "symlink"}


def test_the_later_of_two_entries_of_one_name_wins(read: Read) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.txt", "FIRST\n")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("a.txt", "SECOND\n")
    document = read(out.getvalue())
    assert document.body("a.txt") == "SECOND\n"
    assert "duplicate_path" in document.codes()


def test_limits_and_containers_that_are_not_read(read: Read) -> None:
    few = IngestLimits(workers=1, max_entries=5)
    assert error_of(lambda: read({f"{i}.txt": "x" for i in range(6)}, limits=few)) == "too_many_entries"
    assert error_of(lambda: read(make_tar({f"{i}.txt": "x" for i in range(6)}), limits=few)) == "too_many_entries"
    for magic in (b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a\x07\x00"):
        assert error_of(lambda magic=magic: read(magic + bytes(40))) == "unsupported_archive"
    assert error_of(lambda: read(b"")) == "empty_input"
    assert error_of(lambda: read(make_zip({}))) == "empty_input"
    assert error_of(lambda: read({"a.bin": bytes(range(256)) * 20, "b.bin": bytes(200)})) == "no_text"


def test_names_are_told_as_they_were_meant(read: Read) -> None:
    def raw_zip(name: bytes) -> bytes:
        placeholder = b"N" * len(name)
        return make_zip({placeholder.decode(): "x\n"}).replace(placeholder, name)

    assert "=== Vertr\xe4ge.txt ===" in read(raw_zip("Vertr\xe4ge.txt".encode("cp437")), kind="bundle").text
    assert "=== \u65e5\u672c.txt ===" in read(raw_zip("\u65e5\u672c.txt".encode()), kind="bundle").text
    assert (
        "=== \u5951\u7d04\u66f8.txt ===" in read(raw_zip("\u5951\u7d04\u66f8.txt".encode("cp932")), kind="bundle").text
    )
    assert "=== caf\xe9.txt ===" in read(make_zip({"caf\xe9.txt": "x\n"}), kind="bundle").text


def test_names_cannot_forge_headers_or_move_the_cursor(read: Read) -> None:
    names = [
        "new\nline.py",
        "esc\x1b[31m.py",
        "rtl\u202egnp.py",
        "bad\udce9.py",
        "-dash.py",
        "q'uote\".py",
        "x" * 240 + ".py",
    ]
    document = read(make_tar({name: f"BODY{i}\n" for i, name in enumerate(names)}))
    assert all(f"BODY{i}\n" in document.text for i in range(len(names)))
    headers = [line for line in document.text.split("\n") if line.startswith("=== ")]
    assert len(headers) == len(names) + 1
    assert not any(c in document.text for c in "\x1b\u202e\udce9")
    assert document.row("new\\nline.py")["status"] == "included"


def test_deep_trees_and_litter(read: Read) -> None:
    deep = "/".join(["d"] * 150) + "/deep.py"
    document = read(
        {
            deep: "DEEP = 1\n",
            "__MACOSX/._x": "junk",
            ".DS_Store": "junk",
            "Thumbs.db": "junk",
            "docs/~$lock.docx": "junk",
            ".git/config": "x",
        }
    )
    assert [row["path"] for row in document.manifest["files"]] == [deep]


def test_bundles_open_nested_archives_and_say_where_things_were(read: Read) -> None:
    inner = make_zip({"letter.txt": "LETTER\n", "deeper.tar.gz": make_tar({"x.txt": "DEEPER\n"}, "w:gz")})
    document = read(
        {"a.zip": inner, "notes.txt.gz": zlib.compress(b"NOTES\n", wbits=31), "broken.zip": b"PK\x03\x04" + bytes(50)},
        kind="bundle",
    )
    assert document.body("a.zip!/letter.txt") == "LETTER\n"
    assert document.body("a.zip!/deeper.tar.gz!/x.txt") == "DEEPER\n"
    assert document.body("notes.txt.gz!/notes.txt") == "NOTES\n"
    assert document.reasons()["broken.zip"] == "archive_corrupt"
    in_repository = read({"fixture.zip": inner, "a.py": "x = 1\n"}, kind="repo")
    assert in_repository.reasons() == {"fixture.zip": "archive"}


def test_what_a_file_is_goes_by_its_bytes(read: Read) -> None:
    assert "good" in read(make_tar({"a.txt": "good\n"}, "w:gz"), name="really.zip").text
    old_tar = bytearray(make_tar({"a.txt": "good\n"}))
    assert "good" in read(bytes(old_tar), name="noname").text


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_file_without_a_name_is_not_lost(read: Read) -> None:
    for name in ("\0", "./."):
        document = read({"a.txt": "NAMED\n", name: "UNNAMED\n"}, kind="bundle")
        assert document.body("unnamed") == "UNNAMED\n"
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("./")
        member.size, member.type = 3, tarfile.REGTYPE
        archive.addfile(member, io.BytesIO(b"abc"))
    assert read(out.getvalue(), name="a.tar", kind="bundle").row("unnamed")["bytes"] == 3
