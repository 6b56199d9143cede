"""Which encoding a text is in. Marks and declarations first, then UTF-8, then evidence; guessing libraries last.

Guessers that go by byte statistics alone turn a short Windows-1252 file into cp1250 or Latin-1 with C1 controls, and
drop Shift-JIS source as binary. So each candidate is decoded strictly and its result judged by what the letters are.
"""

import codecs
import re
import unicodedata
from collections.abc import Iterable

from service.ingest.sniff import wide_without_mark

MARKS: tuple[tuple[bytes, str], ...] = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
SAMPLE_BYTES = 512 * 1024
DECLARED = (
    re.compile(rb"^[ \t\f]*(?:#|//|/\*|%|;|--)?.{0,40}?coding[:=][ \t]*([-_.a-zA-Z0-9]+)"),  # PEP 263, Emacs, Vim
    re.compile(rb"<\?xml[^>]{0,200}?encoding=[\"']([-_.a-zA-Z0-9]+)"),
    re.compile(rb"<meta[^>]{0,200}?charset=[\"' ]*([-_.a-zA-Z0-9]+)", re.IGNORECASE),
    re.compile(rb"^@charset \"([-_.a-zA-Z0-9]+)"),
)
# What the web and Windows mean by these names.
ALIASES = {
    "iso-8859-1": "cp1252",
    "iso8859-1": "cp1252",
    "latin-1": "cp1252",
    "latin1": "cp1252",
    "ascii": "cp1252",
    "us-ascii": "cp1252",
    "shift_jis": "cp932",
    "shift-jis": "cp932",
    "sjis": "cp932",
    "windows-31j": "cp932",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "ks_c_5601-1987": "cp949",
    "euc-kr": "cp949",
    "big5": "cp950",
    "iso-8859-9": "cp1254",
    "tis-620": "cp874",
}
JAPANESE_ESCAPES, KOREAN_ESCAPES = (b"\x1b$B", b"\x1b$@"), (b"\x1b$)C",)
FAULTS_OF_UTF8 = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]|[\xc0\xc1][\x80-\xbf]")
LINES_OF_DOS = re.compile(rb"([\xc4\xcd])\1\1")  # ─── and ═══ of code page 437; three Ä or Í in a row are no word
COMMON_LATIN = frozenset("äöüÄÖÜßéèêàáâçñíîóôúû‘’“”–—…•°©«»")
EAST_ASIAN = ("cp932", "euc_jp", "gb18030", "cp949", "cp950")
SINGLE_BYTE = (
    "cp1252",
    "cp1251",
    "koi8_r",
    "cp1253",
    "cp1255",
    "cp1256",
    "cp1250",
    "cp1254",
    "cp1257",
    "cp874",
    "mac_roman",
)


def detect(data: bytes, *, is_utf8: bool | None = None) -> str:
    """Python's name of the encoding of `data` (a whole text, or its first SAMPLE_BYTES or more).

    `is_utf8` tells what is already known of the whole. Never raises: where nothing fits, it is "utf-8", to be decoded
    with replacement characters.
    """
    for mark, name in MARKS:
        if data.startswith(mark):
            return name
    wide = wide_without_mark(data)
    if wide:
        return wide
    if b"\x1b$" in data and (escaped := _escaped(data[:SAMPLE_BYTES])):
        return escaped
    if is_utf8 or (is_utf8 is None and _decodes(data, "utf-8")):
        return "utf-8"
    sample = data[:SAMPLE_BYTES]
    declared = _declared(sample)
    if declared and _decodes(sample, declared):
        return declared
    if _nearly_utf8(sample):
        return "utf-8"
    return _by_evidence(sample)


def decode(data: bytes, encoding: str | None = None) -> tuple[str, str, int]:
    """(text, encoding, number of replaced bytes) of a small text."""
    name = encoding or detect(data)
    text = data.decode(name, "replace")
    return text, name, text.count("\ufffd") - (data.count(b"\xef\xbf\xbd") if name.startswith("utf-8") else 0)


def decode_name(raw: bytes) -> str:
    """A zip member's name without an encoding flag: UTF-8 if it is that, else a DOS or Windows code page."""
    if _decodes(raw, "utf-8"):
        return raw.decode("utf-8")
    dos = raw.decode("cp437")
    if all(c.isascii() or c.isalpha() for c in dos):
        return dos
    best = max(EAST_ASIAN, key=lambda name: _east_asian_score(raw, name))
    if _east_asian_score(raw, best) > 0.75:
        return raw.decode(best)
    return dos


