// Training: words are counted, then the most frequent pair of neighbours is merged, again and again.
//
// A merge touches only the words that contain it: every pair knows its count and the words it was seen in, and a heap
// knows the most frequent pair. Ties go to the pair whose byte strings are greatest, so neither threads nor the order
// of words can change the result. Knows nothing of files; Python feeds it texts and asks for merges.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "encode.h"

namespace fuselm {

// How often each word of a text occurs. One thread each; the counters are added up at the end.
class WordCounter {
 public:
  WordCounter() : mask_((1 << 12) - 1), slots_(mask_ + 1) {}

  void count(const byte* table, const Specials& specials, const byte* p, const byte* end) {
    while (p < end) {
      int which;
      const byte* stop = specials.find(p, end, nullptr, &which);
      segment(table, p, stop);
      p = which < 0 ? end : stop + specials.texts[which].size();
    }
  }

  void add_all(const WordCounter& other) {
    for (const Slot& slot : other.slots_)
      if (slot.count) add(slot.key, slot.count);
    for (const auto& [word, count] : other.long_) long_[word] += count;
  }

  template <typename Visit>
  void visit(Visit&& visit) const {
    for (const Slot& slot : slots_)
      if (slot.count) visit(reinterpret_cast<const byte*>(&slot.key), int64_t(slot.key.high >> 56), slot.count);
    for (const auto& [word, count] : long_)
      visit(reinterpret_cast<const byte*>(word.data()), int64_t(word.size()), count);
  }

 private:
  struct Slot {
    Key key{0, 0};
    int64_t count = 0;
  };

  void segment(const byte* table, const byte* p, const byte* end) {
    while (end - p >= kSlack) p = word(p, word_end(table, p, end));
    byte tail[2 * kSlack] = {};
    std::memcpy(tail, p, end - p);
    for (end = tail + (end - p), p = tail; p < end;) p = word(p, word_end(table, p, end));
  }

  const byte* word(const byte* p, const byte* end) {
    if (end - p > kShortWord)
      ++long_[std::string(reinterpret_cast<const char*>(p), end - p)];
    else
      add(key_of(p, int(end - p)), 1);
    return end;
  }

  void add(const Key& key, int64_t count) {
    uint64_t i = key.hash() & mask_;
    while (slots_[i].count && !(slots_[i].key == key)) i = (i + 1) & mask_;
    if (!slots_[i].count) {
      slots_[i].key = key;
      if (++used_ * 2 > int64_t(mask_)) {
        slots_[i].count = count;
        return grow();
      }
    }
    slots_[i].count += count;
  }

  void grow() {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    mask_ = slots_.size() - 1;
    used_ = 0;
    for (const Slot& slot : old)
      if (slot.count) add(slot.key, slot.count);
  }

  uint64_t mask_;
  int64_t used_ = 0;
  std::vector<Slot> slots_;
  std::unordered_map<std::string, int64_t> long_;
};

class Trainer {
 public:
  // Tokens 0 to 255 are the bytes; merge number i makes token 256 + i.
  explicit Trainer(const WordCounter& counter) {
    for (int b = 0; b < 256; ++b) tokens_.push_back(std::string(1, char(b)));
    counter.visit([this](const byte* p, int64_t length, int64_t count) {
      if (length > 1) add_word(p, length, count);
    });
    for (uint32_t index = 0; index < pairs_.size(); ++index) push(index);
  }

  // Makes up to `wanted` merges; fewer when no pair is left. Returns how many.
  int64_t merge(int64_t wanted) {
    int64_t done = 0;
    for (uint32_t best; done < wanted && pop(&best); ++done) apply(best);
    return done;
  }

  const std::vector<id_t>& merges() const { return merges_; }

 private:
  struct Word {
    uint64_t start;
    uint32_t length;
    int64_t count;
  };
  struct Pair {
    id_t left, right;
    int64_t count = 0;
    std::vector<uint32_t> words;  // where it was seen; it may be gone from there by now
  };
  struct Candidate {
    int64_t count;  // when it was pushed: a pair's count only falls after the merge that made it
    uint32_t pair;
  };

