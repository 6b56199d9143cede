"""Whether a folder or an archive is a repository or a bundle of documents, by the names in it."""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

REPOSITORY_MARKERS = frozenset(
    [
        ".git",
        ".gitignore",
        ".gitattributes",
        ".gitmodules",
        ".github",
        ".editorconfig",
        "package.json",
        "pyproject.toml",
        "setup.py",
        "setup.cfg",
        "cargo.toml",
        "go.mod",
        "pom.xml",
        "build.gradle",
        "build.gradle.kts",
        "makefile",
        "cmakelists.txt",
        "gemfile",
        "composer.json",
        "requirements.txt",
        "tox.ini",
        "dockerfile",
        "mix.exs",
        "stack.yaml",
        "build.sbt",
        "package.swift",
    ]
)
SOURCE_SUFFIXES = frozenset(
    [
        ".py",
        ".js",
        ".ts",
        ".tsx",
        ".jsx",
        ".java",
        ".kt",
        ".c",
        ".h",
        ".cc",
        ".cpp",
        ".hpp",
        ".cs",
        ".go",
        ".rs",
        ".rb",
        ".php",
        ".swift",
        ".scala",
        ".sh",
        ".pl",
        ".lua",
        ".r",
        ".jl",
        ".hs",
        ".ml",
        ".ex",
        ".exs",
        ".erl",
        ".clj",
        ".dart",
        ".vue",
        ".svelte",
        ".sql",
        ".m",
        ".mm",
        ".f90",
        ".zig",
        ".nim",
        ".v",
        ".sv",
        ".vhd",
        ".asm",
        ".s",
        ".ps1",
        ".tf",
        ".proto",
        ".css",
        ".scss",
    ]
)


def folder_kind(root: Path) -> str:
    names = {p.name.lower() for p in root.iterdir()}
    if names & REPOSITORY_MARKERS:
        return "repo"
    found = [str(p) for p, _ in zip(root.rglob("*"), range(2000), strict=False)]
    return kind_of_names(found)


def kind_of_names(paths: Sequence[str]) -> str:
    """A repository has markers near its root, or mostly source files; anything else is a bundle of documents."""
    near = {part.lower() for path in paths for part in path.split("/")[:2]}
    if near & REPOSITORY_MARKERS:
        return "repo"
    source = sum(PurePosixPath(p).suffix.lower() in SOURCE_SUFFIXES for p in paths)
    return "repo" if source * 3 > len(paths) else "bundle"
