// The ids of words that have been met before, shared by all threads that encode with one vocabulary.
//
// It never grows: a word that comes in drives out the older one of its set, so memory stays what it is whatever the
// text, and what a lookup costs too. Nobody ever waits: who meets a record that is just being written takes it for a
// miss, and who wants to write one that another is writing lets it be.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "split.h"

namespace fuselm {

using id_t = uint32_t;

inline uint64_t mix(uint64_t a, uint64_t b) {
  const unsigned __int128 product = (unsigned __int128)(a ^ 0x9E3779B97F4A7C15u) * (b ^ 0xC2B2AE3D27D4EB4Fu);
  return uint64_t(product) ^ uint64_t(product >> 64);
}

static_assert(std::endian::native == std::endian::little, "keys of words are read as they lie in memory");

// A word of up to 15 bytes, its length in the last byte: two words are equal exactly when their keys are.
struct Key {
  uint64_t low, high;
  bool operator==(const Key& other) const { return ((low ^ other.low) | (high ^ other.high)) == 0; }
  uint64_t hash() const { return mix(low, high); }
};

constexpr int kShortWord = 15;

// Reads 16 bytes at p, of which `length` <= 15 count.
inline Key key_of(const byte* p, int length) {
  // Sixteen bytes of ones and sixteen of zeros: read from the middle, a mask for any length without a branch.
  alignas(32) static constexpr byte kMask[32] = {255, 255, 255, 255, 255, 255, 255, 255,
                                                 255, 255, 255, 255, 255, 255, 255, 255};
  uint64_t text[2], mask[2];
  std::memcpy(text, p, 16);
  std::memcpy(mask, kMask + 16 - length, 16);
  return {text[0] & mask[0], (text[1] & mask[1]) | uint64_t(length) << 56};
}

// Words of memory that are read whole or not at all (a sequence lock). The last one has room for kPayloadBits; above
// them are a bit that says that a thread is writing, and a number that every write changes: a reader who finds the last
// word before and after the others the same, and nobody writing, has read what one thread wrote. Acquire and release on
// every word keep them in that order; on x86 they cost nothing.
template <int kWords>
class Record {
 public:
  static constexpr int kLast = kWords - 1, kPayloadBits = 34;

  bool read(uint64_t (&words)[kWords]) const {
    const uint64_t last = words_[kLast].load(std::memory_order_acquire);
#pragma GCC unroll 16
    for (int i = 0; i < kLast; ++i) words[i] = words_[i].load(std::memory_order_acquire);
    words[kLast] = last & (kWriting - 1);
    return ((last & kWriting) | (words_[kLast].load(std::memory_order_relaxed) ^ last)) == 0;
  }

  void write(const uint64_t (&words)[kWords]) {
    uint64_t last = words_[kLast].load(std::memory_order_relaxed);
    if (last & kWriting) return;
    if (!words_[kLast].compare_exchange_strong(last, last | kWriting, std::memory_order_acquire)) return;
    for (int i = 0; i < kLast; ++i) words_[i].store(words[i], std::memory_order_release);
    words_[kLast].store(((last / kWrite + 1) * kWrite) | words[kLast], std::memory_order_release);
  }

  uint64_t word(int i) const { return words_[i].load(std::memory_order_relaxed); }
  uint64_t writes() const { return word(kLast) / kWrite; }

 private:
  static constexpr uint64_t kWriting = 1ull << kPayloadBits, kWrite = kWriting * 2;
  std::atomic<uint64_t> words_[kWords];
};

class WordCache {
 public:
  static constexpr int kShortIds = 3, kLongBytes = 56, kLongIds = 16;

  // Two entries fill a cache line. Each is a key, two ids, and in the last word the third and how many they are.
  struct alignas(64) ShortSet {
    Record<4> entries[2];
  };

  WordCache() : short_(1 << kShortBits), long_(1 << kLongBits) {}

  ShortSet& short_set(const Key& key) { return short_.first[key.hash() >> (64 - kShortBits)]; }

  // Writes three ids, which is cheaper than asking how many they are, and returns how many; 0 for a word that is not
  // there.
  static int find_short(const ShortSet& set, const Key& key, id_t* ids) {
    uint64_t words[4];
    const bool second = set.entries[0].word(0) != key.low;
    const bool whole = set.entries[second].read(words);  // & and not &&: one branch
    if (!(whole & (Key{words[0], words[1]} == key))) return 0;
    std::memcpy(ids, words + 2, kShortIds * sizeof(id_t));
    return int(words[3] >> 32);
  }

  void remember_short(const Key& key, const id_t* ids, int count) {
    uint64_t words[4] = {key.low, key.high, 0, uint64_t(count) << 32};
    std::memcpy(words + 2, ids, count * sizeof(id_t));
    auto& entries = short_set(key).entries;
    entries[entries[1].writes() < entries[0].writes()].write(words);  // the older one goes, until the numbers wrap
  }

  // A word of up to kLongBytes. Its record is its text, its ids, and in the last word its length and how many ids.
  struct LongWord {
    uint64_t words[16] = {};
    uint64_t length, hash;

    LongWord(const byte* p, int64_t size) : length(size), hash(size) {
      std::memcpy(words, p, size);
      for (int64_t i = 0; i * 8 < size; ++i) hash = mix(hash, words[i]);
    }
  };

  int find_long(const LongWord& word, id_t* ids) {
    uint64_t words[16];
    const Record<16>& known = record(word);
    if (known.word(0) != word.words[0] || !known.read(words)) return 0;  // most often there is another word
    if ((words[15] & 255) != word.length || std::memcmp(words, word.words, kLongBytes)) return 0;
    const int count = int(words[15] >> 8);
    std::memcpy(ids, words + 7, count * sizeof(id_t));
    return count;
  }

  void remember_long(LongWord& word, const id_t* ids, int count) {
    std::memcpy(word.words + 7, ids, count * sizeof(id_t));
    word.words[15] = word.length | uint64_t(count) << 8;
    record(word).write(word.words);
  }

 private:
  static constexpr int kShortBits = 17, kLongBits = 15;

  Record<16>& record(const LongWord& word) { return long_.first[word.hash >> (64 - kLongBits)].record; }

  struct alignas(64) LongEntry {
    Record<16> record;
  };

  // Zeroed by the system, page by page when it is first touched: a short text pays for little of it.
  template <typename T>
  struct Zeroed {
    void* memory;
    T* first;
    explicit Zeroed(size_t count) : memory(std::calloc(count + 1, sizeof(T))) {
      if (!memory) throw std::bad_alloc();
      first = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory) + sizeof(T) - 1) / sizeof(T) * sizeof(T));
    }
    ~Zeroed() { std::free(memory); }
    Zeroed(const Zeroed&) = delete;
    Zeroed& operator=(const Zeroed&) = delete;
  };

  Zeroed<ShortSet> short_;
  Zeroed<LongEntry> long_;
};

}  // namespace fuselm
