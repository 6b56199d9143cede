"""Parsers of document formats, run in processes of their own (`python -m service.ingest.parsers`).

Each module reads one format family and yields messages (service.ingest.parsers.protocol); none of them is imported by
the ingesting process.
"""
