// Words to token ids: merges by rank, and a cache of words in front of them.
//
// An Encoder is the vocabulary, which never changes, with the words met so far, which all threads share; a Scratch is
// what one thread needs beside it, so any number of threads may encode with one Encoder. Merging is the definition of
// BPE: of all neighbours that have a merge, the one of lowest rank is joined, the leftmost first, until none is left.
// The cache only remembers its results.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

#include "specials.h"
#include "word_cache.h"

namespace fuselm {

constexpr uint32_t kNone = ~0u;

struct Merge {
  uint32_t rank;
  id_t id;
};

// Pairs of ids to merges: open addressing, half full.
class MergeTable {
 public:
  explicit MergeTable(int64_t count) : mask_(std::bit_ceil(uint64_t(count) * 2 + 2) - 1), slots_(mask_ + 1) {}

  // The lower rank stays when a pair comes twice.
  void add(id_t left, id_t right, Merge merge) {
    Slot& slot = slots_[find(left, right)];
    if (slot.merge.rank == kNone || merge.rank < slot.merge.rank) slot = {left, right, merge};
  }

  Merge get(id_t left, id_t right) const { return slots_[find(left, right)].merge; }

 private:
  struct Slot {
    id_t left = 0, right = 0;
    Merge merge{kNone, 0};
  };

  uint64_t find(id_t left, id_t right) const {
    uint64_t i = (uint64_t(left) << 32 | right) * 0x9E3779B97F4A7C15u >> 20 & mask_;
    while (slots_[i].merge.rank != kNone && (slots_[i].left != left || slots_[i].right != right)) i = (i + 1) & mask_;
    return i;
  }

  uint64_t mask_;
  std::vector<Slot> slots_;
};

struct Encoder {
  const byte* table;
  Specials specials;
  std::vector<id_t> special_ids;
  id_t byte_ids[256];
  MergeTable merges;
  std::vector<Merge> byte_merges;  // of two bytes, by the bytes: a word's first look at its pairs needs no hashing
  WordCache cache;
};

// What one thread needs to encode.
class Scratch {
 public:
  explicit Scratch(Encoder& encoder) : encoder_(encoder) {}

  // Writes at most size + kShortIds ids and returns how many they are. Specials that `allowed` names become their ids;
  // where the text has special i and `refused` names it, the answer is -2 - i. Null names none.
  int64_t encode(const byte* text, int64_t size, const byte* allowed, const byte* refused, id_t* out) {
    const byte *p = text, *end = text + size;
    id_t* const first = out;
    int bad = -1;
    if (refused) encoder_.specials.find(p, end, refused, &bad);
    if (bad >= 0) return -2 - bad;
    while (p < end) {
      int which = -1;
      const byte* stop = allowed ? encoder_.specials.find(p, end, allowed, &which) : end;
      out = segment(p, stop, out);
      if (which < 0) break;
      *out++ = encoder_.special_ids[which];
      p = stop + encoder_.specials.texts[which].size();
    }
    return out - first;
  }

 private:
  // A text without specials. Its last bytes are copied to where kSlack bytes behind them can be read.
  id_t* segment(const byte* p, const byte* end, id_t* out) {
    p = words(p, end, end - kSlack + 1, &out);
    byte tail[2 * kSlack];
    const int64_t left = end - p;
    std::memcpy(tail, p, left);
    std::memset(tail + left, 0, sizeof tail - left);
    words(tail, tail + left, tail + left, &out);
    return out;
  }

  // The words that start before `last`. They are found a few at a time and their places in the cache asked for, so that
  // the memory of one is on its way while the next ones are found: waiting for it was half of the time.
  const byte* words(const byte* p, const byte* end, const byte* last, id_t** out) {
    struct {
      const byte* start;
      int64_t length;
      Key key;
      const WordCache::ShortSet* set;
    } found[kAhead];
    id_t* to = *out;
    while (p < last) {
      int count = 0;
      for (; count < kAhead && p < last; ++count) {
        const byte* stop = word_end(encoder_.table, p, end);
        auto& word = found[count];
        word.start = p;
        word.length = stop - p;
        word.key = key_of(p, int(std::min<int64_t>(stop - p, kShortWord)));
        word.set = &encoder_.cache.short_set(word.key);
        __builtin_prefetch(word.set);
        p = stop;
      }
      for (int i = 0; i < count; ++i) {
        const auto& word = found[i];
        const bool is_short = word.length <= kShortWord;
        const int ids = is_short ? WordCache::find_short(*word.set, word.key, to) : 0;
        to = ids ? to + ids : missed_word(word.start, word.length, is_short ? &word.key : nullptr, to);
      }
    }
    *out = to;
    return p;
  }

