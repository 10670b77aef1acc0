// GPT-2's pre-tokenisation by hand, over UTF-8 bytes: where a word ends, and where a text may be cut.
//
// The pattern is  '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ . It needs no backtracking:
// the class of a word's first character (after one optional space) says which alternative matches, and the word is the
// run of that class. Bytes that are no UTF-8 are characters of class "other", one each, so any bytes can be split.
// Knows nothing of tokens. The class table (one byte for each code point) comes from unicode.py.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace fuselm {

using byte = uint8_t;

enum Class : uint8_t { kOther, kLetter, kNumber, kSpace };

// What may be read past a word's first byte without asking where the text ends.
constexpr int64_t kSlack = 32;

struct Character {
  Class kind;
  int length;  // in bytes
};

inline bool continues(byte b) { return (b & 0xC0) == 0x80; }

// The character at p < end. Only well-formed UTF-8 counts (no overlong forms, no surrogates, nothing past U+10FFFF).
inline Character character_at(const byte* table, const byte* p, const byte* end) {
  const byte lead = p[0];
  if (lead < 0x80) return {Class(table[lead]), 1};
  const int64_t left = end - p;
  if (lead >= 0xC2 && lead < 0xE0 && left >= 2 && continues(p[1]))
    return {Class(table[(lead & 0x1F) << 6 | (p[1] & 0x3F)]), 2};
  if (lead >= 0xE0 && lead < 0xF0 && left >= 3 && continues(p[1]) && continues(p[2])) {
    const uint32_t code = (lead & 0x0F) << 12 | (p[1] & 0x3F) << 6 | (p[2] & 0x3F);
    if (code >= 0x800 && (code < 0xD800 || code >= 0xE000)) return {Class(table[code]), 3};
  }
  if (lead >= 0xF0 && lead < 0xF5 && left >= 4 && continues(p[1]) && continues(p[2]) && continues(p[3])) {
    const uint32_t code = (lead & 0x07) << 18 | (p[1] & 0x3F) << 12 | (p[2] & 0x3F) << 6 | (p[3] & 0x3F);
    if (code >= 0x10000 && code < 0x110000) return {Class(table[code]), 4};
  }
  return {kOther, 1};
}

// The end of the run of one class that starts at p.
inline const byte* run_end(const byte* table, const byte* p, const byte* end, Class kind) {
  while (p < end) {
    const Character next = character_at(table, p, end);
    if (next.kind != kind) break;
    p += next.length;
  }
  return p;
}

// A run of spaces gives its last one to the word behind it: \s+(?!\S) stops before it, unless it is the only one.
inline const byte* spaces_end(const byte* table, const byte* p, const byte* end) {
  const byte *last = p, *q = p;
  while (q < end) {
    const Character next = character_at(table, q, end);
    if (next.kind != kSpace) return last > p ? last : q;
    last = q;
    q += next.length;
  }
  return q;
}

// 's 'd 'm 't 'll 've 're: the length of the contraction at p, or 0.
inline int contraction(const byte* p, const byte* end) {
  if (end - p < 2) return 0;
  const byte a = p[1];
  if (a == 's' || a == 'd' || a == 'm' || a == 't') return 2;
  if (end - p < 3) return 0;
  const byte b = p[2];
  return ((a == 'l' && b == 'l') || (a == 'v' && b == 'e') || (a == 'r' && b == 'e')) ? 3 : 0;
}

// The end of the word that starts at p < end, by the definition above.
inline const byte* word_end_slow(const byte* table, const byte* p, const byte* end) {
  if (*p == '\'')
    if (const int length = contraction(p, end)) return p + length;
  const byte* start = p + (*p == ' ' && p + 1 < end);
  const Character first = character_at(table, start, end);
  if (first.kind == kSpace) return spaces_end(table, p, end);
  return run_end(table, start + first.length, end, first.kind);
}

// How many ASCII letters follow one another from p on, at most 16, or -1 when the character behind them is not ASCII
// and so may be a letter too. Reads 16 bytes.
inline int ascii_letters(const byte* p) {
#if defined(__SSE2__)
  const __m128i text = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  // Lower case, then moved so that a..z are the 26 smallest signed bytes.
  const __m128i lower = _mm_or_si128(text, _mm_set1_epi8(0x20));
  const __m128i moved = _mm_sub_epi8(lower, _mm_set1_epi8(char('a' + 128)));
  const int letters = _mm_movemask_epi8(_mm_cmplt_epi8(moved, _mm_set1_epi8(-128 + 26)));
  const int count = __builtin_ctz(~letters);  // bit 16 and up are set in ~letters: at most 16
  return (_mm_movemask_epi8(text) >> count) & 1 ? -1 : count;
#else
  int count = 0;
  while (count < 16 && byte((p[count] | 0x20) - 'a') < 26) ++count;
  return count < 16 && p[count] >= 0x80 ? -1 : count;
#endif
}

// The same end, quickly where the word is up to 15 ASCII letters, as four of five are in English. kSlack bytes from p
// on must be readable, though they need not belong to the text.
inline const byte* word_end(const byte* table, const byte* p, const byte* end) {
  const byte* start = p + (*p == ' ');
  const int letters = ascii_letters(start);
  if (letters > 0 && letters < 16) {
    const byte* stop = start + letters;
    if (stop <= end) return stop;
    if (start < end) return end;
  }
  return word_end_slow(table, p, end);
}

// The class of the character that ends at p > begin; false when bytes around p are not whole characters.
inline bool class_before(const byte* table, const byte* begin, const byte* p, Class* kind) {
  const byte* start = p - 1;
  while (start > begin && p - start < 4 && continues(*start)) --start;
  const Character found = character_at(table, start, p);
  *kind = found.kind;
  return start + found.length == p && (*start < 0x80 || found.length > 1);
}

// Whether every splitting of the text has a boundary at begin < p < end, so that both sides can be split alone. Between
// different classes there is one, except behind a space, which may belong to what follows, and between an apostrophe
// (or any other) and a letter, which may be a contraction.
inline bool is_cut(const byte* table, const byte* begin, const byte* p, const byte* end) {
  if (continues(*p)) return false;
  Class before;
  if (!class_before(table, begin, p, &before) || before == kSpace) return false;
  const Character after = character_at(table, p, end);
  if (*p >= 0x80 && after.length == 1) return false;  // broken off or invalid: the next bytes may decide
  return after.kind != before && !(before == kOther && after.kind == kLetter);
}

}  // namespace fuselm