def _declared(data: bytes) -> str | None:
    head = b"\n".join(data[:4096].split(b"\n", 2)[:2]) if not data.lstrip().startswith(b"<") else data[:4096]
    for pattern in DECLARED:
        for line in head.split(b"\n"):
            found = pattern.search(line)
            if found:
                return known(found.group(1).decode("ascii", "replace"))
    return None


def known(name: str) -> str | None:
    """Python's name for a declared encoding, or None. Only encodings of text: never `zlib` or `rot13`."""
    name = name.strip().lower()
    name = ALIASES.get(name, name)
    if name.startswith("windows-"):
        name = "cp" + name[8:]
    try:
        info = codecs.lookup(name)
    except (LookupError, ValueError):
        return None
    if not info._is_text_encoding or info.name in (
        "undefined",
        "idna",
        "punycode",
        "unicode_escape",
        "raw_unicode_escape",
    ):
        return None
    return ALIASES.get(info.name, info.name)


def _decodes(data: bytes, name: str) -> bool:
    try:
        data.decode(name)
    except UnicodeDecodeError as error:
        # A sample may end in the middle of a character.
        return len(data) >= SAMPLE_BYTES and error.start >= len(data) - 4
    except UnicodeError:
        return False
    return True


def _escaped(data: bytes) -> str | None:
    """ISO 2022: bytes of ASCII, with escape sequences that switch to another set of characters and back."""
    for sequences, name in ((JAPANESE_ESCAPES, "iso2022_jp"), (KOREAN_ESCAPES, "iso2022_kr")):
        if any(sequence in data for sequence in sequences) and _decodes(data, name):
            return name
    return None


def _nearly_utf8(data: bytes) -> bool:
    """Most non-ASCII bytes form UTF-8 sequences: a broken spot, not another encoding. In legacy encodings few do, by
    chance. Halves of surrogate pairs and overlong
    forms are faults of UTF-8 writers."""
    data = FAULTS_OF_UTF8.sub(b"", data)
    high = sum(1 for b in data if b >= 0x80)
    good = sum(len(c.encode()) for c in data.decode("utf-8", "ignore") if c >= "\x80")
    return 3 * good >= 2 * high


def _by_evidence(sample: bytes) -> str:
    scores = [(_east_asian_score(sample, name), name) for name in EAST_ASIAN]
    best, name = max(scores, key=lambda s: s[0])
    if best > 0.85:
        return name
    if LINES_OF_DOS.search(sample):
        return "cp437"
    if _common_share(sample, "mac_roman") > 0.9 and _common_share(sample, "cp1252") < 0.5:
        return "mac_roman"
    if _western(sample) > 0.85:
        return "cp1252"
    guessed = _guess(sample)
    if guessed:
        return guessed
    scores = [(_letters_score(sample, name), name) for name in SINGLE_BYTE]
    best, name = max(scores, key=lambda s: s[0])
    return name if best > 0.5 else "cp1252" if _decodes(sample, "cp1252") else "latin-1"


def _east_asian_score(data: bytes, name: str) -> float:
    """Share of non-ASCII characters that are kana, Hangul or common ideographs; 0 if it doesn't decode."""
    try:
        text = data.decode(name)
    except UnicodeDecodeError as error:
        if error.start < len(data) - 4 or len(data) < SAMPLE_BYTES:
            return 0.0
        text = data[: error.start].decode(name)
    wide = [c for c in text if c >= "\x80"]
    if not wide:
        return 0.0
    kana = sum(1 for c in wide if "\u3040" <= c <= "\u30ff")
    hangul = sum(1 for c in wide if "\uac00" <= c <= "\ud7a3")
    ideographs = sum(1 for c in wide if "\u4e00" <= c <= "\u9fff")
    punctuation = sum(1 for c in wide if "\u3000" <= c <= "\u303f" or "\uff01" <= c <= "\uff5e")
    half_kana = sum(1 for c in wide if "\uff61" <= c <= "\uff9f")
    # Any byte of the upper half may be a half-width kana: they count where there are kana of full width beside them.
    good = kana + hangul + ideographs + punctuation + (1.0 if kana >= 0.25 * len(wide) else 0.2) * half_kana
    if name in ("cp932", "euc_jp"):
        # Japanese prose and comments have kana; ideographs alone may be another code's bytes read wrongly.
        return good / len(wide) * (1.0 if kana >= 0.15 * len(wide) else 0.8 + 0.1 * _frequent(wide))
    if name == "cp949":
        return good / len(wide) * (1.0 if hangul > 0.5 * len(wide) else 0.5)
    # Bytes of two Latin-1 letters side by side make rare ideographs: the frequent ones must show.
    return good / len(wide) * (0.7 + 0.3 * _frequent(wide)) if len(wide) > 1 else 0.0


