"""Optional OCR of scanned pages by tesseract, where it is installed."""

import shutil
import subprocess
from pathlib import Path

TIMEOUT_S = 120.0
LANGUAGES_WANTED = ("eng", "deu", "fra", "spa", "ita", "nld", "por")


class Ocr:
    """Runs tesseract on one page image at a time; safe to use from several threads."""

    def __init__(self, program: str, languages: str, version: str) -> None:
        self.program, self.languages, self.version = program, languages, version

    @classmethod
    def find(cls) -> "Ocr | None":
        program = shutil.which("tesseract")
        if program is None:
            return None
        try:
            listed = subprocess.run([program, "--list-langs"], capture_output=True, text=True, timeout=30, check=False)
            version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        installed = set(listed.stdout.split())
        languages = [lang for lang in LANGUAGES_WANTED if lang in installed]
        if not languages:
            return None
        return cls(program, "+".join(languages), (version.stdout or version.stderr).split("\n", 1)[0].strip())

    def read(self, image: Path) -> str:
        """The text of a page; empty where tesseract finds none or fails. The image is removed."""
        try:
            done = subprocess.run(
                [self.program, str(image), "stdout", "-l", self.languages, "--psm", "3"],
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        finally:
            image.unlink(missing_ok=True)
        return done.stdout.decode("utf-8", "replace").replace("\f", "") if done.returncode == 0 else ""
