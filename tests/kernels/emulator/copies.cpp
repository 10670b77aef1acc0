// The copy engine and barriers that count bytes: what travels while threads go on.
//
// Nobody may count on when a copy is made. So in some launches it is made at once, which shows where memory is still in
// use, and in others not before all threads wait, the latest first, which shows who has not waited for it.
#include "fibers.h"

namespace emulated {
namespace {

// As it lies in 8 bytes of shared memory.
struct Barrier {
  int32_t bytes;           // announced and not there, or there and not announced
  uint16_t missing;        // arrivals
  uint16_t expected : 15;  // arrivals of a phase
  uint16_t parity : 1;     // of the phase that is not over
};
static_assert(sizeof(Barrier) == 8, "a barrier is a word of 64 bits");

std::deque<Copy> under_way;

Barrier& barrier_at(uint32_t number) { return *static_cast<Barrier*>(shared_pointer(number)); }

void end_phase_if_complete(Barrier& barrier) {
  if (barrier.missing > 0 || barrier.bytes != 0) return;
  barrier.missing = barrier.expected;
  barrier.parity ^= 1;
  ++progress;
}

void make(const Copy& copy) {
  std::memcpy(copy.to, copy.from != nullptr ? copy.from : &copy.number, copy.bytes);
  if (copy.barrier == nullptr) return;
  Barrier& barrier = *static_cast<Barrier*>(copy.barrier);
  barrier.bytes -= static_cast<int32_t>(copy.bytes);
  end_phase_if_complete(barrier);
}

void begin(const Copy& copy) {
  if (prompt) {
    make(copy);
  } else {
    under_way.push_back(copy);
  }
}

void check_run(const void* to, const void* from, uint32_t bytes) {
  if ((number(to) | number(from) | bytes) % 16 != 0)
    wrong("the copy engine moves multiples of 16 bytes that lie there");
}

}  // namespace

void init_barrier(uint32_t barrier, uint32_t arrivals) {
  barrier_at(barrier) = {0, static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0};
}

void expect_bytes(uint32_t number, uint32_t bytes) {
  Barrier& barrier = barrier_at(number);
  if (barrier.missing == 0) wrong("a thread arrives at a barrier that waits for none");
  barrier.bytes += static_cast<int32_t>(bytes);
  --barrier.missing;
  ++progress;
  end_phase_if_complete(barrier);
}

bool is_passed(uint32_t number, uint32_t parity) {
  if (barrier_at(number).parity != parity) return true;
  yield();
  return false;
}

void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  check_run(shared_pointer(to), from, bytes);
  begin({shared_pointer(to), from, bytes, &barrier_at(barrier), 0.0f});
}

void send(uint32_t to, float value, uint32_t barrier) {
  if (block_of(shared_pointer(to)).alive == 0) wrong("a number is sent to a block that has ended");
  begin({shared_pointer(to), nullptr, sizeof value, &barrier_at(barrier), value});
}

bool bring_one() {
  if (under_way.empty()) return false;
  const Copy latest = under_way.back();
  under_way.pop_back();
  if (latest.from == nullptr && block_of(latest.to).alive == 0) wrong("a number arrives at a block that has ended");
  make(latest);
  ++progress;
  return true;
}

void store_bulk(void* to, uint32_t from, uint32_t bytes) {
  check_run(to, shared_pointer(from), bytes);
  now->stores.push_back({to, shared_pointer(from), bytes, nullptr, 0.0f});
  if (prompt) make(now->stores.back());
}

void wait_for_stores(int pending) {
  for (; now->stores.size() > static_cast<size_t>(pending); now->stores.pop_front()) {
    if (!prompt) make(now->stores.front());
  }
}

void copy_async(uint32_t to, const void* from) {
  check_run(shared_pointer(to), from, 16);
  now->open.push_back({shared_pointer(to), from, 16, nullptr, 0.0f});
  if (prompt) make(now->open.back());
}

void commit_copies() {
  now->copies.push_back(std::move(now->open));
  now->open.clear();
}

void wait_for_copies(int pending) {
  for (; now->copies.size() > static_cast<size_t>(pending); now->copies.pop_front()) {
    for (const Copy& copy : now->copies.front()) {
      if (!prompt) make(copy);
    }
  }
}

void check_left_nothing(const Fiber& fiber) {
  if (!fiber.stores.empty()) wrong("a thread ends before its stores have left shared memory");
  if (!fiber.open.empty()) wrong("a thread ends with copies that it has not committed");
  for (const auto& group : fiber.copies) {
    if (!group.empty()) wrong("a thread ends before its copies are there");
  }
}

void check_nothing_is_under_way() {
  if (!under_way.empty()) wrong("a copy is under way to a block that has ended");
}

}  // namespace emulated