  // A word that the first cache does not have: because it is new, too long, or of too many ids.
  __attribute__((noinline)) id_t* missed_word(const byte* p, int64_t length, const Key* key, id_t* out) {
    if (length > WordCache::kLongBytes) return out + merge_long(p, length, out);
    WordCache& cache = encoder_.cache;
    WordCache::LongWord word(p, length);
    if (const int known = cache.find_long(word, out)) return out + known;
    const int count = merge_short(p, int(length), out);
    if (key && count <= WordCache::kShortIds) {
      cache.remember_short(*key, out, count);
    } else if (count <= WordCache::kLongIds) {
      cache.remember_long(word, out, count);
    }
    return out + count;
  }

  // Few symbols: look for the lowest rank anew after each merge.
  int merge_short(const byte* p, int length, id_t* ids) {
    uint32_t ranks[WordCache::kLongBytes];
    id_t made[WordCache::kLongBytes];
    const auto look = [&](int i, Merge merge) { ranks[i] = merge.rank, made[i] = merge.id; };
    for (int i = 0; i < length; ++i) ids[i] = encoder_.byte_ids[p[i]];
    for (int i = 0; i + 1 < length; ++i) look(i, encoder_.byte_merges[p[i] << 8 | p[i + 1]]);
    for (int pairs = length - 1; pairs > 0; --pairs) {
      uint32_t lowest = kNone;
      for (int i = 0; i < pairs; ++i) lowest = std::min(lowest, ranks[i]);
      if (lowest == kNone) break;
      int best = 0;
      while (ranks[best] != lowest) ++best;
      ids[best] = made[best];
      --length;
      for (int i = best + 1; i < length; ++i) ids[i] = ids[i + 1], ranks[i - 1] = ranks[i], made[i - 1] = made[i];
      if (best + 1 < length) look(best, encoder_.merges.get(ids[best], ids[best + 1]));
      if (best > 0) look(best - 1, encoder_.merges.get(ids[best - 1], ids[best]));
    }
    return length;
  }

  // Many symbols: a list that shrinks, and a heap of the merges that were possible when they were seen, by rank and
  // then by place. What has changed since is noticed when it comes up. n log n, whatever the text.
  int64_t merge_long(const byte* p, int64_t length, id_t* out) {
    if (length >= kNone) throw std::length_error("a word of 4 GiB");
    symbols_.resize(length);
    heap_.clear();
    for (int64_t i = 0; i < length; ++i)
      symbols_[i] = {encoder_.byte_ids[p[i]], uint32_t(i - 1), uint32_t(i + 1 < length ? i + 1 : kNone), kNone};
    for (int64_t i = 0; i + 1 < length; ++i)
      if ((symbols_[i].rank = encoder_.byte_merges[p[i] << 8 | p[i + 1]].rank) != kNone)
        heap_.push_back(entry(uint32_t(i)));
    std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
    while (!heap_.empty()) {
      std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
      const uint32_t rank = uint32_t(heap_.back() >> 32), place = uint32_t(heap_.back());
      heap_.pop_back();
      if (symbols_[place].rank == rank) join(place);
    }
    int64_t count = 0;
    for (uint32_t i = 0; i != kNone; i = symbols_[i].next) out[count++] = symbols_[i].id;
    if (length > kKeptSymbols) {  // one huge word must not cost memory for ever
      std::vector<Symbol>().swap(symbols_);
      std::vector<uint64_t>().swap(heap_);
    }
    return count;
  }

  struct Symbol {
    id_t id;
    uint32_t previous, next;
    uint32_t rank;  // of the merge with the next symbol; kNone when there is none or this symbol is gone
  };
  static constexpr int64_t kKeptSymbols = 1 << 16;
  static constexpr int kAhead = 32;

  bool possible(uint32_t place) {
    Symbol& left = symbols_[place];
    left.rank = left.next == kNone ? kNone : encoder_.merges.get(left.id, symbols_[left.next].id).rank;
    return left.rank != kNone;
  }

  uint64_t entry(uint32_t place) const { return uint64_t(symbols_[place].rank) << 32 | place; }

  void join(uint32_t place) {
    Symbol& left = symbols_[place];
    Symbol& right = symbols_[left.next];
    left.id = encoder_.merges.get(left.id, right.id).id;
    right.rank = kNone;
    left.next = right.next;
    if (left.next != kNone) symbols_[left.next].previous = place;
    for (uint32_t changed : {left.previous, place})
      if (changed != kNone && possible(changed)) {
        heap_.push_back(entry(changed));
        std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
      }
  }

  Encoder& encoder_;
  std::vector<Symbol> symbols_;
  std::vector<uint64_t> heap_;
};

}  // namespace fuselm
