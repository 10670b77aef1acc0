// The C interface of the tokenizer: what native.py calls through ctypes.
//
// Every function is safe to call from several threads at once as long as no two use the same counter, trainer, scratch
// or pool; encoders are for all. Nothing is thrown across the boundary: out of memory is -1 or null.
#include <cstdint>
#include <new>

#include "encode.h"
#include "pool.h"
#include "specials.h"
#include "split.h"
#include "train.h"

using namespace fuselm;

#define EXPORT extern "C" __attribute__((visibility("default")))

// Runs the body; memory that cannot be had becomes `failure`.
template <typename Body, typename Result>
static Result guarded(Result failure, Body&& body) {
  try {
    return body();
  } catch (const std::exception&) {
    return failure;
  }
}

// --- special tokens and splitting ---

EXPORT Specials* fuselm_specials_new(const byte* texts, const int64_t* ends, int64_t count) {
  return guarded<>((Specials*)nullptr, [&] { return new Specials(texts, ends, count); });
}

EXPORT void fuselm_specials_free(Specials* specials) { delete specials; }

EXPORT int64_t fuselm_find_cut(const byte* table, const Specials* specials, const byte* text, int64_t from,
                               int64_t size) {
  return find_cut(table, *specials, text, from, size);
}

// The ends of all words of a text without specials, at most `size` of them.
EXPORT int64_t fuselm_split(const byte* table, const byte* text, int64_t size, int64_t* ends) {
  int64_t count = 0;
  for (const byte *p = text, *end = text + size; p < end; ends[count++] = p - text)
    p = end - p >= kSlack ? word_end(table, p, end) : word_end_slow(table, p, end);
  return count;
}

// --- training ---

EXPORT WordCounter* fuselm_counter_new() {
  return guarded<>((WordCounter*)nullptr, [] { return new WordCounter(); });
}

EXPORT void fuselm_counter_free(WordCounter* counter) { delete counter; }

// Counts the words of several texts that lie one behind the other; `ends` says where each one ends.
EXPORT int64_t fuselm_counter_count(WordCounter* counter, const byte* table, const Specials* specials, const byte* text,
                                    const int64_t* ends, int64_t texts) {
  return guarded<>(int64_t(-1), [&] {
    int64_t begin = 0;
    for (int64_t i = 0; i < texts; begin = ends[i++]) counter->count(table, *specials, text + begin, text + ends[i]);
    return int64_t(0);
  });
}

EXPORT int64_t fuselm_counter_add(WordCounter* counter, const WordCounter* other) {
  return guarded<>(int64_t(-1), [&] { return counter->add_all(*other), int64_t(0); });
}

EXPORT Trainer* fuselm_trainer_new(const WordCounter* counter) {
  return guarded<>((Trainer*)nullptr, [&] { return new Trainer(*counter); });
}

EXPORT void fuselm_trainer_free(Trainer* trainer) { delete trainer; }

EXPORT int64_t fuselm_trainer_merge(Trainer* trainer, int64_t wanted) {
  return guarded<>(int64_t(-1), [&] { return trainer->merge(wanted); });
}

// Two ids for each merge so far.
EXPORT const id_t* fuselm_trainer_merges(const Trainer* trainer, int64_t* count) {
  *count = int64_t(trainer->merges().size() / 2);
  return trainer->merges().data();
}

// --- encoding ---

// `merges` has left, right and made for each rank.
EXPORT Encoder* fuselm_encoder_new(const byte* table, const Specials* specials, const id_t* special_ids,
                                   const id_t* byte_ids, const id_t* merges, int64_t count) {
  return guarded<>((Encoder*)nullptr, [&] {
    auto* encoder = new Encoder{table, *specials, {}, {}, MergeTable(count), std::vector<Merge>(1 << 16), {}};
    encoder->special_ids.assign(special_ids, special_ids + specials->texts.size());
    std::copy(byte_ids, byte_ids + 256, encoder->byte_ids);
    for (int64_t i = 0; i < count; ++i)
      encoder->merges.add(merges[3 * i], merges[3 * i + 1], {uint32_t(i), merges[3 * i + 2]});
    for (int pair = 0; pair < 1 << 16; ++pair)
      encoder->byte_merges[pair] = encoder->merges.get(byte_ids[pair >> 8], byte_ids[pair & 255]);
    return encoder;
  });
}

EXPORT void fuselm_encoder_free(Encoder* encoder) { delete encoder; }

EXPORT Scratch* fuselm_scratch_new(Encoder* encoder) {
  return guarded<>((Scratch*)nullptr, [&] { return new Scratch(*encoder); });
}

EXPORT void fuselm_scratch_free(Scratch* scratch) { delete scratch; }

// Writes ids into `out`, which has room for size + 4, and returns how many, or -2 - i for a refused special i.
EXPORT int64_t fuselm_encode(Scratch* scratch, const byte* text, int64_t size, const byte* allowed, const byte* refused,
                             id_t* out) {
  return guarded<>(int64_t(-1), [&] { return scratch->encode(text, size, allowed, refused, out); });
}

EXPORT Pool* fuselm_pool_new(Encoder* encoder, int64_t helpers) {
  return guarded<>((Pool*)nullptr, [&] { return new Pool(*encoder, helpers); });
}

// What was put and not finished is dropped; it returns when no thread works any more.
EXPORT void fuselm_pool_free(Pool* pool) { delete pool; }

// Returns when no thread works any more; `finish` then works alone.
EXPORT void fuselm_pool_stop(Pool* pool) { pool->stop(); }

// Texts that lie one behind the other, to be encoded when a thread is free; counts[i] becomes the number of ids of text
// i. Nothing that is pointed to may go before `finish` has returned them.
EXPORT int64_t fuselm_pool_put(Pool* pool, const byte* text, const int64_t* ends, int64_t texts, const byte* allowed,
                               const byte* refused, id_t* out, int64_t* counts) {
  return guarded<>(int64_t(-1), [&] {
    pool->put({text, ends, texts, allowed, refused, out, counts});
    return 0;
  });
}

// Whether `finish` would return at once.
EXPORT bool fuselm_pool_ready(Pool* pool) { return pool->ready(); }

// The number of ids of what was put first, or what is wrong with it, as `fuselm_encode` says it.
EXPORT int64_t fuselm_pool_finish(Pool* pool) {
  return guarded<>(int64_t(-1), [&] { return pool->finish(); });
}

// --- decoding ---

// Writes the bytes of tokens, `starts` saying where each token's bytes lie in `bytes`, or counts them when out is null.
// There are `known` tokens; any other id has the bytes of the entry behind the last.
EXPORT int64_t fuselm_decode(const byte* bytes, const int64_t* starts, int64_t known, const id_t* ids, int64_t count,
                             byte* out) {
  int64_t size = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = std::min<int64_t>(ids[i], known);
    const int64_t start = starts[token], length = starts[token + 1] - start;
    if (out) std::memcpy(out + size, bytes + start, length);
    size += length;
  }
  return size;
}
