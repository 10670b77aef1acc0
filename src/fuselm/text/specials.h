// Special tokens in a text: the first place where one of them stands, the longest of those that stand there.
//
// Looks at a text once, by memchr when all of them begin with the same byte, as they mostly do. Knows no ids: a special
// is its index in the list it was given in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "split.h"

namespace fuselm {

struct Specials {
  std::vector<std::string> texts;
  std::vector<int> sorted;  // by their bytes
  bool starts[256] = {};
  int only_start = -1;  // the byte that all of them begin with, or -1
  int64_t longest = 0;

  Specials(const byte* bytes, const int64_t* ends, int64_t count) {
    int64_t begin = 0;
    for (int64_t i = 0; i < count; ++i) {
      texts.emplace_back(reinterpret_cast<const char*>(bytes) + begin, ends[i] - begin);
      begin = ends[i];
      starts[byte(texts.back()[0])] = true;
      longest = std::max<int64_t>(longest, texts.back().size());
      sorted.push_back(int(i));
    }
    std::sort(sorted.begin(), sorted.end(), [this](int a, int b) { return texts[a] < texts[b]; });
    if (std::count(starts, starts + 256, true) == 1) only_start = byte(texts[0][0]);
  }

  // The longest allowed special at p, or -1. `allowed` has a byte for each special; null allows all. Byte by byte,
  // those that begin like the text are narrowed down in the sorted list, so hundreds of specials cost little more than
  // one.
  int at(const byte* p, const byte* end, const byte* allowed) const {
    int found = -1;
    auto low = sorted.begin(), high = sorted.end();
    for (int64_t depth = 0;; ++depth) {
      if (low < high && int64_t(texts[*low].size()) == depth) {  // it ends here, and so sorts before the others
        if (!allowed || allowed[*low]) found = *low;
        ++low;
      }
      if (low >= high || p + depth >= end) return found;
      const byte next = p[depth];
      low = std::partition_point(low, high, [&](int i) { return byte(texts[i][depth]) < next; });
      high = std::partition_point(low, high, [&](int i) { return byte(texts[i][depth]) == next; });
    }
  }

  // The first special at or behind p: where it stands (end when there is none) and which it is.
  const byte* find(const byte* p, const byte* end, const byte* allowed, int* which) const {
    *which = -1;
    if (texts.empty()) return end;
    for (; p < end; ++p) {
      if (only_start >= 0) {
        p = static_cast<const byte*>(std::memchr(p, only_start, end - p));
        if (!p) return end;
      } else if (!starts[*p]) {
        continue;
      }
      if ((*which = at(p, end, allowed)) >= 0) return p;
    }
    return end;
  }

  // Whether an occurrence of any special stands across p: a text must not be cut there.
  bool spans(const byte* begin, const byte* p, const byte* end) const {
    for (const std::string& text : texts) {
      const int64_t size = text.size();
      for (const byte* q = std::max(begin, p - size + 1); q < p; ++q)
        if (end - q >= size && !std::memcmp(q, text.data(), size)) return true;
    }
    return false;
  }
};

// The last place in (from, size) where the text may be cut in two that are split and encoded alone, or 0. What may
// follow the text later is allowed for: no cut is closer to the end than the longest special or the longest character.
inline int64_t find_cut(const byte* table, const Specials& specials, const byte* text, int64_t from, int64_t size) {
  for (int64_t p = size - std::max<int64_t>(4, specials.longest); p > from; --p)
    if (is_cut(table, text, text + p, text + size) && !specials.spans(text, text + p, text + size)) return p;
  return 0;
}

}  // namespace fuselm
