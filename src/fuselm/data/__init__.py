"""Corpora, token files and batches.

from fuselm.data import Loader, open_corpus, open_prepared, open_shard, validation_batches
"""

from fuselm.data.corpora import open_corpus
from fuselm.data.loader import Loader, validation_batches
from fuselm.data.prepare import open_prepared
from fuselm.data.shards import open_shard

__all__ = ["Loader", "open_corpus", "open_prepared", "open_shard", "validation_batches"]