  void add_word(const byte* p, int64_t length, int64_t count) {
    if (length >= kNone || words_.size() >= kNone) throw std::length_error("a word, or words, past 4 billion");
    const uint32_t word = uint32_t(words_.size());
    words_.push_back({symbols_.size(), uint32_t(length), count});
    symbols_.insert(symbols_.end(), p, p + length);
    for (int64_t i = 0; i + 1 < length; ++i) change(p[i], p[i + 1], count, word, nullptr);
  }

  // Adds to a pair's count; a pair that gains is remembered as seen in the word.
  void change(id_t left, id_t right, int64_t by, uint32_t word, std::vector<uint32_t>* fresh) {
    const auto [found, is_new] = index_.try_emplace(uint64_t(left) << 32 | right, uint32_t(pairs_.size()));
    if (is_new) {
      pairs_.push_back({left, right, 0, {}});
      if (fresh) fresh->push_back(found->second);
    }
    Pair& pair = pairs_[found->second];
    pair.count += by;
    if (by > 0 && (pair.words.empty() || pair.words.back() != word)) pair.words.push_back(word);
  }

  void apply(uint32_t best) {
    const id_t left = pairs_[best].left, right = pairs_[best].right, made = id_t(tokens_.size());
    tokens_.push_back(tokens_[left] + tokens_[right]);
    merges_.push_back(left);
    merges_.push_back(right);
    std::vector<uint32_t> fresh;
    const std::vector<uint32_t> words = std::move(pairs_[best].words);
    for (uint32_t word : words) rewrite(word, left, right, made, &fresh);
    pairs_[best].count = 0;
    for (uint32_t index : fresh) push(index);
  }

  // Merges a pair in one word, left to right, and moves the counts of the neighbours.
  void rewrite(uint32_t index, id_t left, id_t right, id_t made, std::vector<uint32_t>* fresh) {
    Word& word = words_[index];
    id_t* const symbols = symbols_.data() + word.start;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < word.length; ++kept) {
      if (i + 1 == word.length || symbols[i] != left || symbols[i + 1] != right) {
        symbols[kept] = symbols[i++];
        continue;
      }
      if (kept > 0) {
        change(symbols[kept - 1], left, -word.count, index, fresh);
        change(symbols[kept - 1], made, word.count, index, fresh);
      }
      i += 2;
      if (i < word.length) {
        change(right, symbols[i], -word.count, index, fresh);
        change(made, symbols[i], word.count, index, fresh);
      }
      symbols[kept] = made;
    }
    word.length = kept;
  }

  bool less(const Candidate& a, const Candidate& b) const {
    if (a.count != b.count) return a.count < b.count;
    const Pair &x = pairs_[a.pair], &y = pairs_[b.pair];
    if (x.left != y.left) return tokens_[x.left] < tokens_[y.left];
    return tokens_[x.right] < tokens_[y.right];
  }

  void push(uint32_t pair) {
    if (pairs_[pair].count <= 0) return;
    heap_.push_back({pairs_[pair].count, pair});
    std::push_heap(heap_.begin(), heap_.end(), [this](const auto& a, const auto& b) { return less(a, b); });
  }

  // The most frequent pair. One whose count has fallen since it was pushed goes back with what is left of it.
  bool pop(uint32_t* best) {
    while (!heap_.empty()) {
      std::pop_heap(heap_.begin(), heap_.end(), [this](const auto& a, const auto& b) { return less(a, b); });
      const Candidate top = heap_.back();
      heap_.pop_back();
      *best = top.pair;
      if (top.count == pairs_[top.pair].count) return true;
      push(top.pair);
    }
    return false;
  }

  std::vector<std::string> tokens_;
  std::vector<id_t> symbols_;
  std::vector<Word> words_;
  std::vector<Pair> pairs_;
  std::unordered_map<uint64_t, uint32_t> index_;
  std::vector<Candidate> heap_;
  std::vector<id_t> merges_;
};

}  // namespace fuselm
