"""Small inputs made by code: archives, PDFs, office documents, compound files."""
# ruff: noqa: E501 (inputs are written as they stand in files)

import io
import tarfile
import zipfile
from collections.abc import Mapping, Sequence

Files = Mapping[str, bytes | str]


def as_bytes(content: bytes | str) -> bytes:
    return content.encode() if isinstance(content, str) else content


def make_zip(files: Files, *, compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), as_bytes(content), compression)
    return out.getvalue()


def make_tar(files: Files, mode: str = "w", *, extra: Sequence[tarfile.TarInfo] = ()) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(as_bytes(content))
            archive.addfile(info, io.BytesIO(as_bytes(content)))
        for info in extra:
            archive.addfile(info)
    return out.getvalue()


def tar_link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


# --- PDF -------------------------------------------------------------------------------------------------------


def text_at(x: float, y: float, words: str, *, size: float = 12, matrix: str = "1 0 0 1", before: str = "") -> str:
    escaped = words.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
    return f"BT /F1 {size} Tf {before} {matrix} {x} {y} Tm ({escaped}) Tj ET\n"


def make_pdf(
    pages: Sequence[str],
    *,
    page_extra: Mapping[int, str] | None = None,
    catalog: str = "",
    objects: Sequence[str] = (),
    image: bool = False,
    xref_shift: int = 0,
) -> bytes:
    """A PDF of content streams, Helvetica as /F1, with `image` a grey picture as /I1. Further `objects` are numbered from
    10; pages from 100, their contents from 1100."""
    numbers = range(100, 100 + len(pages))
    body: dict[int, bytes] = {
        1: f"<< /Type /Catalog /Pages 2 0 R {catalog} >>".encode(),
        2: f"<< /Type /Pages /Count {len(pages)} /Kids [{' '.join(f'{n} 0 R' for n in numbers)}] >>".encode(),
        3: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    }
    resources = "/Font << /F1 3 0 R >>"
    if image:
        body[4] = (
            b"<< /Type /XObject /Subtype /Image /Width 2 /Height 2 /ColorSpace /DeviceGray /BitsPerComponent 8 /Length 4 >>\n"
            b"stream\n\x80\x90\xa0\xb0\nendstream"
        )
        resources += " /XObject << /I1 4 0 R >>"
    for index, value in enumerate(objects):
        body[10 + index] = value.encode("latin-1")
    for index, content in enumerate(pages):
        extra = (page_extra or {}).get(index, "")
        body[100 + index] = (
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << {resources} >>"
            f" /Contents {1100 + index} 0 R {extra} >>"
        ).encode()
        stream = content.encode("latin-1")
        body[1100 + index] = b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream)
    out = bytearray(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n")
    offsets = {}
    for number in sorted(body):
        offsets[number] = len(out)
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body[number])
    start = len(out)
    out += b"xref\n"
    for number in sorted(body):
        out += b"%d 1\n%010d 00000 n \n" % (number, offsets[number] + xref_shift)
    out += b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (max(body) + 1, start + xref_shift)
    return bytes(out)


# --- office ----------------------------------------------------------------------------------------------------

W_NAMESPACES = (
    'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    ' xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
)
CONTENT_TYPES = '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"/>'


def paragraph(words: str, properties: str = "") -> str:
    return f'<w:p>{properties}<w:r><w:t xml:space="preserve">{words}</w:t></w:r></w:p>'


def make_docx(body: str, **parts: str) -> bytes:
    """`parts`: further parts of word/, by name without suffix; their XML without the root's namespaces."""
    files = {
        "[Content_Types].xml": CONTENT_TYPES,
        "word/document.xml": f"<w:document {W_NAMESPACES}><w:body>{body}</w:body></w:document>",
    }
    for name, content in parts.items():
        files[f"word/{name}.xml"] = content.replace("NS", W_NAMESPACES, 1)
    return make_zip(files)


