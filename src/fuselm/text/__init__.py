"""Text to token ids and back: byte-level BPE, characters, streaming.

from fuselm.text import StreamDecoder, Tokenizer, train_bpe
"""

from fuselm.text.bpe import train_bpe
from fuselm.text.stream import StreamDecoder
from fuselm.text.tokenizer import Tokenizer

__all__ = ["StreamDecoder", "Tokenizer", "train_bpe"]
