"""From text to batches and back: train a tokenizer, tokenise a corpus, load batches, resume, decode token by token.

    python examples/text_and_data.py

The corpus is the built-in one; any path in its place will do. Everything is written into a temporary folder.
"""

import tempfile
from pathlib import Path

from fuselm.data.corpora import open_corpus
from fuselm.data.loader import Loader
from fuselm.data.prepare import prepare, train_tokenizer
from fuselm.text import StreamDecoder, Tokenizer


def main() -> None:
    """Show each step in a line or two."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = open_corpus("stories", limit_bytes=300_000)
        tokenizer = train_tokenizer(corpus, vocab_size=1024)
        shards = prepare(corpus, tokenizer, Path(folder))
        assert Tokenizer.load(folder) == tokenizer
        print({split: f"{len(shard)} tokens in {len(shard.documents)} documents" for split, shard in shards.items()})

        loader = Loader(shards["train"], batch_size=4, context=64, seed=1)
        for _ in range(3):
            inputs, targets = next(loader)  # int32 [4, 64] each, targets one token ahead
        state = loader.state()  # two numbers are all there is to save
        resumed = Loader(shards["train"], batch_size=4, context=64, seed=1, **state)
        assert (next(resumed).inputs == next(loader).inputs).all()
        print(inputs.shape, targets.dtype, state)

        stream = StreamDecoder(tokenizer, stop=["."])
        for token in inputs[0].tolist():  # as if they came from a model, one at a time
            print(stream.push(token), end="", flush=True)
        print(stream.finish(), "| stopped by", repr(stream.stopped))


if __name__ == "__main__":
    main()