def make_odt(body: str) -> bytes:
    names = " ".join(
        f'xmlns:{p}="urn:oasis:names:tc:opendocument:xmlns:{n}:1.0"'
        for p, n in (("office", "office"), ("text", "text"), ("table", "table"))
    )
    return make_zip(
        {
            "mimetype": "application/vnd.oasis.opendocument.text",
            "content.xml": f"<office:document-content {names}><office:body><office:text>{body}</office:text></office:body>"
            "</office:document-content>",
        }
    )


# --- compound files --------------------------------------------------------------------------------------------

SECTOR = 512
FREE, END, FAT_SECTOR = 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFD


def make_ole(streams: Mapping[str, bytes]) -> bytes:
    """A compound file (MS-CFB, version 3) of streams in the root; each is padded past the mini-stream's limit."""
    import struct

    contents = [data.ljust(4096, b"\0") for data in streams.values()]
    entries = [_entry("Root Entry", 5, END, 0, child=1 if streams else FREE)]
    names = list(streams)
    fat: list[int] = []
    starts = []
    for data in contents:
        starts.append(len(fat))
        count = -(-len(data) // SECTOR)
        fat += [len(fat) + i + 1 for i in range(count - 1)] + [END]
    # Siblings as a chain to the right: no valid red-black tree, but every reader walks it.
    for index, name in enumerate(names):
        right = index + 2 if index + 1 < len(names) else FREE
        entries.append(_entry(name, 2, starts[index], len(contents[index]), right=right))
    while len(entries) % 4:
        entries.append(b"\0" * 64 + b"\0\0\0\0" + struct.pack("<III", FREE, FREE, FREE) + b"\0" * 48)
    directory_start = len(fat)
    directory = b"".join(entries)
    count = len(directory) // SECTOR
    fat += [len(fat) + i + 1 for i in range(count - 1)] + [END]
    fat_sectors = 1
    while len(fat) + fat_sectors > fat_sectors * 128:
        fat_sectors += 1
    fat_start = len(fat)
    fat += [FAT_SECTOR] * fat_sectors
    fat += [FREE] * (fat_sectors * 128 - len(fat))
    header = struct.pack(
        "<8s16sHHHHH6xIIIIIIIIII",
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", b"", 0x3E, 3, 0xFFFE, 9, 6,
        0, fat_sectors, directory_start, 0, 4096, END, 0, END, 0, fat_start,
    )  # fmt: skip
    header += struct.pack("<108I", *([fat_start + i for i in range(1, fat_sectors)] + [FREE] * (109 - fat_sectors)))
    body = b"".join(data.ljust(-(-len(data) // SECTOR) * SECTOR, b"\0") for data in contents)
    return header + body + directory + struct.pack(f"<{len(fat)}I", *fat)


def _entry(name: str, kind: int, start: int, size: int, *, right: int = FREE, child: int = FREE) -> bytes:
    import struct

    raw = name.encode("utf-16-le") + b"\0\0"
    return raw.ljust(64, b"\0") + struct.pack(
        "<HBBIII16sIQQIQ", len(raw), kind, 1, FREE, right, child, b"", 0, 0, 0, start, size
    )


def make_doc(text: str) -> bytes:
    """Word 97: one piece of cp1252 text."""
    import struct

    data = text.encode("cp1252")
    word = bytearray(0x400)
    struct.pack_into("<HH", word, 0, 0xA5EC, 0xC1)
    struct.pack_into("<H", word, 0x0A, 0x0200)
    offset = len(word)
    word += data
    pieces = struct.pack("<II", 0, len(data)) + struct.pack("<HIH", 0, (offset * 2) | 0x40000000, 0)
    table = b"\x02" + struct.pack("<I", len(pieces)) + pieces
    struct.pack_into("<II", word, 0x01A2, 0, len(table))
    return make_ole({"1Table": table, "WordDocument": bytes(word)})
