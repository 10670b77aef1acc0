// Two threads write records of equal words while two others read them: whoever reads one gets equal words, or none.
// Prints how many reads there were that found a record whole, that found none, and that found a torn one.
#include <cstdio>
#include <thread>
#include <vector>

#include "word_cache.h"

using namespace fuselm;

constexpr int kWords = 16, kRecords = 4, kTurns = 2'000'000;

Record<kWords> records[kRecords];
std::atomic<int64_t> whole, none, torn;

void write_records(uint64_t seed) {
  for (uint64_t turn = 0; turn < kTurns; ++turn) {
    uint64_t words[kWords];
    for (uint64_t& word : words) word = 2 * turn + seed;
    words[kWords - 1] = 7;  // always the same: what changes there is the number of writes alone
    records[turn % kRecords].write(words);
  }
}

void read_records() {
  int64_t found[3] = {};
  for (uint64_t turn = 0; turn < kTurns; ++turn) {
    uint64_t words[kWords];
    if (!records[turn % kRecords].read(words)) {
      ++found[1];
      continue;
    }
    bool equal = true;
    for (int i = 0; i < kWords - 1; ++i) equal &= words[i] == words[0];
    ++found[equal ? 0 : 2];
  }
  whole += found[0], none += found[1], torn += found[2];
}

int main() {
  std::vector<std::thread> threads;
  for (uint64_t seed : {0, 1}) threads.emplace_back(write_records, seed), threads.emplace_back(read_records);
  for (std::thread& thread : threads) thread.join();
  std::printf("%ld %ld %ld\n", long(whole), long(none), long(torn));
}
