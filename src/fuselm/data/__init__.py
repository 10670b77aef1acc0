"""Corpora, token files and batches: from text on disk to rows of ids, without a framework."""