COMMON_IDEOGRAPHS = frozenset(
    "的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自着去之过家学对可她里后小么心多天而能好都然没日于起还发成事只作当"
    "想看文无开手十用主行方又如前所本见经头面公同三已老从动两长知民样现分将外但身些与高意进把法此实回二理美点月明其种声全工己话儿者向情部正名定女问"
    "力机给等几很业最间新什打便位因重被走电四第门相次东政海口使教西再平真听世气信北少关并内加化由却代军产入先山五太水万市表接初期處這個來們為時會過"
    "說對後沒還發當開頭經樣現將與進實點聲話兒問給業間種無條約書面契约合同示設定処理値変数追加削除更新取得結果実行開始終了件名用户数据文件错误字符"
)


def _frequent(wide: list[str]) -> float:
    ideographs = [c for c in wide if "\u4e00" <= c <= "\u9fff"]
    if not ideographs:
        return 0.0
    return min(1.0, 3 * sum(1 for c in ideographs if c in COMMON_IDEOGRAPHS) / len(ideographs))


def _western(data: bytes) -> float:
    """How much like Western European text: share of its non-ASCII characters that stand as such texts have them."""
    try:
        text = data.decode("cp1252")
    except UnicodeDecodeError:
        return 0.0
    good = total = 0
    for at, char in enumerate(text):
        if char < "\x80":
            continue
        total += 1
        before, after = text[at - 1 : at], text[at + 1 : at + 2]
        if char in "–—‘’‚“”„•…€§°©®™·«»¿¡ªº\u00a0£¥±²³½¼¾×µ¶†‡‰":
            good += 1
        elif char in "àáâãäåæçèéêëìíîïñòóôõöøùúûüýÿßœšžÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜÝŒŠŽŸðþÐÞ":
            # Letters of a Latin word have ASCII letters beside them; a run of accented ones is Cyrillic or Greek.
            good += _is_latin(before) or _is_latin(after) or not (before.strip() or after.strip())
    return good / total if total else 0.0


def _common_share(data: bytes, name: str) -> float:
    """Share of non-ASCII characters that Western European texts are full of."""
    wide = [c for c in data.decode(name, "replace") if c >= "\x80"]
    return sum(c in COMMON_LATIN for c in wide) / len(wide) if wide else 0.0


def _is_latin(char: str) -> bool:
    return char.isascii() and char.isalpha()


def _guess(sample: bytes) -> str | None:
    from charset_normalizer import from_bytes

    best = from_bytes(sample[:65536], steps=5, chunk_size=512).best()
    name = known(best.encoding) if best else None
    # East Asian codes have been judged already; half-width kana would make any bytes Japanese.
    single_byte = name is not None and len(bytes(range(128, 256)).decode(name, "replace")) == 128
    return name if name and single_byte and _letters_score(sample, name) > 0.5 else None


def _letters_score(data: bytes, name: str) -> float:
    """Share of non-ASCII characters that are letters of one script, plus case that runs as in words."""
    try:
        text = data.decode(name)
    except UnicodeError:
        return 0.0
    wide = [c for c in text if c >= "\x80"]
    if not wide:
        return 0.0
    letters = sum(1 for c in wide if c.isalpha())
    controls = sum(1 for c in wide if unicodedata.category(c) in ("Cc", "Cn", "Co"))
    odd_case = len(re.findall(r"[^\W\d_a-zA-Z]*[а-яёα-ωà-ÿ][А-ЯЁΑ-ΩÀ-Þ]", text))
    return (letters - 3 * controls - 2 * odd_case) / len(wide)


def incremental(blocks: Iterable[bytes], encoding: str) -> Iterable[str]:
    """Decode block by block; bytes that don't fit become U+FFFD."""
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    for block in blocks:
        yield decoder.decode(block)
    yield decoder.decode(b"", final=True)
